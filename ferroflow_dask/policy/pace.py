"""How fast workers are, learned from how long tasks take on them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable
from math import log2

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
        self._paces = _Values()
        self._spreads = _Values()

    def record(self, worker: Hashable, expected_s: float, measured_s: float) -> float:
        """Take a task that ended into account, and return the speed of its worker from now on."""
        if expected_s < _SHORTEST_S or measured_s < _SHORTEST_S:
            return self.speed(worker)
        octaves = max(-_MOST, min(_MOST, log2(measured_s / expected_s)))
        last = self._last.setdefault(worker, deque(maxlen=_REMEMBERED))
        last.append(octaves)
        ordered = sorted(last)
        self._paces.put(worker, ordered[(len(ordered) - 1) // 2])
        n_outliers = len(ordered) // 5  # at either end
        self._spreads.put(worker, ordered[-1 - n_outliers] - ordered[n_outliers])
        return self.speed(worker)

    def speed(self, worker: Hashable) -> float:
        """Return how many times as fast as usual a worker is."""
        if len(self._last.get(worker, ())) < _ENOUGH:
            return 1.0
        octaves = self._paces.of[worker] - self._paces.median
        chance = max(self._spreads.of[worker], self._spreads.median)
        if abs(octaves) <= chance:
            return 1.0
        return float(2.0 ** -round(octaves))

    def forget(self, worker: Hashable) -> None:
        """Drop a worker that left."""
        if worker in self._last:
            self._paces.drop(worker)
            self._spreads.drop(worker)
            del self._last[worker]


class _Values:
    """A value for each worker, and the median of them: of two in the middle the smaller."""

    def __init__(self) -> None:
        self.of: dict[Hashable, float] = {}
        self._sorted: list[float] = []

    @property
    def median(self) -> float:
        return self._sorted[(len(self._sorted) - 1) // 2]

    def put(self, worker: Hashable, value: float) -> None:
        if self.of.get(worker) != value:
            self.drop(worker)
            self.of[worker] = value
            insort(self._sorted, value)

    def drop(self, worker: Hashable) -> None:
        if worker in self.of:
            del self._sorted[bisect_left(self._sorted, self.of.pop(worker))]
