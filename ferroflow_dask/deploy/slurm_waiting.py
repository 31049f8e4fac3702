"""Waiting for the workers of a cluster's jobs, and what is told of those that do not come."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ferroflow_dask.deploy.slurm_job import Job, in_words, states_of
from ferroflow_dask.exceptions import ClusterError

if TYPE_CHECKING:
    from ferroflow_dask.deploy.slurm import SlurmCluster

#: Time between two looks at the workers [s].
_POLL_S = 0.1
#: Workers that an error names.
_MOST_NAMES = 8


async def all_connected(cluster: SlurmCluster, timeout: float) -> None:
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
        await asyncio.sleep(_POLL_S)


async def _told_of(jobs: Sequence[Job]) -> str:
    """Return what Slurm says of jobs that were waited for."""
    states = await states_of([job.job_id for job in jobs if job.job_id is not None])
    if states is None:
        return "Slurm does not answer"
    told = [f"job {job_id} is {in_words(*what)}" for job_id, what in states.items()]
    return ", ".join(told) or "their jobs are not submitted"


def _others(names: Collection[str]) -> str:
    """Return which workers are there that nobody waits for, as the end of a message; nothing if none are."""
    shown, n_more = sorted(names)[:_MOST_NAMES], len(names) - _MOST_NAMES
    more = f" and {n_more} more" if n_more > 0 else ""
    return f"; connected under other names: {', '.join(shown)}{more}" if shown else ""
