"""Scheduler's end of inlining: keeps small results, and sends them with the tasks that read them.

In Dask a worker fetches a result from the worker that holds it. Request and answer take one to two
milliseconds of both workers' time, however small the result is. So workers add small results to the messages
that report tasks, if they may be read elsewhere, and the scheduler adds them to the messages that send tasks,
as Ray inlines small objects (Moritz et al. 2018). Large results are fetched as ever. The scheduler keeps
results as bytes and never unpickles them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.inlining.worker import RESULT, TASK, InlinedResults
from ferroflow_dask.scheduler.remote import Remote

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

    from ferroflow_dask.scheduler.core import Core

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


class Inlining:
    """Keeps small results and sends them with tasks, from `open` to `close`; O(links of a task) for each.

    Parameters
    ----------
    core : Core
    """

    def __init__(self, core: Core) -> None:
        self._scheduler = core.scheduler
        self._costs = core.learned.costs
        self._limit = 0
        #: The ends on workers.
        self.remote = Remote(core, InlinedResults)
        self._supporting = self.remote.supporting
        # Whether results are also kept for clients.
        self._for_clients = False
        #: Results that are kept, the oldest first.
        self.known: OrderedDict[Key, _Result] = OrderedDict()
        self._nbytes = 0
        #: Results received from workers, and results sent with a task.
        self.counts = {"received": 0, "sent": 0}

    @property
    def is_open(self) -> bool:
        """Whether results are kept."""
        return self._limit > 0

    def open(self, limit: int, for_clients: bool) -> None:
        """Keep and send results up to a limit [B], with workers that announce that they support it."""
        self._limit = limit
        self._for_clients = for_clients

    def close(self) -> None:
        """Forget all results."""
        self._limit = 0
        self.clear()

    def clear(self) -> None:
        """Forget all results."""
        self.known.clear()
        self._nbytes = 0

    def inputs_of(self, ts: TaskState) -> Mapping[Key, bytes]:
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

    def value_of(self, key: Key) -> bytes | None:
        """Return a pickled result; None if the scheduler does not have it."""
        result = self.known.get(key)
        return None if result is None else result[0]

    def comes_to(self, ws: WorkerState, key: Key) -> bool:
        """Return whether a worker gets a result with a plain task that reads it."""
        result = self.known.get(key) if ws.address in self._supporting else None
        return result is not None and result[1]

    def of_no_task(self) -> list[Key]:
        """Return the kept results of forgotten tasks; none if all is well."""
        return [key for key in self.known if key not in self._scheduler.tasks]

    def forget(self, key: Key) -> None:
        """Forget the result of a task, if it is kept."""
        result = self.known.pop(key, None)
        if result is not None:
            self._nbytes -= len(result[0])

    def finished(self, ts: TaskState, metadata: dict[str, Any]) -> None:
        """Keep the result in a report of a finished task, and take it out of the task's metadata."""
        value = metadata.pop(RESULT, None)
        if ts.metadata is not None:
            value = ts.metadata.pop(RESULT, value)
            ts.metadata = ts.metadata or None  # as if the report had none
        if value is None or not self._limit:
            return
        # A result that very many tasks read is fetched: once by each worker, not once for each task.
        is_inlined = len(value) * len(ts.dependents) <= self._limit * len(self._scheduler.workers)
        self.known[ts.key] = value, is_inlined
        self._nbytes += len(value)
        self.counts["received"] += 1
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
        for key, value in self.inputs_of(ts).items() if self.known and ts.dependencies else ():
            if ws.address not in message["who_has"][key]:
                values[key] = value
                del message["who_has"][key], message["nbytes"][key]
        if limit or values:
            self.counts["sent"] += len(values)
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
