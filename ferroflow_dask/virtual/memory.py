"""Memory of virtual workers: results that are spilled, pauses, and deaths.

`Store` stands for `distributed.spill.SpillBuffer`. `Memory` stands for `WorkerMemoryManager`, and for the
part of the nanny that ends a worker. Thresholds and intervals are those of distributed's configuration.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import dask
from dask.sizeof import sizeof
from dask.typing import Key
from dask.utils import parse_timedelta

from ferroflow_dask.topology.parts import DISK_BANDWIDTH
from ferroflow_dask.virtual.clock import Periodic, VirtualTime
from ferroflow_dask.virtual.record import MemoryRecord

#: A nanny starts a worker again in about this time [s].
RESTART_S = 2.0
#: Between two heartbeats of a worker of a small cluster [s] (`distributed.scheduler.heartbeat_interval`).
_HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """Memory of a worker.

    Parameters
    ----------
    nbytes : int
        Limit of the process [B].
    disk_bandwidth : float, optional
        Of what it spills and reads again [B/s].
    """

    nbytes: int
    disk_bandwidth: float = DISK_BANDWIDTH

    def threshold(self, name: str) -> float:
        """Return from where distributed acts [B]; infinite if the configuration switches that off."""
        share = dask.config.get(f"distributed.worker.memory.{name}")
        return share * self.nbytes if share else math.inf


class Store(MutableMapping[Key, object]):
    """Results of a worker, in memory or spilled; those that were used least recently are spilled first.

    Parameters
    ----------
    target : float
        Results in memory are spilled above this [B].
    """

    def __init__(self, target: float) -> None:
        self._target = target
        # By their last use.
        self._fast: dict[Key, tuple[object, int]] = {}
        self._slow: dict[Key, tuple[object, int]] = {}
        # How many running tasks have each as an input.
        self._held: Counter[Key] = Counter()
        #: Bytes in memory, on disk, and on disk while running tasks hold them in memory, too.
        self.fast_nbytes = self.slow_nbytes = self.held_nbytes = 0
        #: Bytes that were written to disk and read from it.
        self.written = self.read = 0

    def __getitem__(self, key: Key) -> object:
        """Return a result, which is in memory from now on."""
        if key in self._slow:
            value, nbytes = self._slow.pop(key)
            self.slow_nbytes -= nbytes
            if key in self._held:  # a weak reference finds it
                self.held_nbytes -= nbytes
            else:
                self.read += nbytes
            self._put(key, value, nbytes)
            return value
        found = self._fast[key] = self._fast.pop(key)
        return found[0]

    def __setitem__(self, key: Key, value: object) -> None:
        """Store a result in memory."""
        if key in self:
            del self[key]
        self._put(key, value, sizeof(value))

    def _put(self, key: Key, value: object, nbytes: int) -> None:
        self._fast[key] = value, nbytes
        self.fast_nbytes += nbytes
        if nbytes > self._target:  # it never stays in memory, and moves nothing else
            self._spill(key)
        while self.fast_nbytes > self._target:
            self.evict()

    def evict(self) -> int:
        """Spill the result that was used least recently; return its size [B], -1 if there is none."""
        oldest = next(iter(self._fast), None)
        return -1 if oldest is None else self._spill(oldest)

    def _spill(self, key: Key) -> int:
        found = self._slow[key] = self._fast.pop(key)
        nbytes = found[1]
        self.fast_nbytes -= nbytes
        self.slow_nbytes += nbytes
        self.held_nbytes += nbytes * (key in self._held)
        self.written += nbytes
        return nbytes

    def hold(self, keys: Sequence[Key]) -> None:
        """Have results in memory as inputs of a task, until they are dropped."""
        for key in keys:
            self[key]
            self._held[key] += 1

    def drop(self, keys: Sequence[Key]) -> None:
        """Drop the inputs of a task that has ended."""
        for key in keys:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self.held_nbytes -= self._slow[key][1] if key in self._slow else 0

    def __delitem__(self, key: Key) -> None:
        """Forget a result; one that is spilled is not read."""
        if key in self._slow:
            nbytes = self._slow.pop(key)[1]
            self.slow_nbytes -= nbytes
            self.held_nbytes -= nbytes * (key in self._held)
        else:
            self.fast_nbytes -= self._fast.pop(key)[1]

    def __contains__(self, key: object) -> bool:
        """Return whether a result is stored, without a use of it."""
        return key in self._fast or key in self._slow

    def __iter__(self) -> Iterator[Key]:
        """Yield the keys."""
        yield from self._fast
        yield from self._slow

    def __len__(self) -> int:
        return len(self._fast) + len(self._slow)


class Owner(Protocol):
    """Part of a virtual worker that its memory uses."""

    name: int

    def set_running(self, is_running: bool) -> None:
        """Pause or go on."""
        ...

    def block(self, seconds: float) -> None:
        """Occupy the event loop for some time [s]."""
        ...


class Memory:
    """The memory of a worker's process: results, and what running tasks take beside them.

    Parameters
    ----------
    spec : MemorySpec
    owner : Owner
    time : VirtualTime
    record : MemoryRecord
    tell : callable
        Takes metrics, as heartbeats have them.
    died : callable
        Called if a nanny would end the worker.
    """

    def __init__(
        self,
        spec: MemorySpec,
        owner: Owner,
        time: VirtualTime,
        record: MemoryRecord,
        *,
        tell: Callable[[dict[str, Any]], None],
        died: Callable[[], None],
    ) -> None:
        self.spec = spec
        self._owner = owner
        self._record = record
        self._tell = tell
        self._died = died
        self._target, self._spill, self._pause, self._terminate = map(
            spec.threshold, ("target", "spill", "pause", "terminate")
        )
        self.store = Store(self._target)
        # By what takes it: tasks and steps that run, and bundles.
        self._working: dict[object, int] = {}
        self._inputs: dict[Key, Sequence[Key]] = {}
        self._working_nbytes = self._seen = 0
        #: The most that the process has taken since this was set [B].
        self.largest = 0
        self._is_paused = False
        monitor_s = parse_timedelta(dask.config.get("distributed.worker.memory.monitor-interval"))
        self._looks = [
            Periodic(time, self._look, monitor_s * 1e3),
            Periodic(time, self._beat, _HEARTBEAT_S * 1e3),
        ]

    @property
    def nbytes(self) -> int:
        """Size of the process now [B]."""
        return self.store.fast_nbytes + self.store.held_nbytes + self._working_nbytes

    def load(self, key: Key, inputs: Iterable[Key]) -> None:
        """Have the inputs of a task in memory until it has ended."""
        self._inputs[key] = held = [one for one in inputs if one in self.store]
        self.store.hold(held)
        self.changed()

    def works(self, what: object, nbytes: int) -> None:
        """Set the memory of a running task, step or bundle, without results [B]; 0 at its end."""
        self._working_nbytes += nbytes - self._working.pop(what, 0)
        if nbytes:
            self._working[what] = nbytes
        self.changed()

    def during(self, key: Key, nbytes: int, ended: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return `ended`, up to whose call a task takes some bytes beside its inputs and its result."""
        self.works(("task", key), nbytes)

        def free(result: Any) -> None:
            self.works(("task", key), 0)
            ended(result)

        return free

    def ended(self, key: Key) -> None:
        """Drop the inputs and values of a task or a bundle that has ended."""
        self.store.drop(self._inputs.pop(key))
        self.works(key, 0)

    def changed(self) -> None:
        """Record the peaks, and block the event loop for the bytes written and read since the last call."""
        record, store, name = self._record, self.store, self._owner.name
        self.largest = max(self.largest, self.nbytes)
        record.holds(name, self.nbytes, store.fast_nbytes + store.slow_nbytes)
        moved = store.written + store.read
        if moved > self._seen:
            record.written[name], record.read[name] = store.written, store.read
            self._owner.block((moved - self._seen) / self.spec.disk_bandwidth)
            self._seen = moved

    def die(self) -> None:
        """Stop all looks: the worker has ended."""
        for look in self._looks:
            look.stop()
        self._record.holds(self._owner.name, 0, 0)

    def _look(self) -> None:
        """Look as the memory monitors of worker and nanny do: end, pause, resume, spill."""
        if self.nbytes > self._terminate:
            self._record.deaths.append(self._owner.name)
            self._died()
            return
        if self._is_paused is not (self.nbytes > self._pause):
            self._is_paused = not self._is_paused
            self._record.pauses += self._is_paused
            self._owner.set_running(not self._is_paused)
        if self.nbytes > self._spill:
            while self.nbytes > self._target and self.store.evict() >= 0:
                pass
            self.changed()

    def _beat(self) -> None:
        store = self.store
        self._tell(
            {
                "memory": self.nbytes,
                "managed_bytes": store.fast_nbytes,
                "spilled_bytes": {"memory": store.slow_nbytes, "disk": store.slow_nbytes},
            }
        )
