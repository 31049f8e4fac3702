"""Refusals: tasks that raised `distributed.Reschedule`, and the workers that they refused.

A worker that tasks refuse is idle, so it looks best to a policy each time. From its first refusal on, a task
is placed by Dask's own rule, and not on the worker that it refused last while another one is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import Change, Guard, ItemChange

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

_OPERATION = "reschedule"
#: The stimulus of the message if the task raised the exception. A worker that closes sends the same message.
_RAISED = "reschedule-"
_ENDS = frozenset({"memory", "erred", "forgotten"})


class Refusals:
    """Remembers refusals until the tasks end.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    doubt : callable
        Called with the key of a task that must not be prefetched.
    """

    def __init__(self, scheduler: Scheduler, doubt: Callable[[Key], object]) -> None:
        self._scheduler = scheduler
        self._doubt = doubt
        #: The worker that a task refused last, by its address.
        self.last: dict[Key, str] = {}

    def change(self, guard: Guard) -> Change:
        """Return the change to the scheduler."""
        handlers = self._scheduler.stream_handlers
        stock, note = handlers[_OPERATION], guard(self._note)

        def handle(key: Key, worker: str | None = None, *, stimulus_id: str) -> None:
            note(key, worker, stimulus_id)
            stock(key=key, worker=worker, stimulus_id=stimulus_id)

        return ItemChange(f"Scheduler.stream_handlers[{_OPERATION!r}]", handlers, _OPERATION, handle)

    def _note(self, key: Key, worker: str | None, stimulus_id: str) -> None:
        ts = self._scheduler.tasks.get(key)
        ws = None if ts is None else ts.processing_on
        if ws is not None and ws.address == worker and stimulus_id.startswith(_RAISED):
            self.last[key] = worker
            self._doubt(key)

    def changed(self, key: Key, finish: str) -> None:
        """Note a transition of a task that has refused a worker."""
        if finish in _ENDS:
            del self.last[key]

    def decision(self, ts: TaskState) -> WorkerState | None:
        """Return the worker that Dask would choose among those that a task has not refused last."""
        refused = self._scheduler.workers.get(self.last[ts.key])
        return _distributed.stock_decision(self._scheduler, ts, refused)
