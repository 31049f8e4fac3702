"""`SlurmCluster`: dask-jobqueue's `SLURMCluster` with two kinds of jobs and corrections.

This module, `replacing`, `job` and `adaptive` use private names of dask-jobqueue and of
`distributed.SpecCluster`; `tests/deploy/test_slurm_seams.py` lists them. Corrected are, in dask-jobqueue
0.9: a rejected submission is only logged, a lost job is not replaced, jobs that end before their workers
connect are not noticed, and `adapt` counts workers instead of jobs.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

from distributed.core import Status

from ferroflow_dask.deploy.slurm.adaptive import JobAdaptive, JobsOfKind, job_limits
from ferroflow_dask.deploy.slurm.job import Job
from ferroflow_dask.deploy.slurm.kinds import JobKind, kind_of
from ferroflow_dask.deploy.slurm.queue_line import in_numbers, in_queue, rarely
from ferroflow_dask.deploy.slurm.refusals import setting_behind
from ferroflow_dask.deploy.slurm.replacing import ReplacingCluster
from ferroflow_dask.deploy.slurm.waiting import all_connected
from ferroflow_dask.exceptions import UsageError

logger = logging.getLogger("ferroflow_dask")
scheduler_logger = logging.getLogger("distributed.scheduler")

#: What jobs of all kinds have from the cluster; the interface only where they say none.
_COMMON = ("config_name", "interface", "protocol", "security")
#: Files with what workers of an encrypted cluster need.
_KEYS = ("_job_ca_file", "_job_cert", "_job_key")


#: distributed's warning.
_PORT_IN_USE = re.compile(r"Port (?P<port>\d+) is already in use")


def _is_no_broadcast(record: logging.LogRecord) -> bool:
    """Return False for failed broadcasts: a closing scheduler sends one to workers of cancelled jobs."""
    return not str(record.msg).startswith("broadcast to")


@contextmanager
def _no_port_warning() -> Iterator[list[str]]:
    """Yield the ports whose warning that they are in use is dropped; other warnings are shown."""
    used: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=_PORT_IN_USE.pattern)
        yield used
    for warning in caught:
        if match := _PORT_IN_USE.match(str(warning.message)):
            used.append(match["port"])
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class SlurmCluster(ReplacingCluster):
    """A cluster of SLURM jobs; made by `slurm_cluster`.

    Parameters
    ----------
    kind : JobKind
    gpu_kind : JobKind, optional
    **of_cluster
        Of `dask_jobqueue.SLURMCluster`.
    """

    job_cls = Job  # type: ignore[assignment] # another first argument has no use

    def __init__(self, kind: JobKind, gpu_kind: JobKind | None = None, **of_cluster: Any) -> None:
        self._kinds = {"cpu": kind} | ({} if gpu_kind is None else {"gpu": gpu_kind})
        self._specs: dict[str, dict[str, Any]] = {}
        self._n_named = 0
        try:
            super().__init__(n_workers=0, **of_cluster, **kind.arguments)
        except (RuntimeError, ValueError) as error:
            if "network interface" not in str(error):
                raise
            raise UsageError(f"{error}{setting_behind(str(error), kind)}") from error

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
        with _no_port_warning() as used:
            await super()._start()
        for port in used:  # as on a login node
            logger.warning("port %s is in use; the dashboard is at %s", port, self.dashboard_link)

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
    def adaptives(self) -> Sequence[JobAdaptive]:
        """What scales jobs by the work that is there, one for each kind."""
        return self._adaptives

    @property
    def kinds(self) -> Mapping[str, JobKind]:
        """The kinds of jobs: `cpu`, and `gpu` if there are such."""
        return self._kinds

    def __repr__(self) -> str:
        """Return the representation of distributed's clusters, with the jobs."""
        return f"{super().__repr__().removesuffix(')')}, jobs: {in_numbers(self)})"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        row = f'<tr><td colspan="2"><strong>Jobs:</strong> {escape(in_queue(self))}</td></tr>'
        html: str = super()._repr_html_(cluster_status=row + (cluster_status or ""))
        return html

    def _scaling_status(self) -> str:
        html: str = super()._scaling_status()
        return html.replace("</table>", f"<tr><td>Jobs: {escape(in_queue(self))}</td></tr></table>")

    def jobs_of(self, kind: str) -> list[str]:
        """Return the names of the jobs of a kind that should exist, oldest first."""
        spec = self._specify()[kind]
        return [name for name, known in self.worker_spec.items() if known is spec]

    def workers_of(self, jobs: Iterable[str]) -> list[str]:
        """Return the names of the workers of some jobs."""
        return [f"{job}{suffix}" for job in jobs for suffix in self.worker_spec[job]["group"]]

    def wait_for_jobs(
        self, timeout: float | None = 600.0, *, tell: Callable[[str], object] | None = None
    ) -> Any:
        """Wait until all workers of all jobs have connected.

        Parameters
        ----------
        timeout : float or None, optional
            How long to wait [s]; None for ever.
        tell : callable, optional
            Called many times a second with what is waited for, in a line, in the thread of the event loop.
            If left out, this line is logged every 30 s.

        Raises
        ------
        ClusterError
            They have not within that time, or their jobs end as soon as they start; the message says what
            Slurm says of them.
        """
        return self.sync(self._wait_for_jobs, timeout, tell)

    async def _wait_for_jobs(self, timeout: float | None, tell: Callable[[str], object] | None) -> None:
        self._n_waiting += 1
        try:
            limit_s = math.inf if timeout is None else timeout
            await all_connected(self, limit_s, tell or rarely(logger.warning))
        finally:
            self._n_waiting -= 1

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
