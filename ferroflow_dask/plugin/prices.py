"""Keeps what tasks on workers are expected to take near what Dask has learned since they were sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.plugin import seams

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: By what factor an average has to move before tasks are priced anew, and one in how many of the tasks must
#: have ended since they last were: so that each end costs O(1) tasks, however an average wavers.
_FACTOR = 1.5
_ONE_IN = 8


@dataclass(slots=True)
class _Name:
    """Tasks of a name that are on workers, and what they were last expected to take [s]; None for a guess."""

    price_s: float | None
    tasks: set[TaskState] = field(default_factory=set)
    n_ended: int = 0


class Prices:
    """Expected durations of the tasks of which only Dask's average for their name is known.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    reprice : callable
        Told the key of a task on a worker and what it is now expected to take [s].
    """

    def __init__(self, scheduler: Scheduler, reprice: Callable[[Key, float], None]) -> None:
        self._scheduler = scheduler
        self._reprice = reprice
        self._names: dict[str, _Name] = {}

    def sent(self, ts: TaskState) -> None:
        """Note that a task is on a worker."""
        name = self._names.get(ts.prefix.name)
        if name is None:
            is_guess = seams.is_duration_unknown(ts)
            price_s = None if is_guess else seams.prefix_duration(self._scheduler, ts)
            name = self._names[ts.prefix.name] = _Name(price_s)
        name.tasks.add(ts)

    def left(self, ts: TaskState) -> None:
        """Note that a task is on no worker any more."""
        name = self._names.get(ts.prefix.name)
        if name is not None:
            name.tasks.discard(ts)
            if not name.tasks:
                del self._names[ts.prefix.name]

    def ended(self, ts: TaskState) -> None:
        """Price those of the same name anew, if what is known of them has changed by much."""
        name = self._names.get(ts.prefix.name)
        if name is None:
            return
        name.n_ended += 1
        now_s, before_s = seams.prefix_duration(self._scheduler, ts), name.price_s
        if before_s is not None:
            has_moved = now_s > _FACTOR * before_s or _FACTOR * now_s < before_s
            if not has_moved or _ONE_IN * name.n_ended < len(name.tasks):
                return
        for other in name.tasks:
            self._reprice(other.key, now_s)
        name.price_s, name.n_ended = now_s, 0

    def clear(self) -> None:
        """Forget all tasks."""
        self._names.clear()
