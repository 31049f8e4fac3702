"""Cost model: durations and result sizes, learned by operator kind, task group and task prefix.

A kind is an operator with its attributes and shapes, which tasks of lowered graphs carry as an annotation.
A group is one layer of a collection. A prefix is shared by all layers of the same function. What is learned
belongs to the scheduler: it outlives the extension that has learned it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ferroflow_dask.annotations import KIND_ANNOTATION
from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.policy.estimators import Transfers
from ferroflow_dask.scheduler import _distributed

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: Weight of a new duration in the mean.
_WEIGHT = 0.3
#: A duration of more than this many times the usual one was delayed by something else and counts as this.
_DELAYED = 4.0
#: Shorter durations are never taken for delayed ones [s].
_NOTHING_S = 1e-3
#: Kinds, groups and prefixes that are remembered.
_KEPT = 10_000
#: Bound on the ratio of a bundle's measured to its expected duration.
_MOST = 10.0
#: The last tasks of a prefix or group that `longest_but_one` looks at.
_REMEMBERED = 16
#: Tasks of a group before its usual duration counts.
_ENOUGH = 2


@dataclass(slots=True)
class _Learned:
    """Means over the tasks of a prefix or group, their usual duration, and their last durations [s]."""

    mean_s: float
    mean_nbytes: float
    usual_s: float
    n_tasks: int = 1
    last_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class CostModel:
    """Learned durations and sizes, finer than Dask's one average duration for each prefix."""

    def __init__(self) -> None:
        self._usual_s: OrderedDict[str, float] = OrderedDict()
        self._prefixes: OrderedDict[str, _Learned] = OrderedDict()
        # Without the groups whose name is their prefix.
        self._groups: OrderedDict[str, _Learned] = OrderedDict()

    def record_on_device(self, kind: str, seconds: float) -> None:
        """Learn the duration of a task of a kind on a device [s]."""
        self._record_kind(_on_gpu(kind), seconds)

    def on_device(self, ts: TaskState) -> float | None:
        """Return the duration of tasks of the same kind on a device [s]; None if none has run."""
        kind = _kind(ts)
        return None if kind is None else self._usual_s.get(_on_gpu(kind))

    def record(self, ts: TaskState, seconds: float, nbytes: int) -> None:
        """Learn the duration of a task that finished [s] and the size of its result [B]."""
        bundle = bundle_in(ts.run_spec)
        if bundle is not None:
            self._record_bundle(bundle.stands_for or {}, seconds)
            return
        group, prefix = ts.group.name, ts.prefix.name
        _record(self._prefixes, prefix, seconds, nbytes)
        if group != prefix:
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

    def _record_bundle(self, prefixes: Mapping[str, int], seconds: float) -> None:
        # The difference to the expected duration is shared by all prefixes of the bundle.
        known = [(self._prefixes[name], n) for name, n in prefixes.items() if name in self._prefixes]
        expected_s = sum(n * prefix.mean_s for prefix, n in known)
        if expected_s > 0:
            factor = min(max(seconds / expected_s, 1 / _MOST), _MOST)
            for prefix, _ in known:
                prefix.mean_s *= 1 + _WEIGHT * (factor - 1)

    def by_prefix(self) -> dict[str, tuple[float, float]]:
        """Return the mean duration [s] and result size [B] of each prefix."""
        # A copy, since threads other than the scheduler's may ask.
        return {name: (known.mean_s, known.mean_nbytes) for name, known in list(self._prefixes.items())}

    def of_kind(self, ts: TaskState) -> float | None:
        """Return the duration of tasks of the same kind [s]; None if none has run."""
        kind = _kind(ts)
        return None if kind is None else self._usual_s.get(kind)

    def expected(self, ts: TaskState) -> float | None:
        """Return the expected duration of a task without a kind [s]; None if nothing is known.

        The mean of the task's group, in which Dask's average of its prefix counts as one more task, so that
        one odd first task does not decide. Before any task of the group has finished, Dask's average.
        """
        average_s = _distributed.prefix_average(ts)
        known = self._groups.get(ts.group.name)
        if known is None or average_s is None:
            return average_s if known is None else known.mean_s
        return (known.n_tasks * known.mean_s + average_s) / (known.n_tasks + 1)

    def has_group(self, ts: TaskState) -> bool:
        """Return whether tasks of a task's group have finished, and its group is not its prefix."""
        return ts.group.name in self._groups

    def usual(self, ts: TaskState) -> float | None:
        """Return the usual duration of tasks of the same kind, else group, else prefix [s].

        A few much longer tasks move the mean, but not the usual duration. None if none has finished.
        """
        of_kind = self.of_kind(ts)
        known = self._like(ts, _ENOUGH) if of_kind is None else None
        return of_kind if known is None else known.usual_s

    def nbytes(self, ts: TaskState) -> float | None:
        """Return the mean result size of a task's group, else prefix [B]; None if none has finished."""
        known = self._like(ts, 1)
        return None if known is None else known.mean_nbytes

    def longest_but_one(self, ts: TaskState) -> tuple[float, float] | None:
        """Return the second longest of the last durations [s] and the mean result size of a task's like [B].

        One outlier does not count. None if none has finished. The prefix is asked until the group has had as
        many tasks as are remembered.
        """
        known = self._like(ts, _REMEMBERED)
        if known is None:
            return None
        last = sorted(known.last_s)
        return last[-2] if len(last) > 1 else last[0], known.mean_nbytes

    def _like(self, ts: TaskState, n_enough: int) -> _Learned | None:
        """Return the group of a task if `n_enough` of its tasks have finished, else the prefix."""
        known = self._groups.get(ts.group.name)
        return self._prefixes.get(ts.prefix.name) if known is None or known.n_tasks < n_enough else known


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
    most_s = max(_DELAYED * before_s, _NOTHING_S)
    return before_s + _WEIGHT * (min(seconds, most_s) - before_s)


def _on_gpu(kind: str) -> str:
    return f"{kind} on a GPU"


def _kind(ts: TaskState) -> str | None:
    if not ts.annotations:
        return None
    kind = ts.annotations.get(KIND_ANNOTATION)
    return kind if isinstance(kind, str) else None


@dataclass(slots=True, eq=False)
class Learned:
    """Everything that is learned on one scheduler, except the momentary speed and delay of workers.

    Parameters
    ----------
    costs : CostModel
    transfers : Transfers
    round_trip_s : float or None
        Time from the end of a task to the start of the next one that is sent for it [s]; None until measured.
    """

    costs: CostModel = field(default_factory=CostModel)
    transfers: Transfers = field(default_factory=Transfers)
    round_trip_s: float | None = None


_of_schedulers: WeakKeyDictionary[Any, Learned] = WeakKeyDictionary()


def learned_on(scheduler: Scheduler) -> Learned:
    """Return what was learned on a scheduler, by all extensions that it has had."""
    return _of_schedulers.setdefault(scheduler, Learned())


def learned_in_this_process(scheduler_id: str) -> dict[str, tuple[float, float]]:
    """Return `CostModel.by_prefix` of a scheduler in this process; empty if there is none."""
    scheduler = _in_this_process(scheduler_id)
    return {} if scheduler is None else _of_schedulers[scheduler].costs.by_prefix()


def threads_in_this_process(scheduler_id: str) -> tuple[int, ...]:
    """Return the threads of each worker of a scheduler in this process; empty if there is none."""
    scheduler = _in_this_process(scheduler_id)
    return () if scheduler is None else tuple(ws.nthreads for ws in scheduler.workers.values())


def _in_this_process(scheduler_id: str) -> Scheduler | None:
    # Virtual schedulers have no id.
    return next((one for one in list(_of_schedulers) if getattr(one, "id", None) == scheduler_id), None)
