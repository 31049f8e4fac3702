"""What a section of `jobqueue.yaml` may say, in dask-jobqueue's schema, and the arguments that come of it.

It does not know where sections are read from, and starts nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import dask

from ferroflow_dask.exceptions import UsageError

#: The names of arguments, where those of settings differ.
_ARGUMENTS = {"name": "job_name"}
_KEYS = frozenset(
    {"name", "cores", "memory", "processes", "python", "interface", "death-timeout", "local-directory"}
    | {"worker-command", "worker-extra-args", "shebang", "queue", "account", "walltime", "log-directory"}
    | {"job-script-prologue", "job-cpu", "job-mem", "job-extra-directives", "job-directives-skip", "nanny"}
    | {"shared-temp-directory", "scheduler-options", "protocol"}
)

_EXAMPLES = {"cores": "4", "memory": "8 GiB"}
#: Lists, and what may be in them: dask-jobqueue takes the letters of a text for its items.
_LISTS: Mapping[str, Any] = {
    "job_script_prologue": str,
    "job_extra_directives": str,
    "job_directives_skip": str,
    "worker_extra_args": str | int | float,
}
_TEXTS = (
    *("python", "interface", "local_directory", "worker_command", "shebang", "log_directory"),
    *("protocol", "shared_temp_directory"),
)

#: Workers leave this part of the walltime before it ends, and no fewer or more seconds than these [s].
_MARGIN, _LEAST_MARGIN_S, _MOST_MARGIN_S = 0.1, 30.0, 300.0
#: Jobs that started together leave spread over this part of the walltime to either side, and no more [s].
_STAGGER, _MOST_STAGGER_S = 0.05, 600.0
_LIFETIME = "DASK_DISTRIBUTED__WORKER__LIFETIME__"

#: Slurm's: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, and with seconds.
_WALLTIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def job_arguments(section: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments of dask-jobqueue's job and cluster that settings are.

    Parameters
    ----------
    section : mapping
        What a section says.
    given : mapping
        Arguments instead of that.
    where : str
        The section, for errors.

    Raises
    ------
    UsageError
        A name that dask-jobqueue does not know, or a value that it would pass on, or fail over later.
    """
    arguments: dict[str, Any] = {}
    settings = {**section, **{name.replace("_", "-"): value for name, value in given.items()}}
    for key, value in settings.items():
        if value is None:
            continue  # like what is left out; dask-jobqueue's own defaults have old names with nothing
        if key not in _KEYS:
            raise UsageError(
                f"{where} has {key!r}, which dask-jobqueue does not know; it takes: "
                f"{', '.join(sorted(_KEYS))}"
            )
        arguments[_ARGUMENTS.get(key, key.replace("-", "_"))] = value
    _check(arguments, where)
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
    return arguments


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
