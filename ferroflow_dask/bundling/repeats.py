"""Repeated graphs: which cuts graphs of one shape have had, and how long they took."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from math import fsum, inf
from typing import NamedTuple

#: Runs of a graph from which on measured durations count.
_ENOUGH = 3
#: One run in so many tries a cut that was never measured: the one after the first `_ENOUGH`, and so on.
_ONE_IN = 8
#: Weight of a new duration in a mean, at least.
_WEIGHT = 0.2
#: Shapes that are remembered.
_KEPT = 1_000


class Mean(NamedTuple):
    """The mean duration of some runs [s]; infinite if the only one could not be measured."""

    n: int
    mean_s: float


#: By the name of a cut.
Measured = Mapping[str, Mean]


def shape_of(
    prefixes: Sequence[str],
    edges: Sequence[Sequence[int]],
    declared_nbytes: Iterable[float],
    n_wanted: int,
    threads: Sequence[int],
) -> int:
    """Return a number that repeated graphs share.

    They have the same numbers of tasks by prefix, of edges, and of declared bytes. Learned sizes change from
    run to run and are left out. A cluster with other threads, or another process, has another number.
    """
    tasks = frozenset(Counter(prefixes).items())
    return hash((tasks, sum(map(len, edges)), fsum(declared_nbytes), n_wanted, tuple(threads)))


def fastest(measured: Measured) -> str | None:
    """Return the cut with the least mean duration; None if there were too few runs."""
    if sum(one.n for one in measured.values()) < _ENOUGH:
        return None
    return min(measured, key=lambda name: measured[name].mean_s)


def tries(measured: Measured) -> bool:
    """Return whether the next run should try a cut that was never measured."""
    return sum(one.n for one in measured.values()) % _ONE_IN == _ENOUGH


class Repeats:
    """Measured durations of graphs by shape and cut."""

    def __init__(self) -> None:
        self._by_shape: OrderedDict[int, Measured] = OrderedDict()

    def __contains__(self, shape: int) -> bool:
        """Return whether a graph of this shape was measured."""
        return shape in self._by_shape

    def started(self, shape: int, cut: str) -> None:
        """Count a run that tries a cut of a measured graph, whether it can be measured or not."""
        measured = self._by_shape.get(shape)
        if measured is not None and cut not in measured:
            self._by_shape[shape] = {**measured, cut: Mean(1, inf)}

    def record(self, shape: int, cut: str, seconds: float) -> None:
        """Learn the duration of a graph [s]."""
        measured = self._by_shape.get(shape, {})
        before = measured.get(cut, Mean(0, 0.0))
        if before.mean_s == inf:
            before = Mean(0, 0.0)
        weight = max(_WEIGHT, 1 / (before.n + 1))
        mean_s = before.mean_s + weight * (seconds - before.mean_s)
        # A new mapping: plans in other threads may read the one before.
        self._by_shape[shape] = {**measured, cut: Mean(before.n + 1, mean_s)}
        self._by_shape.move_to_end(shape)
        if len(self._by_shape) > _KEPT:
            self._by_shape.popitem(last=False)

    def known(self) -> dict[int, Measured]:
        """Return the measured durations by shape; may be called by any thread."""
        return dict(self._by_shape.copy())
