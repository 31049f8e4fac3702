"""Repeated graphs: which cuts graphs of one shape have had, and how long they took."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Runs of a graph from which on measured durations count, and of which one in so many tries another cut.
_ENOUGH, _ONE_IN = 3, 8
#: Weight of a new duration in a mean, at least.
_WEIGHT = 0.2
#: Shapes that are remembered.
_KEPT = 1_000


class Mean(NamedTuple):
    """The mean duration of some runs [s]."""

    n: int
    mean_s: float


#: By the name of a cut.
Measured = Mapping[str, Mean]


def shape_of(
    prefixes: Sequence[str], sizes: Sequence[int], edges: Sequence[Sequence[int]], n_wanted: int
) -> int:
    """Return a number that repeated graphs share: those with the same numbers of tasks and edges.

    Tasks are counted by prefix and size. Another process returns another number.
    """
    tasks = Counter(zip(prefixes, sizes, strict=True))
    return hash((frozenset(tasks.items()), sum(map(len, edges)), n_wanted))


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

    def record(self, shape: int, cut: str, seconds: float) -> None:
        """Learn the duration of a graph [s]."""
        measured = self._by_shape.get(shape, {})
        before = measured.get(cut, Mean(0, 0.0))
        weight = max(_WEIGHT, 1 / (before.n + 1))
        mean_s = before.mean_s + weight * (seconds - before.mean_s)
        # A new mapping: plans in other threads may read the one before.
        self._by_shape[shape] = {**measured, cut: Mean(before.n + 1, mean_s)}
        self._by_shape.move_to_end(shape)
        if len(self._by_shape) > _KEPT:
            self._by_shape.popitem(last=False)

    def clear(self) -> None:
        """Forget all graphs."""
        self._by_shape.clear()

    def known(self) -> dict[int, Measured]:
        """Return the measured durations by shape; may be called by any thread."""
        return dict(self._by_shape.copy())
