"""Siblings: queued tasks whose results are read together go to one worker.

Dask sends the first task of its queue to any worker with a free slot. Neighbours in the queue mostly have one
reader, so they end on different workers, and most of them move to that reader. Here the worker that gets the
first of them gets the others, too: they are *reserved* for it. Other workers get the tasks behind. No more
tasks are sent than in Dask, and no thread waits.

Each worker holds inputs of one reader for each thread. The worker of a reader has to hold all of them anyway,
so none needs more memory; but more workers hold some at the same time. Bundles stay in Dask's order: they
have been cut so that neighbours share one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.scheduler._distributed_transitions import queue_changes
from ferroflow_dask.scheduler.changes import FAILURES, Change
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.hooks import Watch

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

#: Reductions of arrays have as many inputs. Those of a reader with more would be too many for one worker.
_MOST_INPUTS = 16
#: Tasks of the queue that are looked at together.
_LOOKED_AT = 64


class Siblings(Feature):
    """Chooses which queued task a worker with a free slot gets."""

    name = "siblings"
    summary = "Queued tasks whose results are read together go to one worker"
    reason = "a third of the bytes move in reductions of long tasks: `tests/scheduler/test_siblings.py`"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._scheduler = core.scheduler
        self._guard = core.guard
        #: Queued tasks for which a worker was chosen, and how many tasks had been sent by then.
        self._reserved: dict[Key, tuple[WorkerState, int]] = {}
        #: The same tasks by worker, in the order of the queue.
        self._own: dict[WorkerState, dict[Key, TaskState]] = {}
        #: Tasks that were next in the queue when it was looked at, the first one last.
        self._next: list[Key] = []
        self._n_sent = self._n_together = 0

    def changes(self) -> Iterable[Change]:
        """Choose the tasks of the queue."""
        return queue_changes(self._scheduler, self._chosen)

    def watches(self) -> Iterable[Watch]:
        """Return the reserved tasks: they leave the queue by many ways."""
        yield Watch(self._reserved, by_key=True, changed=self._changed)

    def counts(self) -> Mapping[str, int]:
        """Return the number of tasks that were sent to the worker of a sibling."""
        return {"together": self._n_together}

    def pending(self) -> Collection[Key]:
        """Return the reserved tasks."""
        return self._reserved.keys()

    def remove_worker(self, address: str) -> None:
        """Leave the tasks that are reserved for a worker to others."""
        for key in [key for key, (ws, _) in self._reserved.items() if ws.address == address]:
            self._drop(key)

    def restart(self) -> None:
        """Forget all tasks."""
        self._reserved.clear()
        self._own.clear()

    def _changed(self, key: Key, _: str, finish: str) -> None:
        if finish != "queued":
            self._drop(key)

    def _drop(self, key: Key) -> None:
        ws, _ = self._reserved.pop(key)
        own = self._own[ws]
        del own[key]
        if not own:
            del self._own[ws]

    def _chosen(self, ws: WorkerState) -> TaskState:
        """Return the queued task that a worker gets; the first one if the plugin has failed."""
        first: TaskState = self._scheduler.queued.peek()
        if not (self._reserved or len(first.dependents) == 1) or self._guard.error is not None:
            return first
        try:
            return self._choose(ws, first)
        except FAILURES as error:
            self._guard.fail(error)
            return first

    def _choose(self, ws: WorkerState, first: TaskState) -> TaskState:
        self._n_sent += 1
        graph = _priority(first)[:-1]
        own = next(iter(self._own.get(ws, {}).values()), None)
        if own is not None and _priority(own)[:-1] == graph:  # else another graph comes before it
            self._n_together += 1
            return own
        chosen = first
        if first.key in self._reserved and not self._is_overdue(first.key):
            chosen = self._unreserved(graph) or first
        self._reserve_siblings(chosen, ws)
        return chosen

    def _is_overdue(self, key: Key) -> bool:
        """Return whether the worker for which a task is reserved has had no time for it: it may be paused."""
        _, n_sent = self._reserved[key]
        return self._n_sent - n_sent > _MOST_INPUTS * self._scheduler.total_nthreads

    def _unreserved(self, graph: tuple[float, ...]) -> TaskState | None:
        """Return a queued task that is not reserved, one of the first of a graph; None if there is none."""
        for _ in range(2):
            while self._next:
                ts = self._scheduler.tasks.get(self._next.pop())
                if ts is None or ts.state != "queued" or ts.key in self._reserved:
                    continue
                if _priority(ts)[:-1] == graph:
                    return ts
            n = len(self._reserved) + _LOOKED_AT
            self._next = [ts.key for ts in self._scheduler.queued.peekn(n)][::-1]
        return None

    def _reserve_siblings(self, ts: TaskState, ws: WorkerState) -> None:
        found = [one for one in _siblings(ts) if one is not ts and one.key not in self._reserved]
        for one in sorted(found, key=_priority):
            self._reserved[one.key] = ws, self._n_sent
            self._own.setdefault(ws, {})[one.key] = one


def _priority(ts: TaskState) -> tuple[float, ...]:
    assert ts.priority is not None
    return ts.priority


def _siblings(ts: TaskState) -> list[TaskState]:
    """Return the queued tasks with the same reader, each at the beginning of a chain to it."""
    while len(ts.dependents) == 1 and bundle_in(ts.run_spec) is None:
        (reader,) = ts.dependents
        if len(reader.dependencies) > _MOST_INPUTS:
            break
        if len(reader.dependencies) > 1:
            return [one for one in map(_first_of_chain, reader.dependencies) if one.state == "queued"]
        ts = reader
    return []


def _first_of_chain(ts: TaskState) -> TaskState:
    """Return the task at the beginning of a chain of waiting tasks."""
    while len(ts.dependents) == 1 and ts.state == "waiting" and len(ts.dependencies) == 1:
        (ts,) = ts.dependencies
    return ts
