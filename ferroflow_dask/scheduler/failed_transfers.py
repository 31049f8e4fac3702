"""Failed transfers: a worker could not fetch a value, so the task that reads it is placed again.

A worker that failed never tries again, and Dask lets the reader wait for ever (dask/distributed#6705). So the
reader is placed again: with the value, if its restrictions allow that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import Change, ItemChange

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.fixed_values import FixedValues
    from ferroflow_dask.scheduler.placing import Placing
    from ferroflow_dask.scheduler.task_view import TaskViews

#: distributed takes these apart: its error names the type of an item.
_CONTAINERS = frozenset({"list", "tuple", "dict", "set", "frozenset"})
_ERROR = re.compile(r"Could not serialize object of type (\w+)")
#: After a failure, distributed reuses the connection, on which the other worker still waits for the receipt.
#: The next request fails with this error.
_OUT_OF_STEP = "AssertionError({'op': 'get_data'"
#: Operations of workers' messages: a value could not be fetched, or was not found; values were fetched.
_ERRED, _MISSING, _FETCHED = "task-erred", "request-refresh-who-has", "add-keys"
#: The stimulus of the second message if no worker is known that has the value, not one that is busy.
_NOT_FOUND = "find-missing"
_STIMULUS = "ferroflow-not-fetched"


class FailedTransfers:
    """Learns from failed transfers which values are fixed, and places their readers again.

    Parameters
    ----------
    core : Core
    fixed : FixedValues
    task_views : TaskViews
    placing : Placing
    """

    def __init__(self, core: Core, fixed: FixedValues, task_views: TaskViews, placing: Placing) -> None:
        self._scheduler = core.scheduler
        self._changes = core.changes
        self._guard = core.guard
        self._fixed = fixed
        self._task_views = task_views
        self._placing = placing
        # Values that a worker has failed to fetch without a sign that they are fixed.
        self._doubtful: WeakSet[TaskState] = WeakSet()

    def changes(self) -> Iterable[Change]:
        """Return the changes to the scheduler."""
        handlers = self._scheduler.stream_handlers
        for operation, received in ((_ERRED, self._not_fetched), (_MISSING, self._not_found)):
            yield self._before(handlers, operation, self._guard(received))

    @staticmethod
    def _before(handlers: dict[str, Any], operation: str, received: Callable[..., None]) -> Change:
        stock = handlers[operation]

        @wraps(stock)
        def handle(**message: Any) -> Any:
            received(**message)
            return stock(**message)

        return ItemChange(f"Scheduler.stream_handlers[{operation!r}]", handlers, operation, handle)

    def _not_fetched(self, key: Key, worker: str, exception_text: str = "", **_: Any) -> None:
        ts = self._scheduler.tasks.get(key)
        if ts is None or not self._is_elsewhere(ts, worker):
            return
        named = _ERROR.search(exception_text)
        kind = str(ts.type).rpartition(".")[2]
        # A worker fetches several values at once, and all of them fail if one does.
        if not exception_text.startswith(_OUT_OF_STEP):
            if named is None or kind in _CONTAINERS or kind == named[1] or ts in self._doubtful:
                self._learn(ts)
            self._doubtful.add(ts)
        self._place_readers(ts, worker)

    def _not_found(self, keys: Collection[Key], worker: str, stimulus_id: str) -> None:
        if not stimulus_id.startswith(_NOT_FOUND):
            return
        for key in keys:
            ts = self._scheduler.tasks.get(key)
            if ts is None or not self._is_elsewhere(ts, worker):
                continue
            if ts in self._doubtful:  # Dask's answer to the first message lets the worker try again
                self._learn(ts)
                self._place_readers(ts, worker)
            self._doubtful.add(ts)

    def _is_elsewhere(self, ts: TaskState, worker: str) -> bool:
        """Return whether other workers have a value, and this one does not."""
        return bool(ts.who_has) and all(ws.address != worker for ws in ts.who_has or ())

    def _learn(self, ts: TaskState) -> None:
        """Remember that a result is fixed."""
        if self._fixed.is_fixed(ts):
            return
        if not self._fixed.prefixes:
            self._fetched_change = self._before(
                self._scheduler.stream_handlers, _FETCHED, self._guard(self._were_fetched)
            )
            self._changes.make(self._fetched_change)
        self._fixed.learn(ts)
        self._placing.restrict_assigned()

    def _were_fetched(self, keys: Collection[Key] = (), **_: Any) -> None:
        """Handle values that were fetched: results of their prefixes are not fixed."""
        n_before = len(self._fixed.prefixes)
        if self._fixed.were_fetched(keys):
            self._placing.restrict_assigned()
        if n_before and not self._fixed.prefixes:
            self._changes.undo(self._fetched_change)

    def _place_readers(self, ts: TaskState, worker: str) -> None:
        """Place the readers of a value again that wait for it on a worker."""
        for reader in list(ts.dependents):
            if reader.processing_on is None or reader.processing_on.address != worker:
                continue
            if reader.actor or reader.loose_restrictions:  # Dask would choose the same worker again
                continue
            allowed = self._task_views(reader).allowed
            if allowed is None or len(allowed) or self._fixed.must_wait(reader):
                _distributed.reschedule(self._scheduler, reader, _STIMULUS)
