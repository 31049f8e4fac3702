"""Task graphs of the light engine, and the timelines that it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ferroflow_dask.exceptions import UsageError


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks, numbered in an order in which they can run.

    Parameters
    ----------
    durations_s : sequence of float
        Of each task on a thread of speed 1 [s].
    inputs : sequence of mapping of int to int
        For each task: the earlier tasks that it reads, and the size of each result [B].
    """

    durations_s: Sequence[float]
    inputs: Sequence[Mapping[int, int]]

    def __post_init__(self) -> None:
        if len(self.durations_s) != len(self.inputs):
            n = len(self.inputs)
            raise UsageError(f"inputs must be given for each of {len(self.durations_s)} tasks, got {n}")

    def followers(self) -> list[list[int]]:
        """Return the tasks that read each task, ascending."""
        found: list[list[int]] = [[] for _ in self.inputs]
        for task, needed in enumerate(self.inputs):
            for earlier in needed:
                found[earlier].append(task)
        return found

    def bound_s(self, n_threads: int, speed: float = 1.0) -> float:
        """Return max(T1/P, T∞) on threads of a speed: no schedule is shorter [s]."""
        ends_s: list[float] = []
        for duration_s, needed in zip(self.durations_s, self.inputs, strict=True):
            ends_s.append(duration_s + max((ends_s[earlier] for earlier in needed), default=0.0))
        return max(max(ends_s, default=0.0), sum(self.durations_s) / n_threads) / speed


class Transfer(NamedTuple):
    """A result on its way to another worker.

    Parameters
    ----------
    task : int
        The task whose result it is.
    source, destination : int
        Workers.
    nbytes : int
        [B]
    start_s, stop_s : float
        From the first link that it occupies to its arrival [s].
    """

    task: int
    source: int
    destination: int
    nbytes: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When and where each task runs.

    Parameters
    ----------
    workers : sequence of int
        Of each task.
    starts_s, stops_s : sequence of float
        Of each task [s].
    scheduler_s : float
        Time for which the scheduler is busy [s].
    transfers : list of Transfer
        In the order in which they occupy links.
    """

    workers: Sequence[int]
    starts_s: Sequence[float]
    stops_s: Sequence[float]
    scheduler_s: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def makespan_s(self) -> float:
        """When the last task ends [s]."""
        return max(self.stops_s, default=0.0)

    @property
    def nbytes_moved(self) -> int:
        """Size of all transfers [B]."""
        return sum(transfer.nbytes for transfer in self.transfers)
