"""SLURM on the command line: the options of `ferroflow run`, and `ferroflow slurm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import click
from distributed import Client
from rich.console import Console
from rich.markup import escape

from ferroflow_dask.cli.cluster_options import Count, Duration, refuse_given, refuse_local_sizes
from ferroflow_dask.cli.errors import OneLineErrors
from ferroflow_dask.cli.sections import slurm_option
from ferroflow_dask.deploy import (
    DEFAULT_SECTION,
    JobKind,
    default_section,
    job_kind,
    job_scripts,
    slurm_cluster,
    slurm_template,
)
from ferroflow_dask.deploy.interrupts import closed_undisturbed, interrupts_deferred
from ferroflow_dask.deploy.slurm.kinds import MOST_JOBS, MOST_JOBS_REASON
from ferroflow_dask.deploy.slurm.listing import cancel_jobs, connected_workers, listed_jobs, n_workers
from ferroflow_dask.deploy.slurm.queue_line import rarely
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.scheduler import check_workers

F = TypeVar("F", bound=Callable[..., Any])

_KINDS = ("local", "slurm")
_HOW_TO_STOP = "Ctrl-C to stop"
#: Parameters that only jobs have.
_OF_JOBS = ("config_file", "section", "gpu_section", "is_encrypted", "job_timeout")


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """A cluster of SLURM jobs, as options name it.

    Parameters
    ----------
    jobs, gpu_jobs : int
    section, gpu_section : str
        Of the configuration.
    config_file : str or None
    is_encrypted : bool
    wait_s : float
        For workers to connect [s].
    """

    jobs: int
    gpu_jobs: int
    section: str
    gpu_section: str
    config_file: str | None
    is_encrypted: bool
    wait_s: float

    def n_threads(self) -> int:
        """Return the threads of all workers."""
        return sum(number * kind.processes * kind.threads for kind, number in self.kinds())

    def workers_and_threads(self) -> tuple[int, int]:
        """Return how many workers there are, and the threads of each.

        Raises
        ------
        UsageError
            They are not all alike.
        """
        kinds = self.kinds()
        threads = {kind.threads for kind, _ in kinds}
        if len(threads) > 1:
            raise UsageError(f"workers of {sorted(threads)} threads are not alike; measure one kind of jobs")
        return sum(number * kind.processes for kind, number in kinds), threads.pop()

    def kinds(self) -> list[tuple[JobKind, int]]:
        """Return what the jobs are, and how many of each kind."""
        return [(job_kind(name, self.config_file), number) for name, number in self._numbers()]

    def sections(self) -> str:
        """Return the section that the jobs are made from, or both with their numbers."""
        numbers = self._numbers()
        if len(numbers) == 1:
            return numbers[0][0]
        return " + ".join(f"{number} × {name}" for name, number in numbers)

    def _numbers(self) -> list[tuple[str, int]]:
        numbers = ((self.section, self.jobs), (self.gpu_section, self.gpu_jobs))
        return [(name, number) for name, number in numbers if number]

    def job_scripts(self) -> list[str]:
        """Return the batch scripts of the jobs of `cluster`, one for each kind."""
        sections = [name for name, _ in self._numbers()]
        return job_scripts(sections, self.config_file, security=self.is_encrypted or None)

    def cluster(self) -> Any:
        """Return the cluster, with no job yet and with Dask's own scheduling."""
        return slurm_cluster(
            self.section if self.jobs else self.gpu_section,
            self.gpu_section if self.gpu_jobs else None,
            config_file=self.config_file,
            policy="dask",
            security=self.is_encrypted or None,
        )


def slurm_options(function: F) -> F:
    """Add the options of a cluster of SLURM jobs; the command gets `slurm`, None for a local cluster."""

    @wraps(function)
    def with_slurm(
        *,
        cluster_kind: str,
        jobs: int | None,
        gpu_jobs: int,
        config_file: str | None,
        section: str | None,
        gpu_section: str,
        is_encrypted: bool,
        job_timeout: float,
        **others: Any,
    ) -> Any:
        if cluster_kind not in _KINDS:
            raise UsageError(f"unknown cluster {cluster_kind!r}; choose one of: {', '.join(_KINDS)}")
        slurm = None
        if cluster_kind == "slurm":
            n_jobs = (0 if gpu_jobs else 1) if jobs is None else jobs
            if not n_jobs + gpu_jobs:
                raise UsageError("--cluster slurm needs jobs; give --jobs N or --gpu-jobs N")
            if others.get("address") is not None:
                raise UsageError("--connect and --cluster slurm are two clusters; give one of them")
            refuse_local_sizes("--cluster slurm")
            if section is None:
                section = _default_section(config_file) if n_jobs else DEFAULT_SECTION
            slurm = SlurmOptions(
                n_jobs, gpu_jobs, section, gpu_section, config_file, is_encrypted, job_timeout
            )
        else:
            if jobs is not None or gpu_jobs:
                raise UsageError("--jobs and --gpu-jobs need --cluster slurm")
            refuse_given(_OF_JOBS, "would do nothing without --cluster slurm")
        return function(slurm=slurm, **others)

    for option in reversed(_OPTIONS):
        with_slurm = option(with_slurm)
    return with_slurm  # type: ignore[return-value]


def _default_section(config_file: str | None) -> str:
    """Return the section of jobs where none is named; the user is told where it is not the usual one."""
    section = default_section(config_file)
    if section != DEFAULT_SECTION:
        told = f"there is no section jobqueue.{DEFAULT_SECTION}; jobs are as jobqueue.{section} says"
        click.echo(told, err=True)
    return section


_JOBS = Count(0, MOST_JOBS, MOST_JOBS_REASON)
_OPTIONS = (
    slurm_option(
        "--cluster",
        "cluster_kind",
        default="local",
        show_default=True,
        help="Where workers run: local, or slurm, in jobs as jobqueue.yaml describes them.",
    ),
    slurm_option(
        "--jobs",
        type=_JOBS,
        help=f"Jobs to submit, at most {MOST_JOBS:,}.  [default: 1; 0 with --gpu-jobs]",
    ),
    slurm_option(
        "--gpu-jobs",
        type=_JOBS,
        default=0,
        show_default=True,
        help=f"Jobs with GPUs to submit, at most {MOST_JOBS:,}.",
    ),
    slurm_option(
        "--config",
        "config_file",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="File to read instead of jobqueue.yaml in this folder or Dask's configuration.",
    ),
    slurm_option(
        "--section",
        help="Section of that file for jobs without GPUs.  [default: cpu; slurm if there is no other]",
    ),
    slurm_option(
        "--gpu-section", default="gpu", show_default=True, help="Section of that file for jobs with GPUs."
    ),
    slurm_option("--tls", "is_encrypted", is_flag=True, help="Encrypt all messages, with new certificates."),
    slurm_option(
        "--job-timeout",
        type=Duration(),
        default=600.0,
        show_default=True,
        help="How long SLURM may take to start the jobs [s].",
    ),
)


@contextmanager
def slurm_client(options: SlurmOptions) -> Iterator[Client]:
    """Submit jobs, wait for their workers and yield a client; the jobs are cancelled with the context."""
    with closed_undisturbed() as stack:
        with interrupts_deferred():  # else a job that sbatch has submitted may stay
            cluster = stack.enter_context(options.cluster())
            cluster.scale(jobs=options.jobs, **({"gpu_jobs": options.gpu_jobs} if options.gpu_jobs else {}))
        submitted = ", ".join(sorted((job.job_id for job in cluster.workers.values()), key=int))
        click.echo(f"submitted {submitted}; dashboard {cluster.dashboard_link}", err=True)
        with _waiting_shown() as tell:
            cluster.wait_for_jobs(options.wait_s, tell=tell)
        client = stack.enter_context(cluster.get_client())
        check_workers(client)
        yield client


@contextmanager
def _waiting_shown() -> Iterator[Callable[[str], object]]:
    """Show what is waited for: in a line that changes on a terminal, else in one line every 30 s."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield rarely(lambda line: click.echo(f"{line}; {_HOW_TO_STOP}", err=True))
        return
    with console.status("") as status:
        yield lambda line: status.update(escape(f"{line}; {_HOW_TO_STOP}"))


def print_job_scripts(options: SlurmOptions) -> None:
    """Print the batch scripts of the jobs, one for each kind."""
    click.echo("\n".join(options.job_scripts()), nl=False)


@click.group(cls=OneLineErrors)
def slurm() -> None:
    """SLURM clusters."""


@slurm.command()
def template() -> None:
    """Print a commented jobqueue.yaml to start from."""
    click.echo(slurm_template(), nl=False)


@slurm.command()
def status() -> None:
    """List the SLURM jobs that ferroflow submitted for you, with their workers and the time left."""
    jobs = listed_jobs()
    if not jobs:
        click.echo("no jobs of ferroflow are pending or running")
        return
    connected = connected_workers(jobs)
    rows = [("job", "name", "state", "workers", "time left", "node", "scheduler")]
    for job in jobs:
        number = n_workers(job, connected)
        workers, scheduler = str(number), job.scheduler
        if number is None:
            workers, scheduler = "-", f"{scheduler} (does not answer)"
        rows.append((job.job_id, job.name, job.state, workers, job.time_left, job.nodes or "-", scheduler))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


@slurm.command()
@click.argument("job_ids", nargs=-1, metavar="[JOB]…")
def cancel(job_ids: tuple[str, ...]) -> None:
    """Cancel all SLURM jobs that ferroflow submitted for you, and the programs' schedulers; or some jobs.

    A program that still runs replaces a job that is named here.
    """
    cancelled = cancel_jobs(job_ids)
    listed = ", ".join(job.job_id for job in cancelled)
    click.echo(f"cancelled {listed}" if cancelled else "no jobs of ferroflow are pending or running")
