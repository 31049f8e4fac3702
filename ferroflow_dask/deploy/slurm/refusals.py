"""Settings behind a refusal: which line of `jobqueue.yaml` to change if Slurm does not accept a job.

This module starts nothing and does not import dask-jobqueue.
"""

from __future__ import annotations

import re
from typing import Any

from ferroflow_dask.deploy.slurm.kinds import JobKind
from ferroflow_dask.deploy.slurm.settings import SETTINGS

#: Words of sbatch's messages and of squeue's reasons, and the arguments that they may be about.
_ABOUT = (
    (r"partition (specified|name)", ("queue",)),
    (r"PartitionConfig", ("cores", "job_cpu", "memory", "queue")),
    (r"account", ("account", "queue")),
    (r"time ?limit|walltime|WallDuration|--time", ("walltime", "queue")),
    (r"memory", ("memory", "job_mem")),
    (r"cpu count|node configuration", ("job_extra_directives", "cores", "job_cpu", "memory")),
    (
        r"qos|gres|generic resource|constraint|feature|reservation|license|option|node name",
        ("job_extra_directives",),
    ),
    (r"network interface", ("interface",)),
)
#: What is needed at sites that have no default for it.
_ADDED = ("account", "walltime", "queue")


def setting_behind(message: str, kind: JobKind | None) -> str:
    """Return which settings to change, as the end of a message; nothing if that is not known."""
    names = next((names for words, names in _ABOUT if re.search(words, message, re.IGNORECASE)), ())
    if kind is None or not names:
        return ""
    present = [name for name in names if kind.arguments.get(name)]
    if names[0] in _ADDED and names[0] not in present:
        return f"; add `{_setting(names[0])}: …` to {kind.where}"
    arguments = [f"{name}={kind.arguments[name]!r}" for name in present if name in kind.given]
    settings = [
        f"{_setting(name)}: {_as_yaml(kind.arguments[name])}" for name in present if name not in kind.given
    ]
    told = [f"the argument {' or '.join(arguments)}"] if arguments else []
    told += [f"`{'` or `'.join(settings)}` in {kind.where}"] if settings else []
    return f"; change {', or '.join(told)}" if told else ""


def _setting(argument: str) -> str:
    return SETTINGS.get(argument, argument.replace("_", "-"))


def _as_yaml(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
