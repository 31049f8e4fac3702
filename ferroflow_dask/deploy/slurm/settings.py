"""Settings of a section of `jobqueue.yaml`: checks, and conversion to arguments of dask-jobqueue.

This module does not read files and starts nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dask.utils import parse_bytes, parse_timedelta

from ferroflow_dask.config import NO_QUANTITY
from ferroflow_dask.exceptions import UsageError

_KEYS = frozenset(
    {"name", "cores", "memory", "processes", "python", "interface", "death-timeout", "local-directory"}
    | {"worker-command", "worker-extra-args", "shebang", "queue", "account", "walltime", "log-directory"}
    | {"job-script-prologue", "job-cpu", "job-mem", "job-extra-directives", "job-directives-skip", "nanny"}
    | {"shared-temp-directory", "scheduler-options", "protocol"}
)
#: dask-jobqueue's old names of settings, and Slurm's.
_WALLTIME_HELP = 'write it in quotes, like "02:30:00", or "1-12" (days, hours)'
_NOW_CALLED = {
    "extra": "worker-extra-args",
    "job-extra": "job-extra-directives",
    "env-extra": "job-script-prologue",
    "header-skip": "job-directives-skip",
    "project": "account",
    "partition": "queue",
    "time": "walltime",
    "cpus-per-task": "job-cpu",
    "mem": "job-mem",
}
#: What a job does not say, and the call that does.
_ELSEWHERE = {
    "jobs": "cluster.scale(jobs=…)",
    "n_workers": "cluster.scale(jobs=…)",
    "gpu_jobs": "cluster.scale(gpu_jobs=…)",
    "dashboard_address": 'scheduler_options={"dashboard_address": ":0"}',
}
#: The names of settings, where those of arguments differ by more than dashes.
SETTINGS = {"job_name": "name"}
_NAMES = frozenset(key.replace("-", "_") for key in _KEYS - {"name"}) | {"job_name"}

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
_NUMBERS = ("cores", "processes", "job_cpu")
#: What Slurm and the shell read up to white space, and Slurm up to a # or a quote.
_WORDS = ("job_name", "queue", "account", "interface", "protocol", "job_mem")
_WORD = re.compile(r"[^\s#\"']+")
#: What Slurm fills in, or takes for a folder, in the name of a log.
_NO_FILE_NAME = re.compile(r"[/%]")
#: What may be a path: in the shell, and in quotes in a directive.
_PATHS = {"local_directory": re.compile(r".+"), "log_directory": re.compile(r"[^\"\\\n]+")}
#: Text in which the shell has more to do than to fill in variables.
_QUOTED = re.compile(r"[\"'\\`]|\$\(")

#: Options by which workers would have other names than the cluster waits for, and what is instead of them.
_NAMING = {
    "--nworkers": "`processes` is how many workers a job has",
    "--nprocs": "`processes` is how many workers a job has",
    "--name": "the cluster gives workers their names",
}
_DASK_CUDA = re.compile(r"\bdask[ _-]cuda\b")
#: Directives for GPUs of a node, or of the only task of a job: [type:]number, or several with commas.
_GPUS = re.compile(
    r"(?<!\S)(?P<option>--gres|--gpus(?:-per-(?:node|task))?|-G)(?:=|\s+|(?<=-G))(?P<asked>\S+)"
)

#: Workers leave this part of the walltime before it ends, and no fewer or more seconds than these [s].
_MARGIN, _LEAST_MARGIN_S, _MOST_MARGIN_S = 0.1, 30.0, 300.0
#: Jobs that started together leave spread over this part of the walltime to either side, and no more [s].
_STAGGER, _MOST_STAGGER_S = 0.05, 600.0
_LIFETIME = "DASK_DISTRIBUTED__WORKER__LIFETIME__"

#: Longer numbers are mistakes, and Python refuses to read very long ones.
_NUMBER = r"[0-9]{1,9}"
#: Slurm's: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, and with seconds.
_WALLTIME = re.compile(
    rf"(?:(?P<days>{_NUMBER})-)?(?P<first>{_NUMBER})(?::(?P<second>{_NUMBER}))?(?::(?P<third>{_NUMBER}))?"
)


@dataclass(frozen=True, slots=True)
class _Said:
    """Settings by the names of dask-jobqueue's arguments, and who said them.

    Parameters
    ----------
    arguments : mapping
    where : str
        The section.
    given : collection of str
        Those that are not the section's.
    """

    arguments: Mapping[str, Any]
    where: str
    given: Collection[str]

    def told(self, name: str) -> str:
        """Return what was said, as the start of a sentence."""
        value = self.arguments[name]
        if name in self.given:
            return f"the argument {name} is {value!r}"
        return f"{self.where} has {SETTINGS.get(name, name.replace('_', '-'))} {value!r}"

    def words(self, name: str) -> list[str]:
        """Return the words that the shell may make of a list, or of a text."""
        value = self.arguments.get(name, ())
        return value.split() if isinstance(value, str) else " ".join(map(str, value)).split()


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
    said = _named(section, given, where)
    _check(said)
    arguments = {**said.arguments, "processes": _processes(said)}
    if arguments["processes"] > arguments["cores"]:
        raise UsageError(
            f"{where} has {arguments['processes']} processes on {arguments['cores']} cores; each needs one"
        )
    if "log_directory" in arguments:
        expanded = os.path.expandvars(arguments["log_directory"])
        arguments["log_directory"] = os.path.expanduser(expanded)
    for name in ("local_directory", "death_timeout"):
        if name in arguments:
            arguments[name] = _escaped(arguments[name])
    if "--lifetime" not in _options(said) and "walltime" in arguments:
        prologue = list(arguments.get("job_script_prologue", ()))
        arguments["job_script_prologue"] = [*prologue, *_lifetime(walltime_s(arguments["walltime"]))]
    arguments["worker_extra_args"] = [str(word) for word in arguments.get("worker_extra_args", ())]
    return arguments


def _named(section: Mapping[str, Any], given: Mapping[str, Any], where: str) -> _Said:
    """Return settings and arguments by the same names, without those that are left out."""
    arguments: dict[str, Any] = {}
    for told, value in section.items():
        key = str(told).replace("_", "-")  # to Dask's configuration they are the same
        # None is like what is left out; dask-jobqueue's own defaults have old names with nothing.
        if value is not None and key not in _KEYS:
            raise UsageError(f"{where} has {told!r}, {_what_instead(key, _KEYS)}")
        arguments["job_name" if key == "name" else key.replace("-", "_")] = value
    if "name" in given and "job_name" in given:
        raise UsageError("the arguments name and job_name are the same; give one of them")
    instead = {"job_name" if name == "name" else name: value for name, value in given.items()}
    for name, value in instead.items():
        if value is not None and name not in _NAMES:
            raise UsageError(f"there is an argument {name!r}, {_what_instead(name, _NAMES)}")
    arguments |= instead
    return _Said({name: value for name, value in arguments.items() if value is not None}, where, set(instead))


def _what_instead(name: str, known: Collection[str]) -> str:
    """Return what to write in place of a name that is none of those known."""
    if name in _ELSEWHERE:
        return f"which is given elsewhere: {_ELSEWHERE[name]}"
    now = _NOW_CALLED.get(name.replace("_", "-"))
    if now is not None:
        return f"which is called {(now if now in known else now.replace('-', '_'))!r}"
    return f"which dask-jobqueue does not know; it takes: {', '.join(sorted(known))}"


def _check(said: _Said) -> None:
    """Refuse what dask-jobqueue would pass on, or fail over later."""
    arguments = said.arguments
    for name, example in _EXAMPLES.items():
        if name not in arguments:
            raise UsageError(f"{said.where} does not say {name}; add for example `{name}: {example}`")
    for name in arguments:
        _check_kind(said, name)
    try:
        nbytes = parse_bytes(arguments["memory"])
    except NO_QUANTITY as error:
        raise UsageError(f"{said.told('memory')}; write it like 8 GiB") from error
    if nbytes < 2**20:
        raise UsageError(f"{said.told('memory')}, which is {nbytes} B; write it like 8 GiB")
    if "walltime" in arguments:
        try:
            walltime_s(arguments["walltime"])
        except UsageError as error:
            raise UsageError(f"{said.told('walltime')}; {_WALLTIME_HELP}") from error
    if "death_timeout" in arguments and not _is_duration(arguments["death_timeout"]):
        raise UsageError(f"{said.told('death_timeout')}; it must be a number of seconds, like 120")
    for option in _options(said):
        if option in _NAMING:
            raise UsageError(f"{said.told('worker_extra_args')}; leave {option} out: {_NAMING[option]}")


def _check_kind(said: _Said, name: str) -> None:
    """Refuse what is of another kind than dask-jobqueue, Slurm or the shell takes."""
    value = said.arguments[name]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if name in _NUMBERS and not (is_number and value >= 1):
        raise UsageError(f"{said.told(name)}; it must be a whole number, at least 1")
    if name in _TEXTS and not isinstance(value, str):
        raise UsageError(f"{said.told(name)}; it must be text")
    if name in _WORDS and not ((is_number or isinstance(value, str)) and _WORD.fullmatch(str(value))):
        raise UsageError(f"{said.told(name)}; it must be one word, without # and quotes")
    if name == "job_name" and _NO_FILE_NAME.search(str(value)):
        raise UsageError(f"{said.told(name)}; it must be without / and %, since logs are called so")
    if name in _PATHS and not _PATHS[name].fullmatch(value):
        raise UsageError(f"{said.told(name)}; it must be a path of one line, without quotes")
    if name == "nanny" and not isinstance(value, bool):
        raise UsageError(f"{said.told(name)}; it must be true or false")
    if name == "scheduler_options" and not isinstance(value, Mapping):
        raise UsageError(f"{said.told(name)}; it must hold settings, like host: login1")
    if name in _LISTS:
        if not isinstance(value, list | tuple | set):
            raise UsageError(f"{said.told(name)}; it must be a list: {json.dumps([str(value)])}")
        if wrong := [item for item in value if not isinstance(item, _LISTS[name])]:
            quoted = json.dumps(str(wrong[0]))
            raise UsageError(f"{said.told(name)}; put in quotes what is not text: {quoted}")


def _is_duration(value: Any) -> bool:
    try:
        return bool(0 < parse_timedelta(value) < math.inf)
    except NO_QUANTITY:
        return False


def _options(said: _Said) -> list[str]:
    """Return the names of the options in a worker's arguments, which are `--name value` or `--name=value`."""
    return [word.partition("=")[0] for word in said.words("worker_extra_args") if word.startswith("--")]


def _escaped(value: Any) -> Any:
    """Return what the shell takes for one word, with variables filled in; what has quotes is as it is."""
    if not isinstance(value, str) or _QUOTED.search(value):
        return value
    return re.sub(r"(\s)", r"\\\1", value)


def _processes(said: _Said) -> int:
    """Return how many workers a job has: those of dask-cuda are as many as its GPUs, by their names, too."""
    n_gpus, directive = _gpus(said)
    # dask-jobqueue groups the workers of a job by name only where `processes` is an argument.
    processes = int(said.arguments.get("processes", n_gpus or 1))
    if n_gpus and processes != n_gpus:
        corrected = f"processes={n_gpus}" if "processes" in said.given else f"`processes: {n_gpus}`"
        raise UsageError(
            f"{said.told('processes')}, but dask-cuda starts as many workers as there are GPUs, {n_gpus} by "
            f"{directive}; write {corrected}"
        )
    return processes


def _gpus(said: _Said) -> tuple[int, str]:
    """Return how many GPUs a worker of dask-cuda is started for, and what says so; 0 if that is not known."""
    is_cuda = _DASK_CUDA.search(str(said.arguments.get("worker_command", "")))
    set_up = [*said.words("job_script_prologue"), *said.words("python")]
    if not is_cuda or any("CUDA_VISIBLE_DEVICES" in word for word in set_up):
        return 0, ""
    # Of an option that is there twice, Slurm takes the last.
    found = {
        match["option"]: match
        for directive in said.arguments.get("job_extra_directives", ())
        for match in _GPUS.finditer(directive)
    }
    numbers = {_n_gpus(match["option"], match["asked"]): match[0] for match in found.values()}
    numbers.pop(0, None)
    return next(iter(numbers.items())) if len(numbers) == 1 else (0, "")


def has_gpus(arguments: Mapping[str, Any]) -> bool:
    """Return whether jobs with these arguments have GPUs: Slurm is asked, or workers are dask-cuda's."""
    found = (_GPUS.search(str(directive)) for directive in arguments.get("job_extra_directives", ()))
    asked = any(_n_gpus(match["option"], match["asked"]) for match in found if match)
    return asked or _DASK_CUDA.search(str(arguments.get("worker_command", ""))) is not None


def _n_gpus(option: str, asked: str) -> int:
    items = [item.split(":") for item in asked.split(",")]
    gpus = [item for item in items if item[0] == "gpu" or option != "--gres"]
    return sum(int(item[-1]) if re.fullmatch(_NUMBER, item[-1]) else 1 for item in gpus)


def walltime_s(walltime: object) -> float:
    """Return a time that Slurm understands [s]."""
    # YAML reads 01:00:00 without quotes as a number in base sixty.
    match = _WALLTIME.fullmatch(str(walltime)) if isinstance(walltime, str) else None
    if match is None:
        raise UsageError(f"walltime is {walltime!r}; {_WALLTIME_HELP}")
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
