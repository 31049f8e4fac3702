"""Which tasks need not wait in Dask's queue on the scheduler.

Dask keeps tasks of large groups in a queue and sends one whenever a worker has a slot. A known cost
tells more than that turn would, so such tasks are placed at once, except where they would overtake: what
waits on a worker takes slots, and no slot would open for a task in the queue that should come first. And
except where results would pile up, which is what the queue is there against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dask.typing import Key
from sortedcontainers import SortedList

from ferroflow_dask.plugin import seams
from ferroflow_dask.policy.queues import Priority, TaskView

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: Bytes of results on a worker that may pile up before they are used [B].
_MOST_NBYTES = 2**26


class Bypass:
    """Decides which tasks pass by the queue; O(log tasks) a question and a change.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    known_cost : callable
        Returns the duration that is known of a task, or None.
    nbytes : callable
        Returns the mean size of results of a task's like [B], or None where it is not known.
    admits_all : bool
        Whether the policy wants to place all tasks itself.
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
        # Of the tasks with a known cost that are on workers.
        self._priorities: dict[Key, Priority] = {}
        self._sorted: SortedList = SortedList()
        # Ready from the start, beside others of the same graph that have to queue.
        self._queueing: set[Key] = set()

    def at_arrival(self, states: Iterable[TaskState]) -> frozenset[Key]:
        """Return which tasks of a graph that arrives may be placed now.

        Dask looks at those that come last first, when there is no queue yet to compare them with. So where
        some of a graph's tasks have to queue, all that are ready take their turn there.
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
        # More come after this one than can run, and hold the slots: in the queue it would wait for them all.
        n_later = len(self._sorted) - self._sorted.bisect_right(ts.priority)
        return n_later > self._scheduler.total_nthreads and not self._scheduler.idle_task_count

    def _piles_up(self, ts: TaskState) -> bool:
        # What a client keeps, or one task needs together with most others, is there in the end anyway.
        if ts.who_wants or seams.is_kept_anyway(ts):
            return False
        if not seams.would_queue(self._scheduler, ts):
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
        """Return the tasks that bear on what is admitted: on workers, or to queue with others."""
        return [*self._priorities, *self._queueing]

    def clear(self) -> None:
        """Forget all tasks."""
        self._queueing.clear()
        self._priorities.clear()
        self._sorted.clear()

    def left(self, key: Key) -> None:
        """Note that a task is on no worker any more."""
        self._queueing.discard(key)
        priority = self._priorities.pop(key, None)
        if priority is not None:
            self._sorted.remove(priority)
