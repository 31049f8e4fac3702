"""Estimators: the speed of each worker, learned from the durations of its tasks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable
from math import log2

#: Tasks of a worker that its pace is computed from, and the least number of them.
_REMEMBERED = 7
_ENOUGH = 3
#: Shorter tasks measure overheads rather than the worker [s].
_SHORTEST_S = 2e-3
#: Bound on the pace of one task, in octaves: durations of one prefix may have a long tail.
_MOST_OCTAVES = 5.0


class Paces:
    """Speed of each worker relative to the median worker, in powers of two.

    A worker's pace is the median of log2(measured / expected) over its last tasks, so one task that imports
    a library, or one rare long task, does not count. The median pace of all workers is the common error of
    the expectations. A worker is faster or slower than usual only if its pace differs from that median by
    more than the durations of its own tasks differ.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, deque[float]] = {}
        self._paces = _SortedValues()
        self._spreads = _SortedValues()

    def record(self, worker: Hashable, expected_s: float, measured_s: float) -> None:
        """Learn from a task that finished; the median of all workers may move, too."""
        if expected_s < _SHORTEST_S or measured_s < _SHORTEST_S:
            return
        octaves = max(-_MOST_OCTAVES, min(_MOST_OCTAVES, log2(measured_s / expected_s)))
        last = self._last.get(worker)
        if last is None:
            last = self._last[worker] = deque(maxlen=_REMEMBERED)
        last.append(octaves)
        ordered = sorted(last)
        pace = ordered[(len(ordered) - 1) // 2]
        if self._paces.of.get(worker) != pace:
            self._paces.put(worker, pace)
        n_outliers = len(ordered) // 5  # at either end
        spread = ordered[-1 - n_outliers] - ordered[n_outliers]
        if self._spreads.of.get(worker) != spread:
            self._spreads.put(worker, spread)

    def speed(self, worker: Hashable) -> float:
        """Return the speed of a worker relative to the median worker."""
        paces, spreads = self._paces, self._spreads
        if len(self._last.get(worker, ())) < _ENOUGH:
            return 1.0
        middle = (len(paces.ordered) - 1) // 2  # the smaller one of two
        octaves = paces.of[worker] - paces.ordered[middle]
        chance = max(spreads.of[worker], spreads.ordered[middle])
        if abs(octaves) <= chance:
            return 1.0
        return float(2.0 ** -round(octaves))

    def forget(self, worker: Hashable) -> None:
        """Drop a worker that left."""
        if worker in self._last:
            self._paces.drop(worker)
            self._spreads.drop(worker)
            del self._last[worker]


class _SortedValues:
    """One value for each worker, and all of them in order."""

    def __init__(self) -> None:
        self.of: dict[Hashable, float] = {}
        self.ordered: list[float] = []

    def put(self, worker: Hashable, value: float) -> None:
        before = self.of.get(worker)
        if before is not None:
            del self.ordered[bisect_left(self.ordered, before)]
        self.of[worker] = value
        insort(self.ordered, value)

    def drop(self, worker: Hashable) -> None:
        if worker in self.of:
            del self.ordered[bisect_left(self.ordered, self.of.pop(worker))]
