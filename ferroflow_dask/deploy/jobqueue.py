"""SLURM from a login node: sections of `jobqueue.yaml`, and a cluster of the jobs that they describe.

dask-jobqueue starts the jobs; it is imported when a cluster is asked for, as its import writes a file into
the home folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import yaml
from distributed import Security

from ferroflow_dask.counts import as_count
from ferroflow_dask.deploy.job_settings import job_arguments
from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.scheduler import FerroflowPlugin

if TYPE_CHECKING:
    from ferroflow_dask.deploy.slurm import SlurmCluster

_FILE = "jobqueue.yaml"
#: The section of jobs without GPUs where none is named.
DEFAULT_SECTION = "cpu"
#: dask-jobqueue's own section, to which others leave what they do not say.
_COMMON_SECTION = "slurm"
#: Where dask-jobqueue finds what neither says: a section that is nobody's, see `slurm_job.Job`.
OWN_SECTION = "_ferroflow"

#: Those that are not of a job.
_OF_CLUSTER = ("shared_temp_directory", "scheduler_options", "protocol")


@dataclass(frozen=True, slots=True)
class JobKind:
    """What jobs of one kind are.

    Parameters
    ----------
    section : str
        Of the configuration, where it is described.
    arguments : mapping
        Of `dask_jobqueue.slurm.SLURMJob`.
    """

    section: str
    arguments: Mapping[str, Any]

    @property
    def processes(self) -> int:
        """Workers of a job."""
        return int(self.arguments["processes"])

    @property
    def threads(self) -> int:
        """Of each worker."""
        return max(1, int(self.arguments["cores"]) // self.processes)

    def options(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a job in a cluster, which has what is common to jobs of all kinds."""
        return {**common, **self.arguments}

    def n_jobs(
        self,
        n: int | None = None,
        jobs: int | None = None,
        memory: str | None = None,
        cores: int | None = None,
    ) -> int | None:
        """Return how many jobs have so many workers, or so much of all; None if nothing is said."""
        for number in (n, jobs):
            if number is not None and as_count(number) is None:
                raise UsageError(f"a cluster cannot have {number!r} jobs or workers")
        numbers = [] if jobs is None else [jobs]
        if n is not None:
            numbers.append(math.ceil(n / self.processes))
        if memory is not None:
            each = dask.utils.parse_bytes(self.arguments["memory"])
            numbers.append(math.ceil(dask.utils.parse_bytes(memory) / each))
        if cores is not None:
            numbers.append(math.ceil(cores / self.arguments["cores"]))
        if any(number < 0 for number in numbers):
            raise UsageError(f"a cluster cannot have {min(numbers)} jobs")
        return max(numbers, default=None)


def kind_of(kinds: Mapping[str, JobKind], name: str) -> JobKind:
    """Return a kind of a cluster's jobs.

    Raises
    ------
    UsageError
        It has no such jobs.
    """
    if name not in kinds:
        raise UsageError("this cluster has no jobs with GPUs; give slurm_cluster a gpu_section")
    return kinds[name]


def slurm_cluster(
    section: str | None = None,
    gpu_section: str | None = None,
    *,
    config_file: str | Path | None = None,
    policy: str | None = None,
    security: Security | bool | None = None,
    scheduler_options: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    **job_arguments: Any,
) -> SlurmCluster:
    """Return a cluster of SLURM jobs, with no job yet, whose scheduler has ferroflow's policy.

    The scheduler runs in this process: on a login node, or wherever `sbatch` works. Its interface, protocol
    and options are those of the first section.

    Parameters
    ----------
    section : str, optional
        The section of `jobqueue.yaml` that describes its jobs. If left out, `cpu`, or dask-jobqueue's own,
        `slurm`, where that is the only one.
    gpu_section : str, optional
        The section that describes jobs with GPUs, which are scaled by themselves, beside the others.
    config_file : path, optional
        The only file that is read for sections. If left out, they are those of Dask's configuration
        (`~/.config/dask` and `$DASK_CONFIG`), or before these, unless `DASK_CONFIG` is set, those of
        `jobqueue.yaml` in the working folder.
    policy : str, optional
        As in `install`; `dask` for none.
    security : Security or bool, optional
        True for TLS with certificates of its own.
    scheduler_options : mapping, optional
        Of `distributed.Scheduler`: `host`, `dashboard_address`, …, before those of the section.
    asynchronous : bool, optional
    **job_arguments
        Instead of what the section says, for jobs without GPUs: `job_name`, `queue`, `account`, `cores`,
        `memory`, `processes`, `walltime`, … of `dask_jobqueue.SLURMCluster`.

    Returns
    -------
    SlurmCluster
        A `dask_jobqueue.SLURMCluster` with `scale(jobs=…, gpu_jobs=…)`, `adapt(…)` and `wait_for_jobs()`.

    Raises
    ------
    UsageError
        The configuration cannot be read, has no such section, or says what makes no sense, as arguments may;
        or certificates cannot be made.

    Examples
    --------
    >>> with slurm_cluster("cpu", "gpu") as cluster:  # doctest: +SKIP
    ...     cluster.scale(jobs=4, gpu_jobs=1)
    ...     cluster.wait_for_jobs()
    ...     client = cluster.get_client()
    """
    described = default_section(config_file) if section is None else section
    kind, of_cluster = _described(described, config_file, job_arguments)
    gpu_kind = None if gpu_section is None else job_kind(gpu_section, config_file)
    # Made here, since a wrong policy is told before anything starts.
    plugins = [] if policy == "dask" else [FerroflowPlugin(policy)]
    options = {**of_cluster.pop("scheduler_options", {}), **(scheduler_options or {})}
    options["plugins"] = [*options.get("plugins", ()), *plugins]
    from ferroflow_dask.deploy.slurm import SlurmCluster

    return SlurmCluster(
        kind,
        gpu_kind,
        security=_certificates(security),
        scheduler_options=options,
        asynchronous=asynchronous,
        **of_cluster,
    )


def _certificates(security: Security | bool | None) -> Security | None:
    if security is not True:
        return security or None
    try:
        made: Security = Security.temporary()
    except ImportError as error:
        raise UsageError(
            "security=True (--tls) needs the package cryptography: pip install cryptography"
        ) from error
    return made


def slurm_template() -> str:
    """Return the text of a commented `jobqueue.yaml` to start from."""
    package = Path(__file__).parents[1]
    beside = (package / _FILE, package.parent / _FILE)  # of an installed package, and of a working tree
    return next(path for path in beside if path.is_file()).read_text(encoding="utf-8")


def job_kind(section: str, config_file: str | Path | None = None) -> JobKind:
    """Return what the jobs of a section of `jobqueue.yaml` are; see `slurm_cluster`."""
    return _described(section, config_file, {})[0]


def job_scripts(
    sections: Sequence[str],
    config_file: str | Path | None = None,
    *,
    security: Security | bool | None = None,
) -> list[str]:
    """Return the batch scripts of a cluster's jobs, one for each section; nothing is submitted.

    What is known only once a cluster has started has names in angle brackets. See `slurm_cluster`, which has
    the first of the sections as its own.
    """
    described = [_described(section, config_file, {}) for section in sections]
    _, of_cluster = described[0]
    from ferroflow_dask.deploy.slurm_job import job_scripts

    return job_scripts([kind for kind, _ in described], _certificates(security), **of_cluster)


def _described(
    section: str, config_file: str | Path | None, given: Mapping[str, Any]
) -> tuple[JobKind, dict[str, Any]]:
    """Return what the jobs of a section are, and what it says of the cluster that they belong to."""
    settings, where = _section(section, config_file)
    arguments = job_arguments(settings, given, f"section jobqueue.{section} of {where}")
    of_cluster = {name: arguments.pop(name) for name in _OF_CLUSTER if name in arguments}
    of_cluster.setdefault("shared_temp_directory", str(Path.cwd()))
    return JobKind(section, arguments), of_cluster


def default_section(config_file: str | Path | None = None) -> str:
    """Return the section that describes jobs without GPUs where none is named; see `slurm_cluster`."""
    sections, _ = _sections(config_file)
    # Beside others it only has what they leave out.
    return _COMMON_SECTION if sections.keys() == {_COMMON_SECTION} else DEFAULT_SECTION


def _sections(config_file: str | Path | None) -> tuple[dict[str, Any], str]:
    """Return the sections by name, and the name of what they were read from."""
    here = Path(_FILE)
    if config_file is not None:
        return _read(Path(config_file)), str(config_file)
    if "DASK_CONFIG" not in os.environ and here.is_file():
        return {**_configured(), **_read(here)}, f"./{_FILE}"
    return _configured(), os.environ.get("DASK_CONFIG", "Dask's configuration")


def _section(section: str, config_file: str | Path | None) -> tuple[dict[str, Any], str]:
    """Return the settings of a section, and the name of what they were read from."""
    sections, where = _sections(config_file)
    found = sections.get(section)
    if found is not None and not isinstance(found, Mapping):
        raise UsageError(
            f"section jobqueue.{section} of {where} is {found!r}; it must hold settings, like cores: 4"
        )
    if found is None:
        has = f"it has: {', '.join(sorted(map(str, sections)))}" if sections else "it has none"
        raise UnknownNameError(
            f"there is no section jobqueue.{section} in {where}; {has}; "
            f"`ferroflow slurm template > {_FILE}` writes a file to start from"
        )
    defaults = sections.get(_COMMON_SECTION)
    known = defaults if isinstance(defaults, Mapping) else {}
    return {**known, **found}, where


def _configured() -> dict[str, Any]:
    """Return the sections in Dask's configuration, the same before and after dask-jobqueue is imported."""
    found = dask.config.get("jobqueue", None)
    if not isinstance(found, Mapping):
        return {}
    added = dask.config.merge(*dask.config.defaults).get("jobqueue", {})
    return {name: settings for name, settings in _said(found, added).items() if name != OWN_SECTION}


def _said(found: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return what somebody has said in a configuration, without the defaults that packages add to it."""
    said: dict[str, Any] = {}
    for key, value in found.items():
        default = added.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := _said(value, default):
                said[key] = inner
        elif key not in added or value is not default:  # a user's may be equal: Dask has the very object
            said[key] = value
    return said


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not text"
        raise UsageError(f"{str(path)!r} is no YAML{place}: {problem}") from error
    sections = content.get("jobqueue") if isinstance(content, Mapping) else None
    if not isinstance(sections, Mapping):
        raise UsageError(f"{str(path)!r} has no section 'jobqueue'; `ferroflow slurm template` shows one")
    return dict(sections)
