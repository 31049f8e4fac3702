"""What tasks were like: those of one kind, where tasks say what kind they are, and those of one name."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from ferroflow_dask.lowering import KIND_ANNOTATION

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Part of a new duration in the mean.
_WEIGHT = 0.3
#: Kinds that are remembered.
_KEPT = 10_000


class Durations:
    """Learned durations by kind: for ops of a graph their operator, attributes and shapes.

    Finer than what Dask learns, which is one duration for all tasks of a name.
    """

    def __init__(self) -> None:
        self._mean_s: OrderedDict[str, float] = OrderedDict()
        self._by_name: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def record(self, ts: TaskState, seconds: float, nbytes: int) -> None:
        """Learn from a task that ended: how long it took [s], and how large its result is [B]."""
        self._record_name(ts.prefix.name, seconds, nbytes)
        kind = _kind(ts)
        if kind is None:
            return
        before = self._mean_s.get(kind)
        self._mean_s[kind] = seconds if before is None else before + _WEIGHT * (seconds - before)
        self._mean_s.move_to_end(kind)
        if len(self._mean_s) > _KEPT:
            self._mean_s.popitem(last=False)

    def _record_name(self, name: str, seconds: float, nbytes: int) -> None:
        before_s, before_nbytes = self._by_name.get(name, (seconds, float(nbytes)))
        self._by_name[name] = (
            before_s + _WEIGHT * (seconds - before_s),
            before_nbytes + _WEIGHT * (nbytes - before_nbytes),
        )
        self._by_name.move_to_end(name)
        if len(self._by_name) > _KEPT:
            self._by_name.popitem(last=False)

    def by_name(self) -> dict[str, tuple[float, float]]:
        """Return the mean duration [s] and size of results [B] of tasks, by the name that Dask gives them."""
        return dict(self._by_name)

    def of(self, ts: TaskState) -> float | None:
        """Return what tasks of the same kind have taken [s]; None if there were none."""
        kind = _kind(ts)
        return None if kind is None else self._mean_s.get(kind)


def _kind(ts: TaskState) -> str | None:
    kind = (ts.annotations or {}).get(KIND_ANNOTATION)
    return kind if isinstance(kind, str) else None
