"""Scheduler's end of deliveries: wanted values of a running bundle are complete as soon as a worker has them.

A client may want thousands of short tasks, as after `client.map` or `persist`. They share bundles, and each
has a task under its own key that reads its value from the bundle. These tasks need not run: while the bundle
runs, its worker stores the values under their keys and reports them as replicas. The scheduler then moves
the tasks from `waiting` to `memory`. A value that is not delivered is read from the bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed_graphs
from ferroflow_dask.scheduler._distributed_graphs import Delivery
from ferroflow_dask.scheduler.changes import Change, Guard, ItemChange

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

_HANDLER = "add-keys"


class Deliveries:
    """Completes the tasks whose values workers deliver.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    guard : Guard
    own : object
        The scheduler plugin that hears of these tasks by `completed` instead of its hook `transition`.
    completed : callable
        Called with a task, its duration [s], its size [B] and the worker's address.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        guard: Guard,
        own: object,
        completed: Callable[[TaskState, float, int, str], None],
    ) -> None:
        self._scheduler = scheduler
        self._guard = guard
        self._own = own
        self._completed = completed
        #: Tasks that were completed.
        self.count = 0

    def changes(self) -> Iterable[Change]:
        """Return the change to the scheduler."""
        handlers = self._scheduler.stream_handlers
        stock = handlers[_HANDLER]
        take = self._guard(self._take, default=None)

        def handle(keys: Any = (), **message: Any) -> Any:
            left = take(keys, **message) if isinstance(keys, Mapping) else None
            return stock(keys=keys if left is None else left, **message)

        yield ItemChange(f"Scheduler.stream_handlers[{_HANDLER!r}]", handlers, _HANDLER, handle)

    def _take(self, keys: Mapping[Key, Any], *, worker: str, stimulus_id: str) -> list[Key]:
        """Complete the tasks that wait for the bundle of their value; return the other keys."""
        ws = self._scheduler.workers.get(worker)
        completed = {}
        for key, details in keys.items():
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ws is not None and _is_awaited(ts, ws):
                completed[ts] = Delivery(*details)
        if ws is not None and completed:
            _distributed_graphs.complete_waiting(self._scheduler, ws, completed, self._own, stimulus_id)
            for ts, delivery in completed.items():
                self._completed(ts, delivery.stop_s - delivery.start_s, delivery.nbytes, worker)
            self.count += len(completed)
        return [key for key in keys if self._scheduler.tasks.get(key) not in completed]


def _is_awaited(ts: TaskState, ws: WorkerState) -> bool:
    """Return whether a task waits for nothing but one task of a worker."""
    if ts.state != "waiting" or ts.waiting_on is None or len(ts.waiting_on) != 1:
        return False
    (bundle,) = ts.waiting_on
    return bundle.processing_on is ws
