"""`ReplacingCluster`: what becomes of jobs that are refused, lost, or end before their workers connect."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import dask
from dask.utils import parse_timedelta
from dask_jobqueue.slurm import SLURMCluster
from distributed.core import Status
from distributed.deploy.cluster import Cluster
from tornado.ioloop import PeriodicCallback

from ferroflow_dask.deploy.slurm.adaptive import JobAdaptive
from ferroflow_dask.deploy.slurm.job import ALIVE, HOPELESS, Job, end_of_log, in_words, states_of
from ferroflow_dask.deploy.slurm.refusals import setting_behind
from ferroflow_dask.exceptions import ClusterError

logger = logging.getLogger("ferroflow_dask")

#: Time between two looks at jobs whose workers have not connected [s].
_POLL_S = 5.0
#: So many jobs in a row may end before a worker of theirs connects; then no more are submitted.
_MOST_FAILED_STARTS = 3
#: `cluster-cpu-3` is a job, and its worker if it has one; `cluster-cpu-3-1` is one of several.
_WORKER = re.compile(r"(?P<job>.+-(?:cpu|gpu)-\d+)(?:-\d+)?")


class ReplacingCluster(SLURMCluster):
    """A cluster of jobs that replaces those that are lost, until too many fail.

    Attributes
    ----------
    failures : deque of str
        What went wrong with jobs, the last of it.
    given_up : list of str
        Why jobs that were asked for last are not tried any more.
    """

    #: In this process.
    scheduler: Any

    def __init__(self, **arguments: Any) -> None:
        self._adaptives: list[JobAdaptive] = []
        #: Jobs in a row that ended before a worker of theirs connected, or were refused.
        self._failed_starts = 0
        self._n_waiting = 0
        self.given_up: list[str] = []
        self.failures: deque[str] = deque(maxlen=100)
        super().__init__(**arguments)

    async def _start(self) -> None:
        self.periodic_callbacks.setdefault("jobs", PeriodicCallback(self._look, _POLL_S * 1000))
        await super()._start()

    def _begin_anew(self) -> None:
        """Forget failures: somebody asks for jobs."""
        self._failed_starts = 0
        self.given_up.clear()

    @property
    def has_given_up(self) -> bool:
        """Whether jobs failed so often that no more are submitted, until `scale` or `adapt` is called."""
        return self._failed_starts >= _MOST_FAILED_STARTS

    def _is_running(self) -> bool:
        """Return whether the cluster runs, and its scheduler, which others may close."""
        return self.status == Status.running and self.scheduler.status == Status.running

    @property
    def may_submit(self) -> bool:
        """Whether jobs may be submitted: it is neither closing, nor have they failed too often."""
        return self._is_running() and not self.has_given_up

    def connected_jobs(self) -> set[str]:
        """Return the jobs of which some worker has connected."""
        return {self.job_of(worker["name"]) for worker in self.scheduler_info["workers"].values()}

    def job_of(self, worker: object) -> str:
        """Return the job of a worker, both by name."""
        match = _WORKER.fullmatch(str(worker))
        return str(worker) if match is None else match["job"]

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
        if not self._is_running() or not is_there or name in self.connected_jobs():
            return
        job = self.workers.pop(name)
        if self._adaptives:
            self.worker_spec.pop(name, None)  # whether another is needed is decided there
        self._futures.add(asyncio.ensure_future(self._replace_lost(name, job)))

    async def _replace_lost(self, name: str, job: Job) -> None:
        """Submit the successor of a job without workers, cancel the job, and report both."""
        job_id = str(job.job_id)
        asked = asyncio.ensure_future(states_of([job_id]))
        with suppress(ClusterError):  # logged
            await self.correct_and_log()
        states = await asked
        told = "Slurm does not answer"
        if states is not None:
            state, reason = states.get(job_id, ("gone", ""))
            told = in_words(state, reason)
        lost = (
            f"job {job_id} was {told}"
            if states is not None and state not in ALIVE
            else (f"all workers of job {job_id} have left ({told})")
        )
        self._note(f"{lost}; {self._successor(name)}")
        await job.close()

    def _successor(self, name: str) -> str:
        """Return which job has the place of another one now."""
        successor = self.workers.get(name)
        if successor is not None and successor.job_id is not None:
            return f"job {successor.job_id} replaces it"
        return "the work that is left decides about another" if self._adaptives else "no job replaces it"

    async def _look(self) -> None:
        """Look for jobs that ended before a worker of theirs connected, or that will never start."""
        silent = {job.job_id: name for name, job in self.workers.items() if not job.has_connected}
        silent.pop(None, None)
        if not silent or not self._is_running():
            return
        states = await states_of(list(silent))
        if states is None:
            return  # Slurm does not answer: nothing is known of any job
        ended: dict[str, str] = {}
        for job_id, name in silent.items():
            state, reason = states.get(job_id, ("gone", ""))
            job = self.workers.get(name)
            if job is None or job.job_id != job_id or job.has_connected or name not in self.worker_spec:
                continue  # connected meanwhile, or is being cancelled
            job.last_state = in_words(state, reason)
            if state not in ALIVE or reason in HOPELESS:
                message = self._given_back(name, job, is_hopeless=reason in HOPELESS)
                if message is not None:
                    ended[name] = message
        self._futures.add(asyncio.ensure_future(self._replace_ended(ended)))

    async def _replace_ended(self, ended: Mapping[str, str]) -> None:
        """Submit the successors of jobs that ended early, and report them."""
        if ended:
            with suppress(ClusterError):  # logged
                await self.correct_and_log()
        for name, message in ended.items():
            self._note(f"{message}; {self._successor(name)}")

    def _given_back(self, name: str, job: Job, *, is_hopeless: bool) -> str | None:
        """Give up a job without workers; return the message, or None if it was the last one to be tried."""
        del self.workers[name]
        self._futures.add(asyncio.ensure_future(job.close()))
        self._failed_starts += 1
        told = job.last_state
        if is_hopeless:
            message = f"job {job.job_id} will never start: {told}{setting_behind(told, job.kind)}"
        else:
            message = f"job {job.job_id} ended before its workers connected: {told}{end_of_log(job)}"
        if not (is_hopeless or self.has_given_up):
            return message
        self._note(message, is_raised=True)
        self._give_up(name)
        return None

    def _note(self, message: str, is_raised: bool = False) -> None:
        """Keep what went wrong, and log it unless it is raised to somebody who waits for jobs."""
        self.failures.append(message)
        if not (is_raised and self._n_waiting):
            logger.warning(message)
