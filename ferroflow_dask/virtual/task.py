"""What a task costs: all that virtual workers know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling.graphs import Averages
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.virtual.limits import check_amount, check_count


@dataclass(frozen=True)
class VirtualTask:
    """A task that takes time and gives bytes.

    Parameters
    ----------
    duration_s : float
        Time on one thread of a worker of speed 1 [s].
    dependencies : tuple of keys
        Tasks whose results it needs, of the same submission or of earlier ones.
    nbytes : int
        Size of its result [B].
    annotations : mapping
        As `dask.annotate` would give it: `workers` (names or addresses), `allow_other_workers`,
        `resources`, `priority`, `retries`, `ferroflow_cost`, `ferroflow_rank`, …
    failures : int
        How many of its first executions raise an exception.
    core_share : float
        Part of its duration in which it computes, from 0 to 1; then it sleeps or waits, and takes no core.
    awaits : tuple of keys
        Tasks that must have run before it ends, besides its duration. It may wait for their files.

    Raises
    ------
    UsageError
        A number is below 0 or not finite, or `core_share` is above 1.
    """

    duration_s: float
    dependencies: tuple[Key, ...] = ()
    nbytes: int = 0
    annotations: Mapping[str, Any] = field(default_factory=dict)
    failures: int = 0
    core_share: float = 1.0
    awaits: tuple[Key, ...] = ()

    def __post_init__(self) -> None:
        check_amount("duration_s", self.duration_s)
        check_amount("nbytes", self.nbytes)
        check_amount("core_share", self.core_share)
        if self.core_share > 1:
            raise UsageError(f"core_share must be at most 1, got {self.core_share}")
        check_count("failures", self.failures, 0)


def sinks(graph: Mapping[Key, VirtualTask]) -> list[Key]:
    """Return the keys on which no task of the graph depends, in its order."""
    needed = {key for task in graph.values() for key in task.dependencies}
    return [key for key in graph if key not in needed]


#: Annotation of tasks that fail. It keeps them separate, and Dask does not get it.
FAILURES = "failures"


def annotations_of(graph: Mapping[Key, VirtualTask]) -> dict[str, dict[Key, Any]]:
    """Return the annotations of tasks by type and key."""
    by_type: dict[str, dict[Key, Any]] = {}
    for key, task in graph.items():
        own = {**task.annotations, FAILURES: task.failures} if task.failures else task.annotations
        for annotation, value in own.items():
            by_type.setdefault(annotation, {})[key] = value
    return by_type


def own_averages(graph: Mapping[Key, VirtualTask]) -> dict[Key, Averages]:
    """Return the averages of a scheduler that knows each task."""
    return {key: Averages(task.duration_s, task.nbytes, task.nbytes) for key, task in graph.items()}


def averages_by_prefix(
    graph: Mapping[Key, VirtualTask], durations_s: Mapping[str, float] | None = None
) -> dict[str, Averages]:
    """Return the averages of each task prefix; `durations_s` has other durations of some [s]."""
    by_prefix: dict[str, list[VirtualTask]] = {}
    for key, task in graph.items():
        by_prefix.setdefault(key_split(key), []).append(task)
    found: dict[str, Averages] = {}
    for prefix, tasks in by_prefix.items():
        duration_s = (durations_s or {}).get(prefix, fmean(task.duration_s for task in tasks))
        nbytes = [task.nbytes for task in tasks]
        found[prefix] = Averages(duration_s, fmean(nbytes), max(nbytes))
    return found
