"""Small results travel with the tasks that need them.

A worker that needs a result of another one asks that one for it. Request and answer go through all that
workers do to send and receive data, which takes both of them a millisecond or two, however small the result
is. So workers tell the scheduler small results just before the end of the task, where others may need them
elsewhere, and the scheduler sends them to a worker just before the task that needs them; as Ray inlines small
objects (Moritz et al. 2018). Large results go from worker to worker as ever. To the scheduler, small ones are
bytes that it does not look into.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.plugin import seams
from ferroflow_dask.plugin.durations import Durations
from ferroflow_dask.plugin.inlining_worker import INLINE

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

#: Inputs of a task that come with it: more are fetched, from each worker in one go.
_MOST_INPUTS = 32
#: Tasks that need a result and are looked at for whether it may come with one of them.
_READERS = 16
#: Where results of a kind are so many times as large as the limit, on average, hardly one is small.
_MIXED = 16
#: Bytes of results that are kept for tasks that may need them [B].
_KEPT_NBYTES = 2**26


@dataclass(slots=True)
class _Result:
    """A pickled result, and the workers that were sent it."""

    value: bytes
    sent_to: set[str] = field(default_factory=set)


class Inlining:
    """Keeps small results, and sends them with tasks, from `open` to `close`; O(links of a task) for each.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    durations : Durations
        What is known of the sizes of results.
    """

    def __init__(self, scheduler: Scheduler, durations: Durations) -> None:
        self._scheduler = scheduler
        self._durations = durations
        self._limit = 0
        self._listening: set[str] = set()
        # Whether results are kept for clients, too.
        self._for_clients = False
        # The oldest first.
        self._known: OrderedDict[Key, _Result] = OrderedDict()
        self._nbytes = 0
        #: Results that workers told, and that were sent before a task.
        self.counts = {"told": 0, "sent": 0}

    @property
    def is_open(self) -> bool:
        """Whether results are kept."""
        return self._limit > 0

    def open(self, limit: int, for_clients: bool) -> None:
        """Keep and send results up to a limit [B] from now on, with workers that tell that they listen."""
        self._limit = limit
        self._for_clients = for_clients

    def close(self) -> None:
        """Forget all results, and send none from now on."""
        self._limit = 0
        self.clear()
        self._listening.clear()

    def clear(self) -> None:
        """Forget all results."""
        self._known.clear()
        self._nbytes = 0

    def listens(self, address: str) -> None:
        """Note that a worker understands what comes before tasks."""
        if self.is_open and address in self._scheduler.workers:
            self._listening.add(address)

    def left(self, address: str) -> None:
        """Forget a worker."""
        self._listening.discard(address)

    def comes_with(self, ts: TaskState, needed: TaskState) -> bool:
        """Return whether a result comes with a task that needs it."""
        return needed.key in self._known and len(ts.dependencies) <= _MOST_INPUTS

    def value_of(self, key: Key) -> bytes | None:
        """Return a result, pickled, if it was told."""
        result = self._known.get(key)
        return None if result is None else result.value

    def comes_to(self, ws: WorkerState, key: Key) -> bool:
        """Return whether a worker is sent a result before a task that needs it."""
        return key in self._known and ws.address in self._listening

    def of_no_task(self) -> list[Key]:
        """Return the results that are kept and that nobody can need: of tasks that are forgotten."""
        return [key for key in self._known if key not in self._scheduler.tasks]

    def changed(self, key: Key, finish: str) -> None:
        """Note a task's transition, whatever it is."""
        if finish != "memory":
            self._forget(key)

    def _forget(self, key: Key) -> None:
        result = self._known.pop(key, None)
        if result is not None:
            self._nbytes -= len(result.value)

    def told(self, key: Key, run_id: int, value: bytes, worker: str) -> None:
        """Keep a result that a worker tells just before it tells that the task has ended."""
        ts = self._scheduler.tasks.get(key)
        ws = ts.processing_on if ts is not None else None
        if not self.is_open or ts is None or ws is None or (ws.address, ts.run_id) != (worker, run_id):
            return
        self._forget(key)
        self._known[key] = _Result(value)
        self._nbytes += len(value)
        self.counts["told"] += 1
        while self._nbytes > _KEPT_NBYTES:
            _, oldest = self._known.popitem(last=False)
            self._nbytes -= len(oldest.value)

    def before(self, ts: TaskState, ws: WorkerState) -> None:
        """Send a worker the small results that it lacks for a task that it is sent next."""
        if ws.address not in self._listening:
            return
        limit = self._limit if self._is_wanted(ts) else 0
        results = {}
        if self._known and len(ts.dependencies) <= _MOST_INPUTS:
            for needed in ts.dependencies:
                result = self._known.get(needed.key)
                if result is not None and not self._has(ws, needed, result):
                    results[needed.key] = result
        if results or limit:
            self._send(ws.address, ts.key, limit, {key: result.value for key, result in results.items()})
            self.counts["sent"] += len(results)
            for result in results.values():
                result.sent_to.add(ws.address)

    @staticmethod
    def _has(ws: WorkerState, needed: TaskState, result: _Result) -> bool:
        # Where it was sent and has gone since, it is fetched.
        return ws in (needed.who_has or ()) or ws.address in result.sent_to

    def took_back(self, key: Key, address: str) -> None:
        """Note that a worker no longer has a task, of which it may not have known yet."""
        if address in self._listening:
            self._send(address, key, 0, {})

    def _send(self, address: str, key: Key, limit: int, values: dict[Key, bytes]) -> None:
        self._scheduler.worker_send(address, {"op": INLINE, "key": key, "limit": limit, "values": values})

    def _is_wanted(self, ts: TaskState) -> bool:
        """Return whether a result may be small, and is for a client, or for a task that may run elsewhere."""
        is_for_clients = self._for_clients and ts.who_wants
        if not (seams.is_ordinary(ts) and (is_for_clients or self._may_be_needed_elsewhere(ts))):
            return False
        nbytes = self._durations.nbytes(ts)
        return nbytes is None or nbytes <= _MIXED * self._limit

    @staticmethod
    def _may_be_needed_elsewhere(ts: TaskState) -> bool:
        # What only one task needs, and that nothing else, stays where it is.
        n_least = 1 if len(ts.dependents) > 1 else 2
        readers = islice(ts.dependents, _READERS)
        return any(n_least <= len(reader.dependencies) <= _MOST_INPUTS for reader in readers)
