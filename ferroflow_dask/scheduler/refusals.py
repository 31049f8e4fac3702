"""Refusals: tasks that raised `distributed.Reschedule`, and the workers that they refused.

A worker that tasks refuse is idle, so it looks best each time, to Dask too. From its first refusal on, a task
is placed by Dask's own rule among the workers that it has not refused. Once it has refused all that it may
run on, it may return to each but the last one.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import Change, ItemChange

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

    from ferroflow_dask.scheduler.core import Core

_OPERATION = "reschedule"
#: The stimulus of the message if the task raised the exception. A worker that closes sends the same message.
_RAISED = "reschedule-"
_ENDS = frozenset({"memory", "erred", "forgotten"})


class Refusals:
    """Remembers refusals until the tasks end.

    Parameters
    ----------
    core : Core
    """

    def __init__(self, core: Core) -> None:
        self._scheduler = core.scheduler
        self._guard = core.guard
        self.refused = core.refused

    def change(self) -> Change:
        """Return the change to the scheduler."""
        handlers = self._scheduler.stream_handlers
        stock, note = handlers[_OPERATION], self._guard(self._note)

        @wraps(stock)
        def handle(key: Key, worker: str | None = None, *, stimulus_id: str) -> None:
            note(key, worker, stimulus_id)
            stock(key=key, worker=worker, stimulus_id=stimulus_id)

        return ItemChange(f"Scheduler.stream_handlers[{_OPERATION!r}]", handlers, _OPERATION, handle)

    def _note(self, key: Key, worker: str | None, stimulus_id: str) -> None:
        ts = self._scheduler.tasks.get(key)
        ws = None if ts is None else ts.processing_on
        if ws is not None and ws.address == worker and stimulus_id.startswith(_RAISED):
            self.add(key, worker)

    def add(self, key: Key, worker: str) -> None:
        """Note that a task has refused a worker."""
        self.refused[key] = (*(other for other in self.refused.get(key, ()) if other != worker), worker)

    def changed(self, key: Key, finish: str) -> None:
        """Note a transition of a task that has refused a worker."""
        if finish in _ENDS:
            del self.refused[key]

    def decision(self, ts: TaskState) -> WorkerState | None:
        """Return the worker for a task that has refused some."""
        refused = self.refused[ts.key]
        chosen = _distributed.stock_decision(self._scheduler, ts, refused)
        if chosen is None:
            self.refused[ts.key] = refused[-1:]
            chosen = _distributed.stock_decision(self._scheduler, ts, refused[-1:])
        return _distributed.stock_decision(self._scheduler, ts) if chosen is None else chosen
