"""SLURM from a login node: sections of `jobqueue.yaml`, and a cluster of the jobs that they describe.

dask-jobqueue starts the jobs; it is imported when a cluster is asked for, as its import writes a file into
the home folder.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import yaml
from distributed import Security

from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.plugin import FerroflowPlugin

if TYPE_CHECKING:
    from ferroflow_dask.deploy.slurm import SlurmCluster

_FILE = "jobqueue.yaml"
#: Sections that sections of ours leave what they do not say to.
_DEFAULTS = "slurm"
#: Where dask-jobqueue finds what neither says: a section that is nobody's, see `slurm_job.Job`.
OWN_SECTION = "_ferroflow"

#: What a section may say, in dask-jobqueue's schema, and the name of the argument where that differs.
_ARGUMENTS = {"name": "job_name"}
_KEYS = frozenset(
    {"name", "cores", "memory", "processes", "python", "interface", "death-timeout", "local-directory"}
    | {"worker-command", "worker-extra-args", "shebang", "queue", "account", "walltime", "log-directory"}
    | {"job-script-prologue", "job-cpu", "job-mem", "job-extra-directives", "job-directives-skip", "nanny"}
    | {"shared-temp-directory", "scheduler-options", "protocol"}
)
#: Those that are not of a job.
_OF_CLUSTER = ("shared_temp_directory", "scheduler_options", "protocol")

#: Workers leave this part of the walltime before it ends, and no fewer or more seconds than these [s].
_MARGIN, _LEAST_MARGIN_S, _MOST_MARGIN_S = 0.1, 30.0, 300.0
#: Jobs that started together leave spread over this part of the walltime to either side, and no more [s].
_STAGGER, _MOST_STAGGER_S = 0.05, 600.0
_LIFETIME = "DASK_DISTRIBUTED__WORKER__LIFETIME__"

#: Slurm's: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, and with seconds.
_WALLTIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


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

    def n_jobs(self, n: int | None, jobs: int | None, memory: str | None, cores: int | None) -> int | None:
        """Return how many jobs have so many workers, or so much of all; None if nothing is said."""
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


def slurm_cluster(
    section: str = "cpu",
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
        The section of `jobqueue.yaml` that describes its jobs.
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
        Instead of what the section says, for jobs without GPUs: `queue`, `account`, `cores`, `memory`,
        `processes`, `walltime`, … of `dask_jobqueue.SLURMCluster`.

    Returns
    -------
    SlurmCluster
        A `dask_jobqueue.SLURMCluster` with `scale(jobs=…, gpu_jobs=…)`, `adapt(…)` and `wait_for_jobs()`.

    Raises
    ------
    UsageError
        The configuration cannot be read, has no such section, or says what makes no sense; or certificates
        cannot be made.

    Examples
    --------
    >>> with slurm_cluster("cpu", "gpu") as cluster:  # doctest: +SKIP
    ...     cluster.scale(jobs=4, gpu_jobs=1)
    ...     cluster.wait_for_jobs()
    ...     client = cluster.get_client()
    """
    kind, of_cluster = _described(section, config_file, job_arguments)
    gpu_kind = None if gpu_section is None else job_kind(gpu_section, config_file)
    # Made here, since a wrong policy is told before anything starts.
    plugins = [] if policy == "dask" else [FerroflowPlugin(policy)]
    options = {**of_cluster.pop("scheduler_options", {}), **(scheduler_options or {})}
    options["plugins"] = [*options.get("plugins", ()), *plugins]
    of_cluster.setdefault("shared_temp_directory", str(Path.cwd()))
    from ferroflow_dask.deploy.slurm import SlurmCluster

    return SlurmCluster(
        kind,
        gpu_kind,
        security=_temporary() if security is True else (security or None),
        scheduler_options=options,
        asynchronous=asynchronous,
        **of_cluster,
    )


def _temporary() -> Security:
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


def job_script(kind: JobKind) -> str:
    """Return the batch script of jobs of a kind; nothing is submitted."""
    from ferroflow_dask.deploy.slurm_job import job_script

    return job_script(kind)


def _described(
    section: str, config_file: str | Path | None, given: Mapping[str, Any]
) -> tuple[JobKind, dict[str, Any]]:
    """Return what the jobs of a section are, and what it says of the cluster that they belong to."""
    settings, where = _section(section, config_file)
    arguments: dict[str, Any] = {}
    for key, value in {
        **settings,
        **{name.replace("_", "-"): value for name, value in given.items()},
    }.items():
        if value is None:
            continue  # like what is left out; dask-jobqueue's own defaults have old names with nothing
        if key not in _KEYS:
            raise UsageError(
                f"section jobqueue.{section} of {where} has {key!r}, which dask-jobqueue does not know; it "
                f"takes: {', '.join(sorted(_KEYS))}"
            )
        arguments[_ARGUMENTS.get(key, key.replace("-", "_"))] = value
    of_cluster = {name: arguments.pop(name) for name in _OF_CLUSTER if name in arguments}
    _check(arguments, f"section jobqueue.{section} of {where}")
    # dask-jobqueue groups the workers of a job by name only where `processes` is an argument.
    arguments.setdefault("processes", 1)
    if "log_directory" in arguments:
        expanded = os.path.expandvars(arguments["log_directory"])
        arguments["log_directory"] = os.path.expanduser(expanded)
    extra = [str(word) for word in arguments.get("worker_extra_args", ())]
    if "--lifetime" not in extra and "walltime" in arguments:
        prologue = list(arguments.get("job_script_prologue", ()))
        arguments["job_script_prologue"] = [*prologue, *_lifetime(walltime_s(arguments["walltime"]))]
    arguments["worker_extra_args"] = extra
    return JobKind(section, arguments), of_cluster


def _section(section: str, config_file: str | Path | None) -> tuple[dict[str, Any], str]:
    """Return the settings of a section, and the name of what they were read from."""
    here = Path(_FILE)
    if config_file is not None:
        sections, where = _read(Path(config_file)), str(config_file)
    elif "DASK_CONFIG" not in os.environ and here.is_file():
        sections, where = {**_configured(), **_read(here)}, f"./{_FILE}"
    else:
        sections, where = _configured(), os.environ.get("DASK_CONFIG", "Dask's configuration")
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
    defaults = sections.get(_DEFAULTS)
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


def _check(arguments: Mapping[str, Any], where: str) -> None:
    """Refuse what dask-jobqueue would pass on, or fail over later."""
    for name in ("cores", "memory"):
        if name not in arguments:
            raise UsageError(f"{where} does not say {name}; add for example `{name}: {_EXAMPLES[name]}`")
    _check_kinds(arguments, where)
    for name in ("cores", "processes"):
        value = arguments.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{where} has {name} {value!r}; it must be a whole number, at least 1")
    if arguments.get("processes", 1) > arguments["cores"]:
        raise UsageError(
            f"{where} has {arguments['processes']} processes on {arguments['cores']} cores; each needs one"
        )
    try:
        nbytes = dask.utils.parse_bytes(arguments["memory"])
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{where} has memory {arguments['memory']!r}; write it like 8 GiB") from error
    if nbytes < 2**20:
        raise UsageError(
            f"{where} has memory {arguments['memory']!r}, which is {nbytes} B; write it like 8 GiB"
        )
    if "walltime" in arguments:
        walltime_s(arguments["walltime"])


def _check_kinds(arguments: Mapping[str, Any], where: str) -> None:
    """Refuse what is of another kind than dask-jobqueue takes."""
    for name, value in arguments.items():
        has = f"{where} has {name.replace('_', '-')} {value!r}"
        if name in _TEXTS and not isinstance(value, str):
            raise UsageError(f"{has}; it must be text")
        if name not in _LISTS:
            continue
        if not isinstance(value, list | tuple | set):
            raise UsageError(f"{has}; it must be a list: {json.dumps([str(value)])}")
        if wrong := [item for item in value if not isinstance(item, _LISTS[name])]:
            raise UsageError(f"{has}; put in quotes what is not text: {json.dumps(str(wrong[0]))}")


_EXAMPLES = {"cores": "4", "memory": "8 GiB"}
#: Lists, and what may be in them: dask-jobqueue takes the letters of a text for its items.
_LISTS: Mapping[str, Any] = {
    "job_script_prologue": str,
    "job_extra_directives": str,
    "job_directives_skip": str,
    "worker_extra_args": str | int | float,
}
_TEXTS = ("python", "interface", "local_directory", "worker_command", "shebang", "log_directory")


def walltime_s(walltime: object) -> float:
    """Return a time that Slurm understands [s]."""
    # YAML reads 01:00:00 without quotes as a number in base sixty.
    match = _WALLTIME.fullmatch(str(walltime)) if isinstance(walltime, str) else None
    if match is None:
        raise UsageError(
            f'walltime is {walltime!r}; write it in quotes, like "02:30:00", or "1-12" (days, hours)'
        )
    parts = [int(part) for part in match.group("first", "second", "third") if part is not None]
    if match["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return float(((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def _lifetime(walltime_s: float) -> list[str]:
    """Return what tells workers to leave before the walltime ends; none where that is too short."""
    margin_s = min(max(_MARGIN * walltime_s, _LEAST_MARGIN_S), _MOST_MARGIN_S)
    stagger_s = min(_STAGGER * walltime_s, _MOST_STAGGER_S)
    lifetime_s = math.floor(walltime_s - margin_s - stagger_s)
    if lifetime_s <= 0:
        return []
    # dask-cuda's workers have no such option, but read the same configuration.
    return [
        f"export {_LIFETIME}DURATION={lifetime_s}s",
        f"export {_LIFETIME}STAGGER={math.floor(stagger_s)}s",
    ]
