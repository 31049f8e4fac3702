"""Small graphs, and virtual clusters that run them to a checked end."""

from __future__ import annotations

import math
from typing import Any

from ferroflow_dask.topology import Host, Link, Runtime, Topology, Worker
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

#: One way [s], and sums with it are exact in binary.
L = 1 / 1024


def finished(cluster: VirtualCluster) -> VirtualCluster:
    """Run a cluster to its end, and check it."""
    cluster.run()
    cluster.check()
    return cluster


def run(graph: dict[Any, VirtualTask], workers: int = 1, **options: Any) -> VirtualCluster:
    cluster = VirtualCluster(workers, **{"latency_s": L, "bandwidth": math.inf, **options})
    cluster.submit(graph)
    return finished(cluster)


def independent(n: int, duration_s: float = 0.5, **more: Any) -> dict[Any, VirtualTask]:
    return {("t", i): VirtualTask(duration_s, **more) for i in range(n)}


def chain(n: int, duration_s: float = 0.5) -> dict[Any, VirtualTask]:
    return {("c", i): VirtualTask(duration_s, (("c", i - 1),) if i else ()) for i in range(n)}


def pinned(n: int) -> dict[Any, VirtualTask]:
    """Return tasks that prefer worker 0; their cost is declared."""
    preference = {"workers": [0], "allow_other_workers": True, "ferroflow_cost": 0.5}
    return independent(n, annotations=preference)


def bundling_cluster(workers: int, threads: int = 1, **options: Any) -> VirtualCluster:
    """Return a cluster that bundles short tasks, and whose messages have the costs of Dask's."""
    host = Host("here", 1e9, (Worker(threads),) * workers, inside=Link(1e-4, 1e9))
    return VirtualCluster.on(Topology([host], runtime=Runtime()), **{"validate": True, **options})
