"""Fixed values: results that cannot be sent to another worker, so their readers run where they are.

Results of some types are known to be fixed. Of others the scheduler learns it from the worker that failed to
fetch one: then all results of that prefix and type are fixed, until one is fetched. A worker that failed
never tries again, and Dask lets the reader wait for ever (dask/distributed#6705). So the reader is placed
again: with the value, if its restrictions allow that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import Change, Changes, Guard, ItemChange

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from ferroflow_dask.bundling.bundle import Bundle

#: Types that `pickle` refuses, as `dask.utils.typename` names them.
TYPES = frozenset(
    (
        *("_thread.lock", "_thread.RLock", "_thread._local", "threading.Condition", "threading.Event"),
        *("socket.socket", "sqlite3.Connection", "sqlite3.Cursor", "module"),
        *("generator", "async_generator", "coroutine", "_io.FileIO", "_io.TextIOWrapper"),
        *("_io.BufferedReader", "_io.BufferedWriter", "_io.BufferedRandom"),
    )
)
#: Result of a bundle: what is in it decides.
_RESULTS = "ferroflow_dask.bundling.results.Results"
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
_STIMULUS = "ferroflow-fixed"


class FixedValues:
    """Knows which results are fixed, and places their readers again after a transfer has failed.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    bundle_of : callable
        Returns the bundle that a task runs, by its key; None if there is none.
    split : callable
        Splits a bundle, given its key and a stimulus; returns whether it did.
    allowed : callable
        Returns the workers on which a task may run, by address; None for all.
    restrict : callable
        Called after other values have become fixed: tasks in queues may move to fewer workers, or to more.
    changes : Changes
    guard : Guard
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        bundle_of: Callable[[Key], Bundle | None],
        split: Callable[[Key, str], bool],
        allowed: Callable[[TaskState], Collection[str] | None],
        restrict: Callable[[], object],
        changes: Changes,
        guard: Guard,
    ) -> None:
        self._scheduler = scheduler
        self._bundle_of = bundle_of
        self._split = guard(split)
        self._allowed = allowed
        self._restrict = restrict
        self._changes = changes
        self._guard = guard
        #: Types whose results are fixed.
        self.types: frozenset[str] = TYPES
        #: Type of the fixed results by prefix; "" for any.
        self.prefixes: dict[str, str] = {}
        # Values that a worker has failed to fetch without a sign that they are fixed.
        self._doubtful: WeakSet[TaskState] = WeakSet()

    def scheduler_started(self) -> None:
        """Fix no types if all workers are in this process: they share all objects."""
        if _distributed.is_in_process(self._scheduler):
            self.types = frozenset()

    def handlers(self) -> Iterable[Change]:
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

    # What is fixed

    def is_fixed(self, ts: TaskState) -> bool:
        """Return whether the result of a task is fixed, as far as is known; may be called by any thread."""
        if ts.type in self.types:
            return True
        prefixes = self.prefixes
        return bool(prefixes) and any(prefixes.get(name) in ("", ts.type) for name in self._prefixes_of(ts))

    def _prefixes_of(self, ts: TaskState) -> list[str]:
        """Return the prefixes of the values in the result of a task."""
        bundle = self._bundle_of(ts.key) if ts.type == _RESULTS else None
        return [ts.prefix.name] if bundle is None else [key_split(key) for key in bundle.exports]

    def holders(self, ts: TaskState) -> frozenset[str] | None:
        """Return the addresses of the workers with all fixed inputs of a task; None if there are none."""
        found: frozenset[str] | None = None
        for needed in ts.dependencies:
            if self.is_fixed(needed):
                there = frozenset(ws.address for ws in needed.who_has or ())
                found = there if found is None else found & there
        return found

    def must_wait(self, ts: TaskState) -> bool:
        """Return whether a task that reads fixed values has to wait without a worker.

        The workers that have the values are paused, or it is a bundle whose tasks read them on several
        workers. Such a bundle is split.
        """
        holders = self.holders(ts)
        if holders is None:
            return False
        if holders:
            return all(ws.address not in holders for ws in self._scheduler.running)
        if not self._is_divisible(ts):
            return False
        self._scheduler.loop.add_callback(self._split, ts.key, _STIMULUS)
        return True

    def _is_divisible(self, ts: TaskState) -> bool:
        bundle = self._bundle_of(ts.key)
        return bundle is not None and len(bundle.tasks) > 1

    # What workers report

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
        """Note that a result is fixed."""
        if self.is_fixed(ts):
            return
        if not self.prefixes:
            self._fetched_change = self._before(
                self._scheduler.stream_handlers, _FETCHED, self._guard(self._were_fetched)
            )
            self._changes.make(self._fetched_change)
        names = self._prefixes_of(ts)
        self.prefixes |= dict.fromkeys(names, "" if ts.type == _RESULTS else str(ts.type))
        self._restrict()

    def _were_fetched(self, keys: Collection[Key] = (), **_: Any) -> None:
        """Note that values were fetched: those of their prefixes are not fixed."""
        n_before = len(self.prefixes)
        for key in keys:
            ts = self._scheduler.tasks.get(key)
            for name in self._prefixes_of(ts) if ts is not None else ():
                self.prefixes.pop(name, None)
        if len(self.prefixes) < n_before:
            self._restrict()
        if n_before and not self.prefixes:
            self._changes.undo(self._fetched_change)

    def _place_readers(self, ts: TaskState, worker: str) -> None:
        """Place the readers of a value again that wait for it on a worker."""
        for reader in list(ts.dependents):
            if reader.processing_on is None or reader.processing_on.address != worker:
                continue
            if reader.actor or reader.loose_restrictions:  # Dask would choose the same worker again
                continue
            allowed = self._allowed(reader)
            if allowed is None or len(allowed) or self.must_wait(reader):
                _distributed.reschedule(self._scheduler, reader, _STIMULUS)
