"""Queue bypass: which root tasks are placed at once instead of waiting in the scheduler's queue.

Dask keeps tasks of large groups in a queue and sends one whenever a worker has a free slot. Tasks with a
known cost are placed at once, with two exceptions. A task must not overtake: tasks on a worker take slots,
and no slot would open for an earlier task in the queue. And results must not pile up, which the queue is
there to prevent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dask.typing import Key
from sortedcontainers import SortedList

from ferroflow_dask.policy.state import Priority, TaskView
from ferroflow_dask.scheduler import _distributed

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: Bytes of unused results that may pile up on a worker [B].
_MOST_NBYTES = 2**26


class QueueBypass:
    """Decides which tasks bypass the queue; O(log tasks) for each question and change.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    known_cost : callable
        Returns the known duration of a task [s], or None.
    nbytes : callable
        Returns the mean result size of a task's group or prefix [B], or None.
    admits_all : bool
        Whether the policy places all tasks itself.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        known_cost: Callable[[TaskState], float | None],
        nbytes: Callable[[TaskState], float | None],
        admits_all: bool,
    ) -> None:
        self._scheduler = scheduler
        self._known_cost = known_cost
        self._nbytes = nbytes
        self._admits_all = admits_all
        # Priorities of the tasks with a known cost that are on workers.
        self._priorities: dict[Key, Priority] = {}
        self._sorted: SortedList = SortedList()
        # Ready from the start, in a graph in which others must queue.
        self._queueing: set[Key] = set()

    def at_arrival(self, states: Iterable[TaskState]) -> frozenset[Key]:
        """Return which tasks of a new graph may be placed now.

        Dask starts with the tasks of lowest priority, when the queue is still empty. So if some tasks of a
        graph must queue, all that are ready do.
        """
        ready = [ts for ts in states if all(needed.state == "memory" for needed in ts.dependencies)]
        if not self._admits_all and any(self._known_cost(ts) is None for ts in ready):
            self._queueing.update(ts.key for ts in ready)
        return frozenset(ts.key for ts in ready if self.admits(ts))

    def admits(self, ts: TaskState) -> bool:
        """Return whether a task is placed at once."""
        assert ts.priority is not None
        if ts.key in self._queueing:
            return False
        if self._admits_all or self._known_cost(ts) is not None:
            first = self._scheduler.queued.peek().priority if self._scheduler.queued else None
            return (first is None or ts.priority <= first) and (self._admits_all or not self._piles_up(ts))
        # The slots are held by more later tasks than threads: in the queue, this task would wait for all.
        n_later = len(self._sorted) - self._sorted.bisect_right(ts.priority)
        return n_later > self._scheduler.total_nthreads and not self._scheduler.idle_task_count

    def _piles_up(self, ts: TaskState) -> bool:
        # A result that a client wants, or that one task reads with most others, stays in memory anyway.
        if ts.who_wants or _distributed.is_kept_anyway(ts):
            return False
        if not _distributed.would_queue(self._scheduler, ts):
            return False
        nbytes = self._nbytes(ts)
        return nbytes is None or nbytes * len(ts.group) > _MOST_NBYTES * len(self._scheduler.workers)

    def sent(self, task: TaskView) -> None:
        """Note that a task is on a worker."""
        self._queueing.discard(task.key)
        if task.has_cost and task.key not in self._priorities:
            self._priorities[task.key] = task.priority
            self._sorted.add(task.priority)

    def keys(self) -> list[Key]:
        """Return the tasks that are kept account of."""
        return [*self._priorities, *self._queueing]

    def clear(self) -> None:
        """Forget all tasks."""
        self._queueing.clear()
        self._priorities.clear()
        self._sorted.clear()

    def left(self, key: Key) -> None:
        """Note that a task is no longer on a worker."""
        self._queueing.discard(key)
        priority = self._priorities.pop(key, None)
        if priority is not None:
            self._sorted.remove(priority)
