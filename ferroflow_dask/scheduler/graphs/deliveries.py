"""Scheduler's end of deliveries: wanted values of a running bundle are complete as soon as a worker has them.

A client may want thousands of short tasks, as after `client.map` or `persist`. They share bundles, and each
has a task under its own key that reads its value from the bundle. These tasks need not run: while the bundle
runs, its worker stores the values under their keys and reports them. The scheduler then moves
the tasks from `waiting` to `memory`. A value that is not delivered is read from the bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed_graphs
from ferroflow_dask.scheduler._distributed_graphs import Delivery
from ferroflow_dask.scheduler.changes import Guard, attempt
from ferroflow_dask.scheduler.graphs.worker_runs import DELIVERED

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState


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
        self._received = guard(self._complete, default=False)
        self._own = own
        self._completed = completed
        #: Tasks that were completed.
        self.count = 0

    def arrived(self, *, values: Mapping[Key, Any], worker: str, thread: int | None = None) -> None:
        """Receive values of a running bundle."""
        if not self._received(values, worker, thread):
            self.ignored(values=values, worker=worker)

    def ignored(self, *, values: Mapping[Key, Any], worker: str, thread: int | None = None) -> None:
        """Ask a worker to drop values that it has sent, after the plugin has left."""
        # An exception would close the worker's stream.
        attempt(lambda: self._refuse(values, worker), f"worker {worker} may keep values that no task has")

    def _complete(self, values: Mapping[Key, Any], worker: str, thread: int | None) -> bool:
        """Complete the tasks that wait for the bundle of their value; return whether that is all of them."""
        ws = self._scheduler.workers.get(worker)
        if ws is None:
            return False
        completed = {}
        for key, details in values.items():
            ts = self._scheduler.tasks.get(key)
            if ts is not None and _is_awaited(ts, ws):
                completed[ts] = Delivery._make((*details, thread))
        if completed:
            _distributed_graphs.complete_waiting(self._scheduler, ws, completed, self._own, DELIVERED)
            for ts, delivery in completed.items():
                self._completed(ts, delivery.stop_s - delivery.start_s, delivery.nbytes, worker)
            self.count += len(completed)
        return len(completed) == len(values)

    def _refuse(self, values: Mapping[Key, Any], worker: str) -> None:
        """Let a worker drop the values that are not its results for the scheduler."""
        ws = self._scheduler.workers.get(worker)
        tasks = (self._scheduler.tasks.get(key) for key in values)
        # A worker that has been sent a task finds its value, and reports it.
        known = {
            ts.key for ts in tasks if ts is not None and (ts.processing_on is ws or ws in (ts.who_has or ()))
        }
        refused = [key for key in values if key not in known]
        if ws is not None and refused:
            message = {"op": "remove-replicas", "keys": refused, "stimulus_id": DELIVERED}
            self._scheduler.worker_send(worker, message)


def _is_awaited(ts: TaskState, ws: WorkerState) -> bool:
    """Return whether a task waits for nothing but one task of a worker."""
    if ts.state != "waiting" or ts.waiting_on is None or len(ts.waiting_on) != 1:
        return False
    (bundle,) = ts.waiting_on
    return bundle.processing_on is ws
