"""Scheduler's end of inlining: keeps small results, and sends them with the tasks that read them.

In Dask a worker fetches a result from the worker that holds it. Request and answer take one to two
milliseconds of both workers' time, however small the result is. So workers add small results to the messages
that report tasks, if they may be read elsewhere, and the scheduler adds them to the messages that send tasks,
as Ray inlines small objects (Moritz et al. 2018). Large results are fetched as ever. The scheduler keeps
results as bytes and never unpickles them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask import config
from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import CallChange, Change
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.features.inlined_results_worker import RESULT, TASK, ReportedResults
from ferroflow_dask.scheduler.hooks import Watch
from ferroflow_dask.scheduler.remote import Remote

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

#: A task with more inputs fetches them, from each worker in one request.
_MOST_INPUTS = 32
#: Dependents of a task that are checked for whether its result may be inlined.
_READERS = 16
#: A result is not asked for if results of its group are on average this many times the limit.
_MIXED = 16
#: Bytes of results that the scheduler keeps [B].
_KEPT_NBYTES = 2**26


_NONE: Mapping[Key, bytes] = MappingProxyType({})


#: A pickled result, and whether it is sent with tasks, not only to clients.
_Result = tuple[bytes, bool]


class InlinedResults(Feature):
    """Keeps small results and sends them with tasks; O(links of a task) for each."""

    name = "inlined_results"
    summary = "Small results travel with the tasks that read them, and to clients"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._scheduler = core.scheduler
        self._costs = core.learned.costs
        self._limit = config.get_bytes("inline-limit")
        self._is_open = False
        # Whether results are also kept for clients. Those of this process get results as objects.
        self._for_clients = False
        #: Its ends on workers.
        self.remote = Remote(core, ReportedResults)
        self._supporting = self.remote.supporting
        #: Results that are kept, the oldest first.
        self.known: OrderedDict[Key, _Result] = OrderedDict()
        self._nbytes = 0
        self._counts = {"received": 0, "sent": 0}

    def unavailable(self) -> str:
        """Return why no results are inlined."""
        return "" if self._limit else "the setting ferroflow.inline-limit is 0"

    def changes(self) -> Iterable[Change]:
        """Keep and send results from now on, with workers that announce that they support it."""
        yield self.remote
        yield CallChange("inlined results", self._open, self._close)

    def counts(self) -> Mapping[str, int]:
        """Return how many results were received from workers, and how many were sent with a task."""
        return self._counts

    def _open(self) -> None:
        self._is_open = True
        self._for_clients = not _distributed.is_in_process(self._scheduler)

    def _close(self) -> None:
        self._is_open = False
        self.restart()

    def restart(self) -> None:
        """Forget all results."""
        self.known.clear()
        self._nbytes = 0

    def arrives_with(self, ts: TaskState) -> Mapping[Key, bytes]:
        """Return the pickled inputs that are sent with a task; O(inputs)."""
        known = self.known
        if not known or len(ts.dependencies) > _MOST_INPUTS:
            return _NONE
        found = {}
        for needed in ts.dependencies:
            result = known.get(needed.key)
            if result is not None and result[1]:
                found[needed.key] = result[0]
        return found if found and _distributed.is_plain(ts) else _NONE

    def result_of(self, key: Key) -> bytes | None:
        """Return a pickled result; None if the scheduler does not have it."""
        result = self.known.get(key)
        return None if result is None else result[0]

    def brings(self, ws: WorkerState, key: Key) -> bool:
        """Return whether a worker gets a result with a plain task that reads it."""
        result = self.known.get(key) if ws.address in self._supporting else None
        return result is not None and result[1]

    def pending(self) -> Collection[Key]:
        """Return the kept results of forgotten tasks."""
        return [key for key in self.known if key not in self._scheduler.tasks]

    def watches(self) -> Iterable[Watch]:
        """Follow the tasks whose results are kept."""
        yield Watch(self.known, True, self._left_memory)

    def _left_memory(self, key: Key, start: str, finish: str) -> None:
        result, _ = self.known.pop(key)
        self._nbytes -= len(result)

    def task_reported(self, ts: TaskState, metadata: dict[str, Any]) -> None:
        """Keep the result in a report of a finished task, and take it out of the task's metadata."""
        value = metadata.pop(RESULT, None)
        if ts.metadata is not None:
            value = ts.metadata.pop(RESULT, value)
            ts.metadata = ts.metadata or None  # as if the report had none
        if value is None or not self._is_open:
            return
        # A result that very many tasks read is fetched: once by each worker, not once for each task.
        is_inlined = len(value) * len(ts.dependents) <= self._limit * len(self._scheduler.workers)
        self.known[ts.key] = value, is_inlined
        self._nbytes += len(value)
        self._counts["received"] += 1
        while self._nbytes > _KEPT_NBYTES:
            _, oldest = self.known.popitem(last=False)
            self._nbytes -= len(oldest[0])

    def message(self, ts: TaskState, ws: WorkerState, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message for a task: Dask's own, or one with inputs or a request for the result.

        Parameters
        ----------
        ts : distributed.scheduler.TaskState
        ws : distributed.scheduler.WorkerState
            The worker that the task is sent to.
        message : dict
            Dask's message, which is changed.
        """
        if ws.address not in self._supporting:
            return message
        limit = self._limit if self._is_wanted(ts) else 0
        values = {}
        for key, value in self.arrives_with(ts).items() if self.known and ts.dependencies else ():
            if ws.address not in message["who_has"][key]:
                values[key] = value
                del message["who_has"][key], message["nbytes"][key]
        if limit or values:
            self._counts["sent"] += len(values)
            message |= {"op": TASK, "limit": limit, "values": values}
        return message

    def _is_wanted(self, ts: TaskState) -> bool:
        """Return whether a result may be small, and a client or a task on another worker may read it."""
        if not (self._for_clients and ts.who_wants):
            # The single dependent of a task, if it has no other input, runs on the same worker.
            n_least = 1 if len(ts.dependents) > 1 else 2
            for reader in islice(ts.dependents, _READERS):
                if n_least <= len(reader.dependencies) <= _MOST_INPUTS:
                    break
            else:
                return False
        nbytes = self._costs.nbytes(ts)
        return (nbytes is None or nbytes <= _MIXED * self._limit) and _distributed.is_ordinary(ts)
