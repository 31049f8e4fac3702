"""Waiting for the workers of a cluster's jobs: what is waited for, and the error if some do not connect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ferroflow_dask.deploy.slurm.job import Job, in_words, states_of
from ferroflow_dask.deploy.slurm.queue_line import ClusterOfJobs, in_queue, listed
from ferroflow_dask.exceptions import ClusterError

#: Time between two looks at the workers [s].
_POLL_S = 0.1


class AwaitedCluster(ClusterOfJobs, Protocol):
    """The part of `SlurmCluster` that waiting needs."""

    @property
    def scheduler_info(self) -> Mapping[str, Any]:
        """The scheduler's identity, with the workers that have connected."""

    @property
    def given_up(self) -> Sequence[str]:
        """Why jobs are not submitted any more."""

    def workers_of(self, jobs: Iterable[str]) -> list[str]:
        """Return the names of the workers of some jobs."""

    def job_of(self, worker: object) -> str:
        """Return the job of a worker, both by name."""


async def all_connected(
    cluster: AwaitedCluster, timeout: float, tell: Callable[[str], object] = lambda _: None
) -> None:
    """Return once all workers of all jobs have connected; see `SlurmCluster.wait_for_jobs`."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    while True:
        wanted = set(cluster.workers_of(cluster.worker_spec))
        names = {str(worker["name"]) for worker in cluster.scheduler_info["workers"].values()}
        missing = wanted - names
        if cluster.given_up:
            raise ClusterError(cluster.given_up[-1])
        if not missing:
            return
        if clock() > deadline:
            late = sorted({cluster.job_of(worker) for worker in missing})
            told = await _told_of([cluster.workers[job] for job in late if job in cluster.workers])
            raise ClusterError(
                f"{len(missing)} of {len(wanted)} workers have not connected within {timeout:g} s: {told}"
                f"{_others(names - wanted)}"
            )
        tell(in_queue(cluster))
        await asyncio.sleep(_POLL_S)


async def _told_of(jobs: Sequence[Job]) -> str:
    """Describe the states of late jobs, as Slurm reports them."""
    states = await states_of([job.job_id for job in jobs if job.job_id is not None])
    if states is None:
        return "Slurm does not answer"
    told = [f"job {job_id} is {in_words(*what)}" for job_id, what in states.items()]
    return ", ".join(told) or "their jobs are not submitted"


def _others(names: Collection[str]) -> str:
    """Return the end of a message with the unexpected names of connected workers, if any."""
    return f"; connected under other names: {listed(sorted(names))}" if names else ""
