"""Jobs of this user that ferroflow submitted, as any process finds them by their comment; and their end.

It does not import dask-jobqueue.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ferroflow_dask.clients import workers_of
from ferroflow_dask.deploy.local import connect
from ferroflow_dask.exceptions import ClusterError, UsageError

_MARK = "ferroflow"
#: Number, name, state, reason, time left, nodes and comment.
_FORMAT = "%i|%j|%T|%r|%L|%N|%k"
#: How long Slurm, or a scheduler, may take to answer [s].
_COMMAND_S, _SCHEDULER_S = 60.0, 3.0


def comment_of(scheduler: str | None, name: str | None) -> str:
    """Return the comment by which a job is found: it has the address of its scheduler and its own name."""
    return f"{_MARK} {scheduler} {name}"


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A job as Slurm lists it.

    Parameters
    ----------
    job_id, name : str
    state : str
        With its reason, while it is pending.
    time_left : str
        As Slurm writes it, like `29:30`.
    nodes : str
        Empty while it is pending.
    scheduler : str
        Address of the scheduler that its workers connect to.
    worker : str
        Name of its worker, or the start of the names of its workers.
    """

    job_id: str
    name: str
    state: str
    time_left: str
    nodes: str
    scheduler: str
    worker: str


def listed_jobs() -> list[ListedJob]:
    """Return this user's jobs that ferroflow submitted and that have not ended, oldest first.

    Raises
    ------
    ClusterError
        Slurm does not answer.
    """
    lines = _call("squeue", "--noheader", f"--user={os.getuid()}", f"--format={_FORMAT}").splitlines()
    found = []
    for job_id, name, state, reason, time_left, nodes, comment in (
        line.split("|", 6) for line in lines if line.count("|") >= 6
    ):
        mark, *rest = comment.split()
        if mark == _MARK and len(rest) == 2:
            told = f"{state} ({reason})" if state == "PENDING" else state
            found.append(ListedJob(job_id, name, told, time_left, nodes, *rest))
    return sorted(found, key=lambda job: int(job.job_id))


def connected_workers(jobs: Iterable[ListedJob]) -> dict[str, list[str] | None]:
    """Return the names of the workers that have connected to each scheduler; None if it does not answer."""
    found: dict[str, list[str] | None] = {}
    for address in dict.fromkeys(job.scheduler for job in jobs):
        try:
            with connect(address, _SCHEDULER_S, needs_workers=False) as client:
                found[address] = [str(worker["name"]) for worker in workers_of(client).values()]
        except ClusterError:
            found[address] = None
    return found


def n_workers(job: ListedJob, connected: Mapping[str, Sequence[str] | None]) -> int | None:
    """Return how many workers of a job have connected; None if its scheduler does not answer."""
    names = connected[job.scheduler]
    if names is None:
        return None
    return sum(name == job.worker or name.startswith(f"{job.worker}-") for name in names)


def cancel_jobs(job_ids: Sequence[str] = ()) -> list[ListedJob]:
    """Cancel some jobs, or all and their schedulers, which would replace them; return the jobs.

    Raises
    ------
    UsageError
        A job is not among those that `listed_jobs` returns.
    ClusterError
        Slurm does not answer.
    """
    jobs = listed_jobs()
    if unknown := set(job_ids) - {job.job_id for job in jobs}:
        raise UsageError(
            f"job {min(unknown)} must be a job of ferroflow that is pending or running; "
            "`ferroflow slurm status` lists these, and `ferroflow slurm cancel` cancels all"
        )
    cancelled = [job for job in jobs if job.job_id in job_ids] if job_ids else jobs
    if not job_ids:
        for address in dict.fromkeys(job.scheduler for job in jobs):
            _close_scheduler(address)
    if cancelled:
        _call("scancel", *(job.job_id for job in cancelled))
    return cancelled


def _close_scheduler(address: str) -> None:
    try:
        with connect(address, _SCHEDULER_S, needs_workers=False) as client:
            client.shutdown()
    except ClusterError:
        return  # it ended, or is not reachable from here


def _call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMMAND_S)
    except FileNotFoundError as error:
        raise ClusterError(f"there is no {command[0]} here; run this on a login node") from error
    except subprocess.SubprocessError as error:
        told = getattr(error, "stderr", None) or str(error)
        raise ClusterError(f"{command[0]} failed: {' '.join(str(told).split())}") from error
    return done.stdout
