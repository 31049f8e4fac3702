"""Siblings: queued tasks whose results are read together go to one worker.

Dask sends the first task of its queue to any worker with a free slot. Neighbours in the queue mostly have one
reader, so they end on different workers, and most of them move to that reader. Here the worker that gets the
first of them gets the others, too: they are *reserved* for it. Other workers get the tasks behind. No more
tasks are sent than in Dask, and no thread waits.

Each worker holds inputs of one reader for each thread. The worker of a reader has to hold all of them anyway,
so none needs more memory; but more workers hold some at the same time. So these inputs may fill a part of a
worker's memory only. Bundles stay in Dask's order: they have been cut so that neighbours share one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.bundling.cut import MEMORY_SHARE
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
_PRIORITY = attrgetter("priority")
#: Tasks of the queue that are looked at together, at least; of a long queue, this part.
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
        self._costs = core.learned.costs
        #: Queued tasks for which a worker was chosen, and how many tasks had been sent by then.
        self._reserved: dict[Key, tuple[WorkerState, int]] = {}
        #: The same tasks by worker; those of each reader in the order of the queue.
        self._own: dict[WorkerState, dict[Key, Any]] = {}
        #: Tasks of a graph that were next in the queue, and not reserved, when it was looked at; the first is
        #: the last. A task that is queued later may come after them.
        self._next: list[Key] = []
        self._graph: tuple[float, ...] = ()
        #: Number of sent tasks from which on it is looked at again.
        self._look_at = 0
        self._n_sent = self._n_together = 0
        #: The most inputs of a reader by their prefix, and by the memory and threads of a worker.
        self._most: dict[tuple[str, int, int], float] = {}

    def changes(self) -> Iterable[Change]:
        """Choose the tasks of the queue."""
        return queue_changes(self._scheduler, self._reserved, self._choose)

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
            self._changed(key, "queued", "released")

    def restart(self) -> None:
        """Forget all tasks."""
        self._reserved.clear()
        self._own.clear()
        self._next.clear()

    def _changed(self, key: Key, _: str, finish: str) -> None:
        if finish != "queued":
            ws, _n_sent = self._reserved.pop(key)
            own = self._own[ws]
            del own[key]
            if not own:
                del self._own[ws]

    def _choose(self, ws: WorkerState, first: Any) -> Any:
        """Return the queued task that a worker gets instead of the first one, or that one."""
        if self._guard.is_closed or self._guard.error is not None:
            return first
        try:
            self._n_sent += 1
            graph = first.priority[:-1]  # tasks of other graphs come later, whether they are reserved or not
            for ts in self._own.get(ws, {}).values():
                if ts.priority[:-1] == graph:
                    self._n_together += 1
                    return ts
            chosen = first
            if first.key in self._reserved and not self._is_overdue(first.key):
                chosen = self._unreserved(graph) or first
            most = self._most.get((chosen.prefix.name, ws.memory_limit, ws.nthreads))
            for one in _siblings(chosen, self._most_inputs(ws, chosen) if most is None else most):
                if one is not chosen and one.key not in self._reserved:
                    self._reserved[one.key] = ws, self._n_sent
                    self._own.setdefault(ws, {})[one.key] = one
        except FAILURES as error:
            self._guard.fail(error)
            return first
        return chosen

    def _most_inputs(self, ws: WorkerState, ts: TaskState) -> float:
        """Return how many results like that of a task a reader may have as inputs."""
        nbytes, most = self._costs.nbytes(ts), float(_MOST_INPUTS)
        if nbytes and ws.memory_limit:
            most = min(most, MEMORY_SHARE * ws.memory_limit / ws.nthreads / nbytes)
        if nbytes is not None:
            self._most[ts.prefix.name, ws.memory_limit, ws.nthreads] = most
        return most

    def _is_overdue(self, key: Key) -> bool:
        """Return whether the worker of the first task of the queue had no time for it: it may be paused."""
        _, n_sent = self._reserved[key]
        return self._n_sent - n_sent > _MOST_INPUTS * self._scheduler.total_nthreads

    def _unreserved(self, graph: tuple[float, ...]) -> TaskState | None:
        """Return a queued task that is not reserved, one of the first of a graph; None if there is none."""
        if graph != self._graph:
            self._graph, self._next, self._look_at = graph, [], 0
        while True:
            while self._next:
                ts = self._scheduler.tasks.get(self._next.pop())
                if ts is not None and ts.state == "queued" and ts.key not in self._reserved:
                    return ts
            if self._n_sent < self._look_at:
                return None
            self._next = self._looked_up(graph)
            if not self._next:
                self._look_at = self._n_sent + _LOOKED_AT

    def _looked_up(self, graph: tuple[float, ...]) -> list[Key]:
        self._most.clear()  # sizes may be known better by now
        queued: Any = self._scheduler.queued
        n_reserved = len(self._reserved)
        # Each look sorts the queue and passes what is reserved: O(1) for each task that it finds.
        n = n_reserved + max(_LOOKED_AT, n_reserved, len(queued) // _LOOKED_AT)
        found: list[Key] = []
        for ts in queued.peekn(n):
            if ts.priority[:-1] != graph:
                break
            if ts.key not in self._reserved:
                found.append(ts.key)
        return found[::-1]


def _siblings(ts: TaskState, most: float) -> list[TaskState]:
    """Return the queued tasks with the same reader, in order, each at the beginning of a chain to it.

    There are none if the reader has more inputs than `most`.
    """
    found: list[TaskState] = []
    if bundle_in(ts.run_spec) is not None:
        return found
    while len(ts.dependents) == 1:
        (reader,) = ts.dependents
        if len(reader.dependencies) > most:
            break
        if len(reader.dependencies) > 1:
            for one in reader.dependencies:
                while len(one.dependents) == 1 and one.state == "waiting" and len(one.dependencies) == 1:
                    (one,) = one.dependencies  # noqa: PLW2901 -- back to the beginning of the chain
                if one.state == "queued":
                    found.append(one)
            found.sort(key=_PRIORITY)
            break
        ts = reader
    return found
