"""`SlurmCluster`: dask-jobqueue's `SLURMCluster` with two kinds of jobs and corrections.

This module, `job` and `adaptive` use private names of dask-jobqueue and of `distributed.SpecCluster`;
`tests/test_slurm_seams.py` lists them. Corrected are, in dask-jobqueue 0.9: a rejected submission is only
logged, a lost job is not replaced, jobs that end before their workers connect are not noticed, and `adapt`
counts workers instead of jobs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

import dask
from dask.utils import parse_timedelta
from dask_jobqueue.slurm import SLURMCluster
from distributed.core import Status
from distributed.deploy.cluster import Cluster
from tornado.ioloop import PeriodicCallback

from ferroflow_dask.deploy.slurm.adaptive import JobAdaptive, JobsOfKind, job_limits
from ferroflow_dask.deploy.slurm.job import ALIVE, HOPELESS, Job, end_of_log, in_words, states_of
from ferroflow_dask.deploy.slurm.kinds import JobKind, kind_of
from ferroflow_dask.deploy.slurm.waiting import all_connected
from ferroflow_dask.exceptions import ClusterError

logger = logging.getLogger("ferroflow_dask")
scheduler_logger = logging.getLogger("distributed.scheduler")

#: Time between two looks at jobs whose workers have not connected [s].
_POLL_S = 5.0
#: So many jobs in a row may end before a worker of theirs connects; then no more are submitted.
_MOST_FAILED_STARTS = 3
#: `cluster-cpu-3` is a job, and its worker if it has one; `cluster-cpu-3-1` is one of several.
_WORKER = re.compile(r"(?P<job>.+-(?:cpu|gpu)-\d+)(?:-\d+)?")
#: What jobs of all kinds have from the cluster; the interface only where they say none.
_COMMON = ("config_name", "interface", "protocol", "security")
#: Files with what workers of an encrypted cluster need.
_KEYS = ("_job_ca_file", "_job_cert", "_job_key")


def _is_no_broadcast(record: logging.LogRecord) -> bool:
    """Return False for failed broadcasts: a closing scheduler sends one to workers of cancelled jobs."""
    return not str(record.msg).startswith("broadcast to")


class SlurmCluster(SLURMCluster):
    """A cluster of SLURM jobs; made by `slurm_cluster`.

    Parameters
    ----------
    kind : JobKind
    gpu_kind : JobKind, optional
    **of_cluster
        Of `dask_jobqueue.SLURMCluster`.

    Attributes
    ----------
    failures : deque of str
        What went wrong with jobs, the last of it.
    given_up : list of str
        Why jobs that were asked for last are not tried any more.
    """

    job_cls = Job
    #: In this process.
    scheduler: Any

    def __init__(self, kind: JobKind, gpu_kind: JobKind | None = None, **of_cluster: Any) -> None:
        self._kinds = {"cpu": kind} | ({} if gpu_kind is None else {"gpu": gpu_kind})
        self._specs: dict[str, dict[str, Any]] = {}
        self._adaptives: list[JobAdaptive] = []
        #: Jobs in a row that ended before a worker of theirs connected, or were refused.
        self._failed_starts = 0
        self.given_up: list[str] = []
        self._n_named = 0
        self._n_waiting = 0
        self.failures: deque[str] = deque(maxlen=100)
        super().__init__(n_workers=0, **of_cluster, **kind.arguments)

    def _specify(self) -> dict[str, dict[str, Any]]:
        """Return the worker specification of each kind, made once."""
        if not self._specs:
            # Security and protocol are those of the scheduler; the rest is of the kind.
            common = {name: self._job_kwargs[name] for name in _COMMON}
            for name, kind in self._kinds.items():
                options = kind.options(common)
                suffixes = [f"-{i}" for i in range(kind.processes)] if kind.processes > 1 else [""]
                self._specs[name] = {"cls": self.job_cls, "options": options, "group": suffixes}
        return self._specs

    async def _start(self) -> None:
        self.periodic_callbacks.setdefault("jobs", PeriodicCallback(self._look, _POLL_S * 1000))
        await super()._start()

    # Scaling

    def job_script(self, kind: str = "cpu") -> str:
        """Return the batch script of a kind of job: `cpu` or `gpu`."""
        options = self._specify()[kind]["options"]
        return str(Job(self.scheduler.address, name=f"{self._name}-{kind}-0", **options).job_script())

    def scale(  # type: ignore[override] # a job may be lost, or refused: more is said
        self,
        n: int | None = None,
        jobs: int | None = None,
        memory: str | None = None,
        cores: int | None = None,
        *,
        gpu_jobs: int | None = None,
    ) -> Awaitable[None] | None:
        """Have so many jobs, from now on: one that is lost is replaced. It ends `adapt`.

        Parameters
        ----------
        n : int, optional
            Workers, of jobs without GPUs.
        jobs : int, optional
            Jobs without GPUs; as many as there are if nothing is said of them.
        memory, cores : optional
            Of all of these together.
        gpu_jobs : int, optional
            Jobs with GPUs; as many as there are if left out.

        Raises
        ------
        ClusterError
            Slurm refused a job; the message has its words.
        UsageError
            There are no jobs with GPUs in this cluster, or the number makes no sense.
        """
        if self.status in (Status.closing, Status.closed, Status.failed):
            self.worker_spec.clear()  # closing scales to nothing
            return self._settled()
        wanted = {"cpu": self._kinds["cpu"].n_jobs(n, jobs, memory, cores)}
        if gpu_jobs is not None:
            wanted["gpu"] = kind_of(self._kinds, "gpu").n_jobs(jobs=gpu_jobs)
        self._begin_anew()
        self._stop_adapting("scaled")
        for kind, number in wanted.items():
            if number is not None:
                self.set_jobs(kind, number)
        return self._settled()

    def _begin_anew(self) -> None:
        """Forget failures: somebody asks for jobs."""
        self._failed_starts = 0
        self.given_up.clear()

    def _settled(self) -> Awaitable[None] | None:
        if self.asynchronous:
            corrected: Awaitable[None] = self._correct_state()
            return corrected
        self.sync(self._correct_state)
        return None

    def set_jobs(self, kind: str, number: int) -> None:
        """Plan so many jobs of a kind; `_correct_state` submits and cancels."""
        spec = self._specify()[kind]
        planned = self.jobs_of(kind)
        connected = self.connected_jobs()
        # Those that have not started are given up first, the newest first.
        newest_first = sorted(planned, key=lambda job: (job in connected, -planned.index(job)))
        for job in newest_first[: max(0, len(planned) - number)]:
            del self.worker_spec[job]
        for _ in range(number - len(planned)):
            self.worker_spec[f"{self._name}-{kind}-{self._n_named}"] = spec
            self._n_named += 1

    def adapt(  # type: ignore[override] # in jobs, of two kinds
        self,
        *,
        minimum_jobs: int | None = None,
        maximum_jobs: int | None = None,
        minimum_gpu_jobs: int | None = None,
        maximum_gpu_jobs: int | None = None,
        minimum: int | None = None,
        maximum: int | None = None,
        **options: Any,
    ) -> JobAdaptive:
        """Have as many jobs as the work that is there needs, within limits, from now on.

        Parameters
        ----------
        minimum_jobs, maximum_jobs : int, optional
            Jobs without GPUs; from 0 on, and without limit, where they are left out.
        minimum_gpu_jobs, maximum_gpu_jobs : int, optional
            Jobs with GPUs, which come for tasks that are annotated with the resource `GPU`.
        minimum, maximum : int, optional
            Workers without GPUs, instead of jobs.
        **options
            Of `distributed.deploy.Adaptive`: `interval`, `wait_count`, `target_duration`.

        Returns
        -------
        JobAdaptive
            That of jobs without GPUs; `stop()` ends it.

        Raises
        ------
        UsageError
            There are no jobs with GPUs in this cluster, or the limits make no sense.
        """
        jobs = {"minimum_jobs": minimum_jobs, "maximum_jobs": maximum_jobs}
        gpu_jobs = {"minimum_gpu_jobs": minimum_gpu_jobs, "maximum_gpu_jobs": maximum_gpu_jobs}
        workers = {"minimum": minimum, "maximum": maximum}
        limits = job_limits(self._kinds, {**jobs, **gpu_jobs, **workers})
        self._begin_anew()
        self._stop_adapting("adapted anew")
        self._adaptives = [
            JobAdaptive(
                JobsOfKind(self, kind),  # type: ignore[arg-type] # what Adaptive needs of a cluster
                minimum=least,
                maximum=most,
                **options,
            )
            for kind, (least, most) in limits.items()
        ]
        self._adaptive = self._adaptives[0]
        return self._adaptive

    def _stop_adapting(self, reason: str) -> None:
        for adaptive in self._adaptives:
            adaptive.stop(reason=reason)
        self._adaptives = []

    # What there is

    @property
    def has_given_up(self) -> bool:
        """Whether jobs failed so often that no more are submitted, until `scale` or `adapt` is called."""
        return self._failed_starts >= _MOST_FAILED_STARTS

    @property
    def may_submit(self) -> bool:
        """Whether jobs may be submitted: it is neither closing, nor have they failed too often."""
        return self.status == Status.running and not self.has_given_up

    @property
    def adaptives(self) -> Sequence[JobAdaptive]:
        """What scales jobs by the work that is there, one for each kind."""
        return self._adaptives

    @property
    def kinds(self) -> Mapping[str, JobKind]:
        """The kinds of jobs: `cpu`, and `gpu` if there are such."""
        return self._kinds

    def jobs_of(self, kind: str) -> list[str]:
        """Return the names of the jobs of a kind that should exist, oldest first."""
        spec = self._specify()[kind]
        return [name for name, known in self.worker_spec.items() if known is spec]

    def workers_of(self, jobs: Iterable[str]) -> list[str]:
        """Return the names of the workers of some jobs."""
        return [f"{job}{suffix}" for job in jobs for suffix in self.worker_spec[job]["group"]]

    def connected_jobs(self) -> set[str]:
        """Return the jobs of which some worker has connected."""
        return {self.job_of(worker["name"]) for worker in self.scheduler_info["workers"].values()}

    def job_of(self, worker: object) -> str:
        """Return the job of a worker, both by name."""
        match = _WORKER.fullmatch(str(worker))
        return str(worker) if match is None else match["job"]

    def wait_for_jobs(self, timeout: float | None = 600.0) -> Any:
        """Wait until all workers of all jobs have connected.

        Parameters
        ----------
        timeout : float or None, optional
            How long to wait [s]; None for ever.

        Raises
        ------
        ClusterError
            They have not within that time, or their jobs end as soon as they start; the message says what
            Slurm says of them.
        """
        return self.sync(self._wait_for_jobs, timeout)

    async def _wait_for_jobs(self, timeout: float | None) -> None:
        self._n_waiting += 1
        try:
            await all_connected(self, math.inf if timeout is None else timeout)
        finally:
            self._n_waiting -= 1

    # What is lost

    async def _correct_state_internal(self) -> None:
        try:
            await self._retire()
            await super()._correct_state_internal()
        except ClusterError as error:
            self.failures.append(str(error))  # not logged: it is told to whoever waits
            raise
        finally:
            for name, job in list(self.workers.items()):
                if job.status == Status.failed:  # not to be tried again and again
                    del self.workers[name]
                    self._failed_starts += 1
                    self._give_up(name)

    async def _retire(self) -> None:
        """Let workers of jobs that are given up hand on what they hold: SpecCluster asks jobs, by name."""
        if self.status == Status.running and self.scheduler_comm is not None:
            names = [str(worker["name"]) for worker in self.scheduler_info["workers"].values()]
            given_up = self.workers.keys() - self.worker_spec  # workers that others have added are not ours
            leaving = [name for name in names if self.job_of(name) in given_up]
            if leaving:
                await self.scheduler_comm.retire_workers(names=leaving, remove=True, close_workers=True)

    def _give_up(self, name: str) -> None:
        self.worker_spec.pop(name, None)
        self.given_up.append(self.failures[-1] if self.failures else "a job failed")

    async def correct_and_log(self) -> None:
        """Submit and cancel jobs as planned; errors are logged too, since nobody may wait for it."""
        try:
            await self._correct_state()
        except ClusterError as error:
            logger.warning(error)
            raise

    def _correct_soon(self) -> None:
        corrected = asyncio.ensure_future(self.correct_and_log())
        corrected.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _update_worker_status(self, op: str, message: Any) -> None:
        if op == "remove":
            name = self.job_of(self.scheduler_info["workers"][message]["name"])
            delay_s = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
            job = self.workers.get(name)
            asyncio.get_running_loop().call_later(delay_s, self._replace_if_lost, name, job)
        else:
            for worker in message["workers"].values():
                if job := self.workers.get(self.job_of(worker["name"])):
                    job.has_connected = True
            self._failed_starts = 0
            if self._adaptives:
                self.given_up.clear()  # it asks again for what it needs
        # Not SpecCluster's, which looks for a job by the name of a worker.
        Cluster._update_worker_status(self, op, message)

    def _replace_if_lost(self, name: str, job: Job | None) -> None:
        # Under its name there may be another job by now.
        is_there = job is not None and self.workers.get(name) is job
        if self.status != Status.running or not is_there or name in self.connected_jobs():
            return
        job = self.workers.pop(name)
        self._futures.add(asyncio.ensure_future(self._note_loss(job)))
        if self._adaptives:
            self.worker_spec.pop(name, None)  # whether another is needed is decided there
        else:
            self._correct_soon()

    async def _note_loss(self, job: Job) -> None:
        job_id = str(job.job_id)
        states = await states_of([job_id])
        told = "Slurm does not answer"
        if states is not None:
            told = f"it is {in_words(*states.get(job_id, ('gone', '')))}"
        self._note(f"all workers of job {job_id} ({job.job_name}) have left: {told}")
        await job.close()

    async def _look(self) -> None:
        """Look for jobs that ended before a worker of theirs connected, or that will never start."""
        silent = {job.job_id: name for name, job in self.workers.items() if not job.has_connected}
        silent.pop(None, None)
        if not silent or self.status != Status.running:
            return
        states = await states_of(list(silent))
        if states is None:
            return  # Slurm does not answer: nothing is known of any job
        for job_id, name in silent.items():
            state, reason = states.get(job_id, ("gone", ""))
            is_hopeless = reason in HOPELESS
            job = self.workers.get(name)
            if job is None or job.job_id != job_id or job.has_connected or name not in self.worker_spec:
                continue  # connected meanwhile, or is being cancelled
            if state in ALIVE and not is_hopeless:
                continue
            del self.workers[name]
            self._futures.add(asyncio.ensure_future(job.close()))
            self._failed_starts += 1
            is_last = is_hopeless or self.has_given_up
            told = in_words(state, reason)
            if is_hopeless:
                self._note(f"job {job_id} will never start: {told}", is_last)
            else:
                self._note(
                    f"job {job_id} ended before its workers connected: {told}{end_of_log(job)}", is_last
                )
            if is_last:
                self._give_up(name)
        self._correct_soon()

    def _note(self, message: str, is_raised: bool = False) -> None:
        """Keep what went wrong, and log it unless it is raised to somebody who waits for jobs."""
        self.failures.append(message)
        if not (is_raised and self._n_waiting):
            logger.warning(message)

    async def _close(self) -> None:
        self._stop_adapting("the cluster closes")
        scheduler_logger.addFilter(_is_no_broadcast)
        try:
            await super()._close()
        finally:
            scheduler_logger.removeFilter(_is_no_broadcast)
        for name in _KEYS:  # dask-jobqueue leaves open, and on disk, what it wrote of certificates
            if (file := getattr(self, name, None)) is not None:
                file.close()
