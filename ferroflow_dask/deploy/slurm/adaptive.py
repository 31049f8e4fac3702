"""Adaptive scaling in units of jobs of one kind.

`distributed.deploy.Adaptive` adds and removes workers. If a job has several workers, removing one would end
the others, which may be needed.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Generator, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distributed.deploy.adaptive import Adaptive

from ferroflow_dask.counts import checked_count
from ferroflow_dask.deploy.slurm.kinds import JobKind, kind_of
from ferroflow_dask.device_reports import GPU_RESOURCE
from ferroflow_dask.exceptions import UsageError

if TYPE_CHECKING:
    from distributed.core import Status
    from distributed.scheduler import Scheduler, TaskState
    from tornado.ioloop import IOLoop


def job_limits(kinds: Mapping[str, JobKind], given: Mapping[str, int | None]) -> dict[str, tuple[int, float]]:
    """Return the least and the most jobs of each kind.

    Parameters
    ----------
    kinds : mapping
        Of the cluster.
    given : mapping
        Arguments of `SlurmCluster.adapt`: `minimum` and `maximum` are workers of jobs without GPUs,
        `minimum_jobs` and `maximum_jobs` such jobs, and `minimum_gpu_jobs` and `maximum_gpu_jobs` others.

    Raises
    ------
    UsageError
        They contradict each other, are no numbers, or are of jobs that the cluster does not have.
    """
    limits = {
        name: checked_count(name, value)
        for name, value in given.items()
        if value is not None and not (name.startswith("maximum") and value == math.inf)
    }
    for unit in ("", "_jobs", "_gpu_jobs"):
        _check_order(limits, unit)
    for end in sorted({"minimum", "maximum"} & limits.keys()):
        if f"{end}_jobs" in limits:
            raise UsageError(f"{end} is in workers, and {end}_jobs in jobs; give one of them")
        limits[f"{end}_jobs"] = math.ceil(limits.pop(end) / kinds["cpu"].processes)
    _check_order(limits, "_jobs")
    if any("gpu" in name for name in limits):
        kind_of(kinds, "gpu")
    units = {"cpu": "_jobs", "gpu": "_gpu_jobs"}
    return {
        kind: (limits.get(f"minimum{units[kind]}", 0), limits.get(f"maximum{units[kind]}", math.inf))
        for kind in kinds
    }


def _check_order(limits: Mapping[str, int], unit: str) -> None:
    least, most = limits.get(f"minimum{unit}", 0), limits.get(f"maximum{unit}", math.inf)
    if least > most:
        raise UsageError(f"minimum{unit} is {least} and maximum{unit} {most}; no number is in between")


class ScaledCluster(Protocol):
    """The part of `SlurmCluster` that adaptive scaling needs."""

    scheduler: Any
    scheduler_comm: Any
    loop: IOLoop | None
    worker_spec: MutableMapping[str, Any]
    workers: Mapping[str, Any]

    @property
    def status(self) -> Status:
        """Status of the cluster."""

    @property
    def may_submit(self) -> bool:
        """Whether jobs may be submitted."""

    @property
    def kinds(self) -> Mapping[str, JobKind]:
        """The kinds of jobs."""

    @property
    def adaptives(self) -> Sequence[JobAdaptive]:
        """The `JobAdaptive` of each kind."""

    def jobs_of(self, kind: str) -> list[str]:
        """Return the names of the jobs of a kind that should exist."""

    def workers_of(self, jobs: Iterable[str]) -> list[str]:
        """Return the names of the workers of some jobs."""

    def job_of(self, worker: object) -> str:
        """Return the job of a worker, both by name."""

    def connected_jobs(self) -> set[str]:
        """Return the jobs of which a worker has connected."""

    def set_jobs(self, kind: str, number: int) -> None:
        """Plan a number of jobs of a kind."""

    async def correct_and_log(self) -> None:
        """Submit and cancel jobs as planned."""

    async def _correct_state(self) -> None: ...


class JobsOfKind:
    """The jobs of one kind in a cluster, with the interface that `Adaptive` expects of a cluster.

    Parameters
    ----------
    cluster : ScaledCluster
    kind : str
    """

    def __init__(self, cluster: ScaledCluster, kind: str) -> None:
        self.whole = cluster
        self.kind = kind

    @property
    def status(self) -> Status:
        """Of the cluster."""
        return self.whole.status

    @property
    def loop(self) -> IOLoop | None:
        """Of the cluster."""
        return self.whole.loop

    @property
    def scheduler_comm(self) -> Any:
        """Of the cluster."""
        return self.whole.scheduler_comm

    @property
    def plan(self) -> set[str]:
        """Jobs that should exist."""
        return set(self.whole.jobs_of(self.kind))

    @property
    def requested(self) -> set[str]:
        """Jobs that were submitted."""
        return self.plan & set(self.whole.workers)

    @property
    def observed(self) -> set[str]:
        """Jobs whose workers have connected."""
        return self.plan & self.whole.connected_jobs()

    def scale(self, n: int) -> Awaitable[None]:
        """Have so many jobs, unless submitting has been given up, or the cluster closes."""
        if self.whole.may_submit:
            self.whole.set_jobs(self.kind, int(n))
        return self.whole.correct_and_log()

    def scale_down(self, jobs: Iterable[str]) -> Awaitable[None]:
        """Give up some jobs."""
        for job in jobs:
            self.whole.worker_spec.pop(job, None)
        return self.whole.correct_and_log()

    def __await__(self) -> Generator[Any, Any, JobsOfKind]:
        yield from self.whole._correct_state().__await__()
        return self


class JobAdaptive(Adaptive):
    """Asks for jobs of one kind as the work that is there needs them, and gives up those that it does not.

    Parameters
    ----------
    cluster : JobsOfKind
    **options
        Of `distributed.deploy.Adaptive`; `minimum` and `maximum` are jobs.
    """

    cluster: JobsOfKind  # type: ignore[assignment]

    def stop(self, reason: str = "unknown") -> None:
        """End it, and that of the other kind of jobs."""
        # Stopped before, it is nobody's any more, and the other kind's may be of a later `adapt`.
        if self.state in ("inactive", "stopped"):
            return
        super().stop(reason=reason)
        for other in self.cluster.whole.adaptives:
            other.stop(reason=reason)

    async def target(self) -> int:
        """Return how many jobs there should be."""
        jobs, cluster = self.cluster, self.cluster.whole
        kind = cluster.kinds[jobs.kind]
        if not cluster.may_submit:
            return len(jobs.plan)
        if len(cluster.kinds) == 1:
            return math.ceil(int(await super().target()) / kind.processes)
        n_plain, n_gpu = _unfinished(cluster.scheduler)
        n_tasks = n_gpu if jobs.kind == "gpu" else n_plain
        needed = math.ceil(n_tasks / (kind.threads * kind.processes))
        if jobs.kind != "gpu":
            needed = min(needed, math.ceil(await super().target() / kind.processes))
        return max(needed, len(jobs.observed) - len(await self._idle()))

    async def workers_to_close(self, target: int) -> list[str]:
        """Return jobs that can be given up at little cost, so many that `target` are left."""
        idle = await self._idle()
        return idle[: max(0, len(self.cluster.observed) - target)]

    async def _idle(self) -> list[str]:
        """Return jobs none of whose workers does anything and whose data fit elsewhere, least data first."""
        cluster = self.cluster.whole
        names = cluster.scheduler.workers_to_close(
            key=lambda worker: cluster.job_of(worker.name), attribute="name"
        )
        mine = self.cluster.observed
        return [job for job in dict.fromkeys(map(cluster.job_of, names)) if job in mine]

    async def scale_down(self, workers: list[str]) -> None:  # type: ignore[override]
        """Give up jobs, once what their workers hold is elsewhere."""
        if workers:
            cluster = self.cluster.whole
            names = cluster.workers_of(job for job in workers if job in cluster.worker_spec)
            await self.scheduler.retire_workers(names=names, remove=True, close_workers=True)
            await self.cluster.scale_down(workers)


def _unfinished(scheduler: Scheduler) -> tuple[int, int]:
    """Return how many tasks can run now or are running: those for any worker, and those for GPUs."""
    restricted = [
        *scheduler.unrunnable,
        *(task for ws in scheduler.workers.values() for task in ws.processing),
    ]
    n_gpu = sum(map(_needs_gpu, restricted))
    return len(scheduler.queued) + len(restricted) - n_gpu, n_gpu


def _needs_gpu(task: TaskState) -> bool:
    return GPU_RESOURCE in (task.resource_restrictions or ())
