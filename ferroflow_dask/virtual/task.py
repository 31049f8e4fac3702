"""What a task costs: all that virtual workers know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dask.typing import Key

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
    working_nbytes : int
        What it takes beside its inputs and its result while it runs [B].

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
    working_nbytes: int = 0

    def __post_init__(self) -> None:
        check_amount("duration_s", self.duration_s)
        check_amount("nbytes", self.nbytes)
        check_amount("working_nbytes", self.working_nbytes)
        check_amount("core_share", self.core_share)
        if self.core_share > 1:
            raise UsageError(f"core_share must be at most 1, got {self.core_share}")
        check_count("failures", self.failures, 0)


def sinks(graph: Mapping[Key, VirtualTask]) -> list[Key]:
    """Return the keys on which no task of the graph depends, in its order."""
    needed = {key for task in graph.values() for key in task.dependencies}
    return [key for key in graph if key not in needed]
