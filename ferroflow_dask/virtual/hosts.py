"""Hosts: cores that processes share, and processes that do one thing after the other."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from ferroflow_dask.virtual.clock import VirtualTime

#: Sums of floats leave dust; no work is as short as this [s].
_DUST_S = 1e-12


class Cores:
    """The cores of a host. What runs on them gets equal shares, and one core at most.

    Parameters
    ----------
    time : VirtualTime
    n : float
        Infinite if nothing ever waits for a core.
    """

    def __init__(self, time: VirtualTime, n: float = math.inf) -> None:
        self._time = time
        self._n = n
        # The processor time that something has had that has run from the start [s]: all that runs gets the
        # same, so it ends in the order of what this time will be at its end.
        self._attained_s = 0.0
        self._since = 0.0
        self._running: list[tuple[float, int, Callable[[], Any]]] = []
        self._numbers = count()
        self._armed = 0
        #: When the call that is armed is due.
        self._due_at = math.inf

    def run(self, work_s: float, done: Callable[[], Any]) -> None:
        """Call `done` once some work has had its processor time [s]; O(log n)."""
        if self._n == math.inf:
            self._time.after(work_s, done)
            return
        self._advance()
        heapq.heappush(self._running, (self._attained_s + work_s, next(self._numbers), done))
        self._arm()

    def _rate(self) -> float:
        return min(1.0, self._n / len(self._running)) if self._running else 1.0

    def _advance(self) -> None:
        now = self._time.now
        self._attained_s += (now - self._since) * self._rate()
        self._since = now

    def _arm(self) -> None:
        """Have `_end` called when the next work ends, unless it will be anyway."""
        due_at = math.inf
        if self._running:
            due_at = self._time.now + max(0.0, self._running[0][0] - self._attained_s) / self._rate()
        if due_at == self._due_at:
            return
        self._due_at = due_at
        self._armed += 1
        if due_at < math.inf:
            self._time.at(due_at, self._end, self._armed)

    def _end(self, armed: int) -> None:
        if armed != self._armed:
            return  # it was armed for another time since
        self._due_at = math.inf
        self._advance()
        # What was due now ends, even if dust is left of it.
        self._attained_s = max(self._attained_s, self._running[0][0])
        ended = []
        while self._running and self._running[0][0] <= self._attained_s + _DUST_S:
            ended.append(heapq.heappop(self._running)[2])
        self._arm()
        for done in ended:
            done()


class Process:
    """An event loop on a host: it does one thing after the other.

    Parameters
    ----------
    time : VirtualTime
    cores : Cores
    """

    def __init__(self, time: VirtualTime, cores: Cores) -> None:
        self._time = time
        self._cores = cores
        self._waiting: deque[tuple[float, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_busy = False
        #: Processor time that it has had [s].
        self.worked_s = 0.0
        # Of the load, as in `batching.worker.Load`.
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._window_since, self._window_busy_s, self._load = 0.0, 0.0, 0.0

    def run(self, work_s: float, call: Callable[..., Any], *args: Any) -> None:
        """Call `call(*args)` after some work, once all that came before is done."""
        if not work_s and not self._is_busy:
            call(*args)
            return
        self._waiting.append((work_s, call, args))
        if not self._is_busy:
            self._is_busy = True
            self._busy_since = self._time.now
            self._next()

    def _next(self) -> None:
        work_s, call, args = self._waiting.popleft()
        self.worked_s += work_s
        self._cores.run(work_s, lambda: self._done(call, args))

    def _done(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        call(*args)
        if self._waiting:
            self._next()
        else:
            self._is_busy = False
            self._busy_s += self._time.now - self._busy_since

    def load(self, now_s: float, window_s: float = 0.01) -> float:
        """Return the part of the last window in which it was busy, or waited for a core; from 0 to 1."""
        elapsed_s = now_s - self._window_since
        if elapsed_s >= window_s:
            busy_s = self._busy_s + (now_s - self._busy_since if self._is_busy else 0.0)
            self._load = (busy_s - self._window_busy_s) / elapsed_s if elapsed_s < 10 * window_s else 0.0
            self._window_since, self._window_busy_s = now_s, busy_s
        return self._load
