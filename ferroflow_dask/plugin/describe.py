"""Describe a task of distributed's scheduler as a policy sees it."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from ferroflow_dask.lowering import COST_ANNOTATION, RANK_ANNOTATION
from ferroflow_dask.plugin import seams
from ferroflow_dask.policy import TaskView

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: Declared durations beyond this are mistakes [s]: thirty years.
_LONGEST_S = 1e9


def declared_cost(ts: TaskState) -> float | None:
    """Return the duration that a task was annotated with [s]; None where it has none that makes sense."""
    cost = (ts.annotations or {}).get(COST_ANNOTATION)
    return float(cost) if isinstance(cost, int | float) and 0 <= cost <= _LONGEST_S else None


class TaskDescriber:
    """Describes tasks as they are now; O(dependencies × their holders) each."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers = count()

    def __call__(self, ts: TaskState) -> TaskView:
        """Return what a policy may know of a task.

        The cost is the declared one, else what Dask has learned of tasks with the same prefix.
        """
        cost = declared_cost(ts)
        held: dict[str, int] = {}
        total = 0
        for dependency in ts.dependencies:
            nbytes = dependency.get_nbytes()
            total += nbytes
            for holder in dependency.who_has or ():
                held[holder.address] = held.get(holder.address, 0) + nbytes
        return TaskView(
            ts.key,
            cost_s=seams.prefix_duration(self._scheduler, ts) if cost is None else cost,
            priority=ts.priority or (),
            index=self._index(ts),
            rank_s=(ts.annotations or {}).get(RANK_ANNOTATION, cost),
            has_cost=cost is not None,
            held=held,
            input_bytes=total,
            allowed=self.allowed(ts),
            is_movable=not ts.actor,
        )

    def allowed(self, ts: TaskState) -> frozenset[str] | None:
        """Return the workers on which a task may run; None means any.

        A preference ("loose" restrictions) does not bind: any worker may steal the task.
        """
        valid = None if ts.loose_restrictions else self._scheduler.valid_workers(ts)
        return None if valid is None else frozenset(ws.address for ws in valid)

    def _index(self, ts: TaskState) -> int:
        # The tasks of our graphs, like the chunks of a collection, end in their number.
        if isinstance(ts.key, tuple) and len(ts.key) == 2 and isinstance(ts.key[1], int):
            return ts.key[1]
        return next(self._numbers)
