"""Batch jobs: submission through dask-jobqueue, batch scripts, and the state that Slurm reports."""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import dask
import yaml
from dask_jobqueue.slurm import SLURMJob
from distributed import Security
from distributed.core import Status

from ferroflow_dask.deploy.slurm.kinds import JobKind
from ferroflow_dask.deploy.slurm.listing import comment_of
from ferroflow_dask.deploy.slurm.refusals import setting_behind
from ferroflow_dask.deploy.slurm.sections import OWN_SECTION
from ferroflow_dask.exceptions import ClusterError

#: Jobs that Slurm knows in one of these states have yet to start, run, or come to an end.
ALIVE = frozenset({"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "RESIZING"})
#: Reasons for which jobs wait that time does not cure; PartitionNodeLimit also means nodes that are down.
HOPELESS = frozenset(
    {"PartitionTimeLimit", "PartitionConfig", "BadConstraints", "InvalidAccount"}
    | {"InvalidQOS", "AccountNotAllowed", "QOSNotAllowed", "AssocMaxWallDurationPerJobLimit"}
)
_NO_REASON = ("None", "NonZeroExitCode")
#: What squeue says where it knows none of the jobs any more.
_FORGOTTEN = "Invalid job id"
#: What ends a word in Slurm's directives, or begins a comment.
_ODD = re.compile(r"[\s#']")
#: Lines of a job's log that an error shows.
_LOG_LINES = 3


class Job(SLURMJob):
    """A batch job of its arguments alone, whose rejection is an error, and which is over once cancelled."""

    #: Whether a worker of it has ever connected.
    has_connected = False
    #: What Slurm said of it last, until a worker has connected.
    last_state = "submitted"

    def __init__(
        self,
        scheduler: str | None = None,
        *,
        kind: JobKind | None = None,
        security: Security | None = None,
        **options: Any,
    ) -> None:
        directives = list(options.pop("job_extra_directives", ()))
        if not any(directive.startswith("--comment") for directive in directives):
            directives.append(f'--comment="{comment_of(scheduler, options.get("name"))}"')
        super().__init__(
            scheduler,
            security=security and _as_words(security),
            job_extra_directives=directives,
            **options,
        )
        self.kind = kind
        self.set_log_folder(self.log_directory)

    def set_log_folder(self, folder: str | None) -> None:
        """Have logs written to a folder, in quotes where Slurm would not take the path for one word."""
        if folder is None or self.log_directory is None:
            return
        quote = '"' if _ODD.search(folder) else ""
        line = re.compile(rf"^(#SBATCH -[eo]) {re.escape(self.log_directory)}/(.*)$", re.MULTILINE)
        self.job_header = line.sub(
            lambda found: f"{found[1]} {quote}{folder}/{found[2]}{quote}", str(self.job_header)
        )
        self.log_directory = folder

    @classmethod
    def default_config_name(cls) -> str:
        """Return the section that has what is no argument; jobs and clusters ask for it before they read it.

        It is not `slurm`, where what a user says would get into jobs that another file describes.
        """
        dask.config.set({f"jobqueue.{OWN_SECTION}": _defaults()})
        return OWN_SECTION

    async def start(self) -> None:
        """Submit the job.

        Raises
        ------
        ClusterError
            With what `sbatch` says.
        """
        try:
            await super().start()
        except (RuntimeError, OSError, ValueError) as error:
            self.status = Status.failed
            told = _told(error)
            raise ClusterError(
                f"sbatch refused the job {self.job_name!r}: {told}{setting_behind(told, self.kind)}"
            ) from error

    @staticmethod
    async def _call(cmd: Sequence[str], **options: Any) -> str:
        """Call a command of Slurm, which a signal to the process group does not end."""
        out: str = await SLURMJob._call(cmd, **{"start_new_session": True, **options})
        return out

    async def close(self) -> None:
        """Cancel the job."""
        await super().close()
        self.status = Status.closed


def _as_words(security: Security) -> Security:
    """Return what the command line of a worker is told of certificates, each path as one word of a shell."""
    return _with_files(security, lambda _, path: shlex.quote(path) if _ODD.search(path) else path)


def _in_files(security: Security, folder: str) -> Security:
    """Return what jobs are told of certificates: they are in files that a cluster writes when it starts."""
    written = f"{folder}/.dask-jobqueue.worker"
    return _with_files(security, lambda key, value: f"{written}.{key}.<random>" if "\n" in value else value)


def _with_files(security: Security, file_of: Callable[[str, str], str]) -> Security:
    """Return a copy that has, for what a worker presents and trusts, what is made of its name and content."""
    told = copy(security)
    found = security.get_tls_config_for_role("worker")
    for key, name in {"ca_file": "tls_ca_file", "cert": "tls_worker_cert", "key": "tls_worker_key"}.items():
        if found[key] is not None:
            setattr(told, name, file_of(key, found[key]))
    return told


def _defaults() -> dict[str, Any]:
    """Return dask-jobqueue's own defaults, without a walltime."""
    text = Path(inspect.getfile(SLURMJob)).with_name("jobqueue.yaml").read_text(encoding="utf-8")
    # With half an hour of its own workers would not know when to leave.
    return {**yaml.safe_load(text)["jobqueue"]["slurm"], "walltime": None}


def scripts_of(
    kinds: Sequence[JobKind],
    security: Security | None = None,
    *,
    shared_temp_directory: str,
    protocol: str | None = None,
    scheduler_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the batch scripts of a cluster's jobs, with placeholders for addresses and names."""
    if protocol is None and security is not None:
        protocol = "tls://"  # as JobQueueCluster has it
    scheme = (scheduler_options or {}).get("protocol") or protocol or _scheme()
    common = {
        "interface": kinds[0].arguments.get("interface"),
        "protocol": protocol,
        "security": security and _in_files(security, shared_temp_directory),
    }
    return [_job_script(kind, f"{scheme.removesuffix('://')}://<scheduler>:8786", common) for kind in kinds]


def _scheme() -> str:
    """Return the protocol of a scheduler that is not told any."""
    return "tls" if Security().require_encryption else dask.config.get("distributed.comm.default-scheme")


def _job_script(kind: JobKind, scheduler: str, common: Mapping[str, Any]) -> str:
    options = kind.options(common)
    logs = options.get("log_directory")
    if logs is not None:
        options["log_directory"] = os.devnull  # a folder that is missing would be made
    job = Job(scheduler, name="<job>", **options)
    job.set_log_folder(logs)
    return str(job.job_script())


def _told(error: Exception) -> str:
    """Return the lines of the command, with slashes between them."""
    if isinstance(error, FileNotFoundError):
        return "there is no such command here; run this on a login node of a SLURM cluster"
    _, _, stderr = str(error).partition("stderr:")
    lines = [
        line.strip().removeprefix("sbatch: ").removeprefix("error: ")
        for line in (stderr or str(error)).splitlines()
    ]
    return " / ".join(filter(None, lines))


async def states_of(job_ids: Sequence[str]) -> dict[str, tuple[str, str]] | None:
    """Return what Slurm says of jobs: a state, and a reason or nothing; None if it does not answer."""
    if not job_ids:
        return {}
    command = ["squeue", "--noheader", "--states=all", "--format=%i|%T|%r", f"--jobs={','.join(job_ids)}"]
    try:
        out = await Job._call(command)
    except (RuntimeError, OSError) as error:
        return {} if _FORGOTTEN in str(error) else None
    rows = (line.split("|") for line in out.splitlines() if line.count("|") == 2)
    return {job_id: (state, "" if reason in _NO_REASON else reason) for job_id, state, reason in rows}


def in_words(state: str, reason: str) -> str:
    """Return a state with its reason, if there is one."""
    return f"{state} ({reason})" if reason else state


def end_of_log(job: Job) -> str:
    """Return what a job wrote last, as the end of a message; nothing if it wrote nothing."""
    if job.log_directory is None:
        return ""
    path = Path(job.log_directory) / f"{job.job_name or 'worker'}-{job.job_id}.err"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    last = [line.strip() for line in lines if line.strip()][-_LOG_LINES:]
    return f"; {path} ends: {' / '.join(last)}" if last else ""
