"""What tasks were like: those of one kind, where tasks say what kind they are, of one group, and of one name.

Kind, group and name are the operator with its shapes, Dask's `TaskGroup`, which is one layer of a
collection, and Dask's `TaskPrefix`, which is all layers of such collections.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ferroflow_dask.annotations import KIND_ANNOTATION
from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.plugin import seams

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Part of a new duration in the mean.
_WEIGHT = 0.3
#: What takes so many times as long as usual was held up by something else, and counts no more than that.
_HELD_UP = 4.0
#: Whoever holds up a task does so for longer [s].
_NOTHING_S = 1e-3
#: Kinds, groups, and names, that are remembered.
_KEPT = 10_000
#: A bundle says that its tasks take so many times as long as expected, or as short, at most.
_MOST = 10.0
#: The last tasks of a name that tell how long one may be.
_REMEMBERED = 16
#: Tasks of a group before what is usual among them counts.
_ENOUGH = 2


@dataclass(slots=True)
class _Learned:
    """Means over the tasks of a name or a group, what is usual among them, and their last durations [s]."""

    mean_s: float
    mean_nbytes: float
    usual_s: float
    n_tasks: int = 1
    last_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class Durations:
    """Learned durations by kind, for ops of a graph their operator, attributes and shapes, and by group.

    Finer than what Dask learns, which is one duration for all tasks of a name.
    """

    def __init__(self) -> None:
        self._usual_s: OrderedDict[str, float] = OrderedDict()
        self._names: OrderedDict[str, _Learned] = OrderedDict()
        # Without those that are called as their name is.
        self._groups: OrderedDict[str, _Learned] = OrderedDict()

    def record_on_device(self, kind: str, seconds: float) -> None:
        """Learn how long a task of a kind took on a device [s]."""
        self._record_kind(_on_gpu(kind), seconds)

    def on_device(self, ts: TaskState) -> float | None:
        """Return what tasks of the same kind have taken on a device [s]; None if there were none."""
        kind = _kind(ts)
        return None if kind is None else self._usual_s.get(_on_gpu(kind))

    def record(self, ts: TaskState, seconds: float, nbytes: int) -> None:
        """Learn from a task that ended: how long it took [s], and how large its result is [B]."""
        bundle = bundle_in(ts.run_spec)
        if bundle is not None:
            self._record_bundle(bundle.stands_for or {}, seconds)
            return
        group, name = ts.group.name, ts.prefix.name
        _record(self._names, name, seconds, nbytes)
        if group != name:
            _record(self._groups, group, seconds, nbytes)
        kind = _kind(ts)
        if kind is not None:
            self._record_kind(kind, seconds)

    def _record_kind(self, kind: str, seconds: float) -> None:
        before_s = self._usual_s.get(kind)
        self._usual_s[kind] = seconds if before_s is None else _usual(before_s, seconds)
        self._usual_s.move_to_end(kind)
        if len(self._usual_s) > _KEPT:
            self._usual_s.popitem(last=False)

    def _record_bundle(self, names: Mapping[str, int], seconds: float) -> None:
        # Whatever tasks of several names have taken longer than expected, all of them share.
        known = [(self._names[name], n) for name, n in names.items() if name in self._names]
        expected_s = sum(n * name.mean_s for name, n in known)
        if expected_s > 0:
            factor = min(max(seconds / expected_s, 1 / _MOST), _MOST)
            for name, _ in known:
                name.mean_s *= 1 + _WEIGHT * (factor - 1)

    def by_name(self) -> dict[str, tuple[float, float]]:
        """Return the mean duration [s] and size of results [B] of tasks, by the name that Dask gives them."""
        # A copy, since other threads than the scheduler's may ask.
        return {name: (known.mean_s, known.mean_nbytes) for name, known in list(self._names.items())}

    def of(self, ts: TaskState) -> float | None:
        """Return what tasks of the same kind have taken [s]; None if there were none."""
        kind = _kind(ts)
        return None if kind is None else self._usual_s.get(kind)

    def expected(self, ts: TaskState) -> float | None:
        """Return what a task of which no kind is known is expected to take [s]; None if nothing tells.

        That is the mean of its group, with Dask's average for its name as one task more, so that one odd
        first task does not decide; and that average alone as long as no task of the group has ended.
        """
        average_s = seams.prefix_average(ts)
        known = self._groups.get(ts.group.name)
        if known is None or average_s is None:
            return average_s if known is None else known.mean_s
        return (known.n_tasks * known.mean_s + average_s) / (known.n_tasks + 1)

    def has_group(self, ts: TaskState) -> bool:
        """Return whether tasks of a task's group have ended, and it is not called as its name is."""
        return ts.group.name in self._groups

    def usual(self, ts: TaskState) -> float | None:
        """Return what most tasks of the same kind, or else of the same group or name, have taken [s].

        Of tasks of one name a few may take far longer than the others, which the mean tells and this does
        not. None if there were none.
        """
        of_kind = self.of(ts)
        known = self._like(ts, _ENOUGH) if of_kind is None else None
        return of_kind if known is None else known.usual_s

    def nbytes(self, ts: TaskState) -> float | None:
        """Return the mean size of results of a group, or else of a name [B]; None if there were none."""
        known = self._like(ts, 1)
        return None if known is None else known.mean_nbytes

    def at_most(self, ts: TaskState) -> tuple[float, float] | None:
        """Return the longest but one of a task's like's last durations [s], and their mean size [B].

        One outlier is no rule. None if there were no such tasks. Until a group has had as many as are
        remembered, its name knows better whether a few of them are long.
        """
        known = self._like(ts, _REMEMBERED)
        if known is None:
            return None
        last = sorted(known.last_s)
        return last[-2] if len(last) > 1 else last[0], known.mean_nbytes

    def _like(self, ts: TaskState, n_enough: int) -> _Learned | None:
        """Return what is known of a task's group, if so many of it have ended, or else of its name."""
        known = self._groups.get(ts.group.name)
        return self._names.get(ts.prefix.name) if known is None or known.n_tasks < n_enough else known


def _record(learned: OrderedDict[str, _Learned], name: str, seconds: float, nbytes: int) -> None:
    known = learned.get(name)
    if known is None:
        known = learned[name] = _Learned(seconds, float(nbytes), seconds)
        if len(learned) > _KEPT:
            learned.popitem(last=False)
    else:
        known.mean_s += _WEIGHT * (seconds - known.mean_s)
        known.mean_nbytes += _WEIGHT * (nbytes - known.mean_nbytes)
        known.usual_s = _usual(known.usual_s, seconds)
        known.n_tasks += 1
        learned.move_to_end(name)
    known.last_s.append(seconds)


def _usual(before_s: float, seconds: float) -> float:
    most_s = max(_HELD_UP * before_s, _NOTHING_S)
    return before_s + _WEIGHT * (min(seconds, most_s) - before_s)


def _on_gpu(kind: str) -> str:
    return f"{kind} on a GPU"


def _kind(ts: TaskState) -> str | None:
    if not ts.annotations:
        return None
    kind = ts.annotations.get(KIND_ANNOTATION)
    return kind if isinstance(kind, str) else None
