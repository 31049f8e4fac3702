"""How fast workers are, learned from how long tasks take on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from math import log2
from typing import Any

from sortedcontainers import SortedList

#: The last tasks of a worker that its pace is taken from.
_REMEMBERED = 7
#: Tasks of a worker before its pace counts.
_ENOUGH = 3
#: Shorter tasks tell more of overheads than of the worker [s].
_SHORTEST_S = 2e-3
#: One task tells no more than this factor, in octaves: durations of one name may have a long tail.
_MOST = 5.0


class Paces:
    """The speed of each worker relative to all, in powers of two.

    A worker's pace is the median of log2(measured / expected) over its last tasks, so that a first task that
    had to import something, or a rare long one, says nothing. The median over all workers is what
    expectations are wrong by; what a worker differs from it by is its own, as far as it is more than what
    tasks on one worker differ by. Steps of a factor of two keep noise out: where tasks are alike, a worker
    counts as slow from about 1.4 times the usual durations.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, deque[float]] = {}
        self._pace: dict[Hashable, float] = {}
        self._sorted: Any = SortedList()
        self._spread: dict[Hashable, float] = {}
        self._spreads: Any = SortedList()

    def record(self, worker: Hashable, expected_s: float, measured_s: float) -> float:
        """Take a task that ended into account, and return the speed of its worker from now on."""
        if expected_s < _SHORTEST_S or measured_s < _SHORTEST_S:
            return self.speed(worker)
        octaves = max(-_MOST, min(_MOST, log2(measured_s / expected_s)))
        last = self._last.setdefault(worker, deque(maxlen=_REMEMBERED))
        last.append(octaves)
        if worker in self._pace:
            self._sorted.remove(self._pace[worker])
            self._spreads.remove(self._spread[worker])
        ordered = sorted(last)
        self._pace[worker] = ordered[(len(ordered) - 1) // 2]
        n_outliers = len(ordered) // 5  # at either end
        self._spread[worker] = ordered[-1 - n_outliers] - ordered[n_outliers]
        self._sorted.add(self._pace[worker])
        self._spreads.add(self._spread[worker])
        return self.speed(worker)

    def speed(self, worker: Hashable) -> float:
        """Return how many times as fast as usual a worker is."""
        if len(self._last.get(worker, ())) < _ENOUGH:
            return 1.0
        middle = (len(self._sorted) - 1) // 2  # of two the faster
        octaves = self._pace[worker] - self._sorted[middle]
        chance = max(self._spread[worker], self._spreads[middle])
        if abs(octaves) <= chance:
            return 1.0
        return float(2.0 ** -round(octaves))

    def forget(self, worker: Hashable) -> None:
        """Drop a worker that left."""
        if worker in self._pace:
            self._sorted.remove(self._pace.pop(worker))
            self._spreads.remove(self._spread.pop(worker))
            del self._last[worker]
