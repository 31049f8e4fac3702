"""What RMM's pool keeps of a GPU for later: CUDA counts it as taken, and it is free for the next result."""

from __future__ import annotations

import sys


def idle_nbytes(ordinal: int) -> int:
    """Return what RMM's pool has of a device's memory and nobody uses [B].

    The pool tells its size only: what is used of it, an adaptor around it counts, be it for statistics or to
    track allocations (`rmm_track_allocations` of dask-cuda). 0 without a pool, or where nobody counts.
    """
    mr = sys.modules.get("rmm.mr")  # who has not imported it has no pool of its
    if mr is None:
        return 0
    resource = mr.get_per_device_resource(ordinal)
    in_use: int | None = None
    while resource is not None and not isinstance(resource, mr.PoolMemoryResource):
        if isinstance(resource, mr.StatisticsResourceAdaptor):
            in_use = resource.allocation_counts.current_bytes
        elif isinstance(resource, mr.TrackingResourceAdaptor):
            in_use = resource.get_allocated_bytes()
        resource = getattr(resource, "upstream_mr", None)
    if resource is None or in_use is None:
        return 0
    return max(0, int(resource.pool_size()) - max(0, int(in_use)))
