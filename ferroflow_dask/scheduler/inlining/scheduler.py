"""Scheduler's end of inlining: keeps small results, and sends them with the tasks that read them.

In Dask a worker fetches a result from the worker that holds it. Request and answer take one to two
milliseconds of both workers' time, however small the result is. So workers send small results to the
scheduler just before they report the task, if they may be read elsewhere, and the scheduler sends them just
before a task that reads them, as Ray inlines small objects (Moritz et al. 2018). Large results are fetched as
ever. The scheduler keeps results as bytes and never unpickles them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.cost_model import CostModel
from ferroflow_dask.scheduler.inlining.worker import INLINE

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

#: A task with more inputs fetches them, from each worker in one request.
_MOST_INPUTS = 32
#: Dependents of a task that are checked for whether its result may be inlined.
_READERS = 16
#: A result is not asked for if results of its group are on average this many times the limit.
_MIXED = 16
#: Bytes of results that the scheduler keeps [B].
_KEPT_NBYTES = 2**26


@dataclass(slots=True)
class _Result:
    """A pickled result and the workers that it was sent to."""

    value: bytes
    sent_to: set[str] = field(default_factory=set)


class Inlining:
    """Keeps small results and sends them with tasks, from `open` to `close`; O(links of a task) for each.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    costs : CostModel
        Knows the sizes of results.
    """

    def __init__(self, scheduler: Scheduler, costs: CostModel) -> None:
        self._scheduler = scheduler
        self._costs = costs
        self._limit = 0
        self._supporting: set[str] = set()
        # Whether results are also kept for clients.
        self._for_clients = False
        #: Results that are kept, the oldest first.
        self.known: OrderedDict[Key, _Result] = OrderedDict()
        self._nbytes = 0
        #: Results received from workers, and results sent before a task.
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
        """Forget all results and workers."""
        self._limit = 0
        self.clear()
        self._supporting.clear()

    def clear(self) -> None:
        """Forget all results."""
        self.known.clear()
        self._nbytes = 0

    def supports(self, address: str) -> None:
        """Note that a worker supports inlined results."""
        if self.is_open and address in self._scheduler.workers:
            self._supporting.add(address)

    @property
    def supporting(self) -> frozenset[str]:
        """Workers that have announced that they support inlined results."""
        return frozenset(self._supporting)

    def left(self, address: str) -> None:
        """Forget a worker."""
        self._supporting.discard(address)

    def inlined_for(self, ts: TaskState) -> Container[Key]:
        """Return the tasks whose results are sent with a task that reads them."""
        return self.known if len(ts.dependencies) <= _MOST_INPUTS else ()

    def value_of(self, key: Key) -> bytes | None:
        """Return a pickled result; None if the scheduler does not have it."""
        result = self.known.get(key)
        return None if result is None else result.value

    def comes_to(self, ws: WorkerState, key: Key) -> bool:
        """Return whether a worker gets a result before a task that reads it."""
        return key in self.known and ws.address in self._supporting

    def of_no_task(self) -> list[Key]:
        """Return the kept results of forgotten tasks; none if all is well."""
        return [key for key in self.known if key not in self._scheduler.tasks]

    def forget(self, key: Key) -> None:
        """Forget the result of a task, if it is kept."""
        result = self.known.pop(key, None)
        if result is not None:
            self._nbytes -= len(result.value)

    def received(self, key: Key, run_id: int, value: bytes, worker: str) -> None:
        """Keep a result that a worker sends just before it reports the task."""
        ts = self._scheduler.tasks.get(key)
        ws = ts.processing_on if ts is not None else None
        if not self.is_open or ts is None or ws is None or (ws.address, ts.run_id) != (worker, run_id):
            return
        self.forget(key)
        self.known[key] = _Result(value)
        self._nbytes += len(value)
        self.counts["received"] += 1
        while self._nbytes > _KEPT_NBYTES:
            _, oldest = self.known.popitem(last=False)
            self._nbytes -= len(oldest.value)

    def before(self, ts: TaskState, ws: WorkerState) -> None:
        """Send a worker the small results that it lacks for the task that is sent next."""
        if ws.address not in self._supporting:
            return
        limit = self._limit if self._is_wanted(ts) else 0
        results = {}
        if self.known and ts.dependencies and len(ts.dependencies) <= _MOST_INPUTS:
            for needed in ts.dependencies:
                result = self.known.get(needed.key)
                if result is not None and not self._has(ws, needed, result):
                    results[needed.key] = result
        if results:
            values = {key: result.value for key, result in results.items()}
            self._send(ws.address, ts.key, limit, values)
            self.counts["sent"] += len(results)
            for result in results.values():
                result.sent_to.add(ws.address)
        elif limit:
            self._send(ws.address, ts.key, limit, {})

    @staticmethod
    def _has(ws: WorkerState, needed: TaskState, result: _Result) -> bool:
        # A result that was sent and has been dropped since is fetched.
        return ws in (needed.who_has or ()) or ws.address in result.sent_to

    def took_back(self, key: Key, address: str) -> None:
        """Cancel the request for a task's result, which a worker may not have received yet."""
        if address in self._supporting:
            self._send(address, key, 0, {})

    def _send(self, address: str, key: Key, limit: int, values: dict[Key, bytes]) -> None:
        self._scheduler.worker_send(address, {"op": INLINE, "key": key, "limit": limit, "values": values})

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
