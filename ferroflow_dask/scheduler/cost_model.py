"""Cost model: durations learned by operator kind, and durations and result sizes by task prefix.

A kind is an operator with its attributes and shapes, which tasks of lowered graphs carry as an annotation. A
prefix is shared by all tasks of the same function; Dask averages its durations, too. What is learned belongs
to the scheduler: it outlives the extension that has learned it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dask.typing import Key

from ferroflow_dask.annotations import KIND_ANNOTATION
from ferroflow_dask.bundling.sequence import bundle_in

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: Weight of a new duration in the mean, at least: the first ones count alike.
_WEIGHT = 0.1
#: Weight of a kind's new duration, and of the correction by a bundle.
_FAST_WEIGHT = 0.3
#: The largest result size of a prefix, after each later result, as part of itself.
_SHRINKING = 0.99
#: A duration of more than this many times the mean of its kind was delayed by something else and counts as
#: this.
_DELAYED = 4.0
#: Shorter durations are never taken for delayed ones [s].
_NOTHING_S = 1e-3
#: Kinds and prefixes that are remembered.
_KEPT = 10_000
#: Workers that are remembered for a prefix; the tasks of others do not count.
_MOST_WORKERS = 100
#: Bound on the ratio of a bundle's measured to its expected duration.
_MOST = 10.0


@dataclass(slots=True)
class _Prefix:
    """Means over the finished tasks of a prefix."""

    mean_s: float
    mean_nbytes: float
    #: Of the largest result; later ones make it smaller, slowly.
    most_nbytes: float
    #: The largest declared size of these results; 0 if none had one.
    declared_nbytes: float
    #: Workers that have run a task of the prefix; whether all did so for the first time.
    workers: set[str]
    is_cold: bool = True
    #: Tasks of which the mean duration and the mean size are.
    n_timed: int = 1
    n_sized: int = 1


class CostModel:
    """Learned durations of kinds, and learned durations and result sizes of prefixes."""

    def __init__(self) -> None:
        self._kinds_s: OrderedDict[str, float] = OrderedDict()
        self._prefixes: OrderedDict[str, _Prefix] = OrderedDict()
        # Of tasks that have not ended.
        self._declared: dict[Key, float] = {}

    def declare(self, nbytes: Mapping[Key, float]) -> None:
        """Note the declared sizes of the results of a graph [B]; may be called by any thread."""
        is_full = len(self._declared) > _KEPT
        self._declared = {**nbytes} if is_full else {**self._declared, **nbytes}

    def record_on_device(self, kind: str, seconds: float) -> None:
        """Learn the duration of a task of a kind on a device [s]."""
        self._record_kind(_on_gpu(kind), seconds)

    def on_device(self, ts: TaskState) -> float | None:
        """Return the duration of tasks of the same kind on a device [s]; None if none has run."""
        kind = _kind(ts)
        return None if kind is None else self._kinds_s.get(_on_gpu(kind))

    def record(self, ts: TaskState, seconds: float, nbytes: int, worker: str) -> None:
        """Learn the duration of a task that finished on a worker [s] and the size of its result [B]."""
        bundle = bundle_in(ts.run_spec)
        if bundle is not None:
            self._record_bundle(bundle.stands_for, seconds)
            return
        name = ts.prefix.name
        known = self._prefixes.get(name)
        declared = self._declared.pop(ts.key, 0.0)
        if known is None:
            self._prefixes[name] = _Prefix(seconds, float(nbytes), float(nbytes), declared, {worker})
            _keep(self._prefixes, name)
        else:
            self._prefixes.move_to_end(name)
            known.n_sized += 1
            known.mean_nbytes += max(_WEIGHT, 1 / known.n_sized) * (nbytes - known.mean_nbytes)
            known.most_nbytes = max(float(nbytes), _SHRINKING * known.most_nbytes)
            known.declared_nbytes = max(declared, _SHRINKING * known.declared_nbytes)
            # The first task of a prefix on a worker often takes longer, for imports and caches.
            is_cold = worker not in known.workers
            if is_cold and len(known.workers) < _MOST_WORKERS:
                known.workers.add(worker)
            if known.is_cold and not is_cold:
                known.mean_s, known.is_cold, known.n_timed = seconds, False, 1
            elif known.is_cold or not is_cold:
                known.n_timed += 1
                known.mean_s += max(_WEIGHT, 1 / known.n_timed) * (seconds - known.mean_s)
        if ts.annotations and (kind := _kind(ts)) is not None:
            self._record_kind(kind, seconds)

    def _record_kind(self, kind: str, seconds: float) -> None:
        before_s = self._kinds_s.get(kind)
        if before_s is not None:
            most_s = max(_DELAYED * before_s, _NOTHING_S)
            seconds = before_s + _FAST_WEIGHT * (min(seconds, most_s) - before_s)
        self._kinds_s[kind] = seconds
        _keep(self._kinds_s, kind)

    def _record_bundle(self, prefixes: Mapping[str, int], seconds: float) -> None:
        # The difference to the expected duration is shared by all prefixes of the bundle.
        known = [(self._prefixes[name], n) for name, n in prefixes.items() if name in self._prefixes]
        expected_s = sum(n * prefix.mean_s for prefix, n in known)
        if expected_s > 0:
            factor = min(max(seconds / expected_s, 1 / _MOST), _MOST)
            for prefix, _ in known:
                prefix.mean_s *= 1 + _FAST_WEIGHT * (factor - 1)

    def by_prefix(self) -> dict[str, tuple[float, float, float, float]]:
        """Return mean duration [s], and mean, largest and declared result size [B], of each prefix."""
        # A copy, since threads other than the scheduler's may ask.
        known = list(self._prefixes.items())
        return {
            name: (one.mean_s, one.mean_nbytes, one.most_nbytes, one.declared_nbytes) for name, one in known
        }

    def of_kind(self, ts: TaskState) -> float | None:
        """Return the duration of tasks of the same kind [s]; None if none has run."""
        kind = _kind(ts)
        return None if kind is None else self._kinds_s.get(kind)

    def nbytes(self, ts: TaskState) -> float | None:
        """Return the mean result size of a task's prefix [B]; None if no task of it has finished."""
        known = self._prefixes.get(ts.prefix.name)
        return None if known is None else known.mean_nbytes


def _keep(learned: OrderedDict[str, Any], name: str) -> None:
    """Note that a name was used last, and forget the one that was used longest ago if there are too many."""
    learned.move_to_end(name)
    if len(learned) > _KEPT:
        learned.popitem(last=False)


def _on_gpu(kind: str) -> str:
    return f"{kind} on a GPU"


def _kind(ts: TaskState) -> str | None:
    if not ts.annotations:
        return None
    kind = ts.annotations.get(KIND_ANNOTATION)
    return kind if isinstance(kind, str) else None


@dataclass(slots=True, eq=False)
class Learned:
    """Everything that is learned on one scheduler, except the momentary speeds of workers.

    Parameters
    ----------
    costs : CostModel
    round_trip_s : float or None
        Time from the end of a task to the start of the next one that is sent for it [s]; None until measured.
    pause_s : float or None
        Mean time of a thread from the end of a task to the start of the next one that its worker has [s];
        None until measured.
    separate : set of str
        Prefixes of tasks that are never bundled: they asked for their worker or for a client, or iterators
        are passed between them.
    """

    costs: CostModel = field(default_factory=CostModel)
    round_trip_s: float | None = None
    pause_s: float | None = None
    separate: set[str] = field(default_factory=set)


_of_schedulers: WeakKeyDictionary[Any, Learned] = WeakKeyDictionary()


def learned_on(scheduler: Scheduler) -> Learned:
    """Return what was learned on a scheduler, by all extensions that it has had."""
    return _of_schedulers.setdefault(scheduler, Learned())
