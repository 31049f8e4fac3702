"""The line about a cluster's jobs that run and wait. It does not import dask-jobqueue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

#: Time between two lines about the same jobs, where lines stay [s].
_LINE_S = 30.0
#: Names that a line shows.
_MOST_NAMES = 8


class ClusterOfJobs(Protocol):
    """The part of `SlurmCluster` that the line needs."""

    @property
    def worker_spec(self) -> Mapping[str, Any]:
        """Jobs that should exist, by name."""

    @property
    def workers(self) -> Mapping[str, Any]:
        """Jobs that were submitted, by name; each is a `job.Job`."""


def rarely(tell: Callable[[str], object]) -> Callable[[str], None]:
    """Return a function that passes on a line every 30 s, and drops those between."""
    last_s = time.monotonic()

    def sometimes(line: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _LINE_S:
            last_s = time.monotonic()
            tell(line)

    return sometimes


def in_numbers(cluster: ClusterOfJobs) -> str:
    """Return how many jobs run and wait, like `1 running, 2 pending`."""
    n_running = len(_running(cluster))
    return f"{n_running} running, {len(cluster.worker_spec) - n_running} pending"


def in_queue(cluster: ClusterOfJobs) -> str:
    """Return which jobs run and wait, like `0 of 2 jobs running; 32, 33 PENDING (BeginTime)`."""
    running = _running(cluster)
    by_state: dict[str, list[str]] = {}
    for name in cluster.worker_spec:
        job = cluster.workers.get(name)
        if name not in running and job is not None and job.job_id is not None:
            by_state.setdefault(job.last_state, []).append(job.job_id)
    groups = [f"; {listed(sorted(job_ids, key=int))} {state}" for state, job_ids in by_state.items()]
    return f"{len(running)} of {len(cluster.worker_spec)} jobs running{''.join(groups)}"


def _running(cluster: ClusterOfJobs) -> set[str]:
    """Return the jobs of which a worker has connected."""
    return {
        name for name in cluster.worker_spec if getattr(cluster.workers.get(name), "has_connected", False)
    }


def listed(names: Sequence[str]) -> str:
    """Return names with commas, only the first of many."""
    n_more = len(names) - _MOST_NAMES
    more = f" and {n_more} more" if n_more > 0 else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"
