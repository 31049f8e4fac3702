"""Cost model: durations learned by operator kind, and durations and result sizes by task prefix.

A kind is an operator with its attributes and shapes, which tasks of lowered graphs carry as an annotation. A
prefix is shared by all tasks of the same function, in all programs. So its tasks are separated by the size
of their data, in classes that grow by factors of two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.annotations import KIND_ANNOTATION
from ferroflow_dask.bundling import averages
from ferroflow_dask.bundling.averages import SMALL_CLASS, Averages, nearest_size, scaled_nbytes, scaled_s
from ferroflow_dask.bundling.sequence import UNKNOWN_CLASS, bundle_in
from ferroflow_dask.scheduler.graphs.worker_runs import CORES_S
from ferroflow_dask.scheduler.hooks import take_reported

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

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
#: Kinds, prefixes and shuffles that are remembered.
_KEPT = 10_000
#: Workers that are remembered for a prefix; the tasks of others do not count.
_MOST_WORKERS = 100
#: Sizes from this one on are none [B].
_MOST_NBYTES = 2.0**60
#: Least part of a duration on a core, and off it: a part of 0 could not be corrected.
_LEAST_SHARE = 0.01
#: Bound on the ratio of a bundle's measured to its expected duration.
_MOST = 10.0
_NO_REPORT: Mapping[str, Any] = {}
#: Tasks that a restored duration counts for, at most: if the machine is another one, it is soon forgotten.
_RESTORED = 2


@dataclass(slots=True)
class _Means:
    """Means over the finished tasks of a prefix that handle about as much data."""

    #: Inputs and declared results [B].
    size_nbytes: float
    mean_s: float
    mean_nbytes: float
    #: Of the largest result; later ones make it smaller, slowly.
    most_nbytes: float
    #: Tasks of which the mean duration is: the first ones of the prefix on a worker, until there are others.
    n_cold: int
    n_warm: int
    #: Tasks of which the mean sizes are.
    n_sized: int = 1
    #: Part of their duration in which they run on a core. If it is known, the mean duration is that on free
    #: cores, otherwise it is as measured.
    core_share: float | None = None
    #: Mean duration of single tasks, as measured, since bundles correct the other one; None before.
    single_s: float | None = None


_EXPORTED = tuple(one.name for one in fields(_Means) if one.name != "single_s")
_values = attrgetter(*_EXPORTED)


@dataclass(slots=True)
class _Prefix:
    """The tasks of a prefix that have finished."""

    #: By the class of the size.
    by_size: dict[int, _Means]
    #: Workers that have run a task.
    workers: set[str]


class CostModel:
    """Learned durations of kinds, and learned durations and result sizes of prefixes.

    Parameters
    ----------
    metrics : mapping, optional
        Dask's sums over all finished tasks (`Scheduler.cumulative_worker_metrics`).
    """

    def __init__(self, metrics: Mapping[Any, float] | None = None) -> None:
        self._metrics: Mapping[Any, float] = {} if metrics is None else metrics
        #: Threads for each core of the cluster. Above 1, durations are learned as if cores were free.
        self.crowding = 1.0
        self._kinds_s: OrderedDict[str, float] = OrderedDict()
        self._prefixes: OrderedDict[str, _Prefix] = OrderedDict()
        # Declared sizes of results, and planned classes of sizes, of tasks that have not ended.
        self._declared: dict[Key, float] = {}
        self._planned: dict[Key, int] = {}

    def declare(self, nbytes: Mapping[Key, float]) -> None:
        """Note the declared sizes of the results of a graph [B]; may be called by any thread."""
        is_full = len(self._declared) > _KEPT
        self._declared = {**nbytes} if is_full else {**self._declared, **nbytes}

    def expect(self, size_classes: Mapping[Key, int]) -> None:
        """Remember the classes of tasks that read bundles, which are larger than the inputs."""
        if len(self._planned) > _KEPT:
            self._planned.clear()
        self._planned.update(size_classes)

    def record_on_device(self, kind: str, seconds: float) -> None:
        """Learn the duration of a task of a kind on a device [s]."""
        self._record_kind(_on_gpu(kind), seconds)

    def on_device(self, ts: TaskState) -> float | None:
        """Return the duration of tasks of the same kind on a device [s]; None if none has run."""
        kind = _kind(ts)
        return None if kind is None else self._kinds_s.get(_on_gpu(kind))

    def record(
        self,
        ts: TaskState,
        seconds: float,
        nbytes: int,
        worker: str,
        report: Mapping[str, Any] = _NO_REPORT,
    ) -> None:
        """Learn the duration of a task that finished on a worker [s] and the size of its result [B].

        The metadata in the report on a bundle may have how long it ran on a core, and how long it waited for
        one [s].
        """
        bundle = bundle_in(ts.run_spec)
        if bundle is not None:
            metadata = report.get("metadata")
            cores_s = take_reported(ts, metadata, CORES_S) if metadata else None
            self._record_bundle(bundle.stands_for, seconds, cores_s)
            return
        name, size = ts.prefix.name, self._declared.pop(ts.key, 0.0)
        size_class = self._planned.pop(ts.key, None)
        if size_class is None:
            for dependency in ts.dependencies:
                size += dependency.nbytes
            if not 0 <= size < _MOST_NBYTES:  # Dask has -1 for unknown sizes, and NaN of a wrong `sizeof`
                size = 0.0
            size_class = max(int(size).bit_length(), SMALL_CLASS)  # `averages.size_class`, without the call
        else:
            size = 2.0 ** (size_class - 1)
        if not 0 <= nbytes < _MOST_NBYTES:
            nbytes = 0
        known = self._prefixes.get(name)
        if known is None:
            first = _Means(size, seconds, nbytes, nbytes, n_cold=1, n_warm=0)
            self._prefixes[name] = _Prefix({size_class: first}, {worker})
            keep(self._prefixes, name)
        else:
            self._prefixes.move_to_end(name)
            # The first task of a prefix on a worker often takes longer, for imports and caches.
            is_cold = worker not in known.workers
            if is_cold and len(known.workers) < _MOST_WORKERS:
                known.workers.add(worker)
            one = known.by_size.get(size_class)
            if one is None:
                known.by_size[size_class] = _Means(
                    size, seconds, nbytes, nbytes, int(is_cold), int(not is_cold)
                )
            else:
                one.n_sized += 1
                weight = max(_WEIGHT, 1 / one.n_sized)
                one.size_nbytes += weight * (size - one.size_nbytes)
                one.mean_nbytes += weight * (nbytes - one.mean_nbytes)
                one.most_nbytes = max(float(nbytes), _SHRINKING * one.most_nbytes)
                if one.core_share is not None and self.crowding > 1:
                    _correct_by_single(one, seconds, is_cold)
                elif not is_cold:
                    one.n_warm += 1
                    one.mean_s += max(_WEIGHT, 1 / one.n_warm) * (seconds - one.mean_s)
                elif not one.n_warm:
                    one.n_cold += 1
                    one.mean_s += (seconds - one.mean_s) / one.n_cold
        if ts.annotations and (kind := _kind(ts)) is not None:
            self._record_kind(kind, seconds)

    def _record_kind(self, kind: str, seconds: float) -> None:
        before_s = self._kinds_s.get(kind)
        if before_s is not None:
            most_s = max(_DELAYED * before_s, _NOTHING_S)
            seconds = before_s + _FAST_WEIGHT * (min(seconds, most_s) - before_s)
        self._kinds_s[kind] = seconds
        keep(self._kinds_s, kind)

    def _record_bundle(
        self, steps: Mapping[tuple[str, int], int], seconds: float, cores_s: tuple[float, float] | None
    ) -> None:
        known = [
            (_of_class(self._prefixes[name].by_size, size_class), n)
            for (name, size_class), n in steps.items()
            if name in self._prefixes
        ]
        if self.crowding > 1 and cores_s is not None:
            on_core_s, queued_s = cores_s
            for name in {name for name, _ in steps if name in self._prefixes}:
                for one in self._prefixes[name].by_size.values():
                    if one.core_share is None:
                        one.single_s = one.mean_s
                        one.mean_s, one.core_share = self._on_free_cores(name, one)
            _correct_both(known, on_core_s, max(seconds - on_core_s - queued_s, 0.0))
            return
        factors = _factors(seconds, [n * one.mean_s for one, n in known])
        for (one, _), factor in zip(known, factors, strict=True):
            one.mean_s *= factor

    def _on_free_cores(self, name: str, one: _Means) -> tuple[float, float]:
        """Return how long a task takes on free cores [s], and the part of it that it runs on one."""
        if one.core_share is not None:
            return one.mean_s, one.core_share
        core_s = self._metrics.get(("execute", name, "thread-cpu", "seconds"), 0.0)
        waited_s = self._metrics.get(("execute", name, "thread-noncpu", "seconds"), 0.0)
        # Until a heartbeat has both, the task is assumed to compute while all threads do.
        measured = core_s / (core_s + waited_s) if core_s + waited_s > 0 else 1 / self.crowding
        core_s = measured * one.mean_s
        free_s = core_s + max(0.0, one.mean_s - self.crowding * core_s)
        return free_s, _bounded(core_s / free_s if free_s else measured)

    def names(self) -> set[str]:
        """Return the prefixes of which tasks have finished; may be called by any thread."""
        return set(self._prefixes.copy())

    def means(self) -> dict[str, tuple[float, float]]:
        """Return the mean duration [s] and the mean result size [B] of each prefix."""
        found = {name: _averages(one) for name, one in self._prefixes.items()}
        return {name: (one.duration_s, one.nbytes) for name, one in found.items()}

    def of_prefix(self, name: str) -> Averages | None:
        """Return what was learned of a prefix; None if no task of it has finished. Any thread may call it."""
        known = self._prefixes.get(name)
        if known is None:
            return None
        return _averages(known, partial(self._on_free_cores, name) if self.crowding > 1 else None)

    def of_kind(self, ts: TaskState) -> float | None:
        """Return the duration of tasks of the same kind [s]; None if none has run."""
        kind = _kind(ts)
        return None if kind is None else self._kinds_s.get(kind)

    def nbytes(self, ts: TaskState) -> float | None:
        """Return the mean result size of the task's prefix [B]; None if no task of it has finished."""
        known = self._prefixes.get(ts.prefix.name)
        if known is None:
            return None
        if len(known.by_size) == 1:
            (one,) = known.by_size.values()
            return one.mean_nbytes
        size = self._declared.get(ts.key, 0.0)
        for dependency in ts.dependencies:
            size += dependency.nbytes
        if not 0 <= size < _MOST_NBYTES:
            size = 0.0
        exact = known.by_size.get(max(int(size).bit_length(), SMALL_CLASS))
        return (exact or known.by_size[nearest_size(known.by_size, size)[0]]).mean_nbytes

    def exported(self) -> dict[str, Any]:
        """Return a copy of everything learned, as JSON has it; kinds and prefixes used last come last."""
        return {
            "kinds_s": {**self._kinds_s},
            "prefixes": {
                name: [dict(zip(_EXPORTED, _values(one), strict=True)) for one in known.by_size.values()]
                for name, known in self._prefixes.items()
            },
        }

    def restore(self, exported: Mapping[str, Any]) -> None:
        """Take over what another model has exported; kinds and prefixes that are known here stay.

        The first task of a restored prefix on a worker counts as the first one: workers are not exported.
        """
        self._kinds_s = with_older(exported["kinds_s"], self._kinds_s)
        restored = {}
        for name, sizes in exported["prefixes"].items():
            means = [_Means(**one) for one in sizes]
            for one in means:
                one.n_cold, one.n_warm = min(one.n_cold, _RESTORED), min(one.n_warm, _RESTORED)
            restored[name] = _Prefix({averages.size_class(one.size_nbytes): one for one in means}, set())
        self._prefixes = with_older(restored, self._prefixes)


def _correct_by_single(one: _Means, seconds: float, is_cold: bool) -> None:
    """Learn the duration of a single task on shared cores [s], of a prefix that bundles have corrected."""
    # Bundles know better how long it is on free cores. But there it is no longer than the mean of single
    # tasks, and those that seem too long for bundles have no other correction.
    if one.single_s is None:
        one.single_s = seconds
    elif not is_cold:
        one.single_s += _WEIGHT * (seconds - one.single_s)
    one.mean_s = min(one.mean_s, one.single_s)


def _bounded(share: float) -> float:
    return min(max(share, _LEAST_SHARE), 1 - _LEAST_SHARE)


def _factors(measured_s: float, expected_s: Sequence[float]) -> list[float]:
    """Return factors for the parts of a bundle's expected duration, which was measured as a whole [s].

    The difference is shared in proportion to the parts: small ones have hardly caused it.
    """
    total_s, squares = sum(expected_s), sum([part_s * part_s for part_s in expected_s])
    if squares <= 0:
        return [1.0] * len(expected_s)
    difference = min(max(measured_s / total_s, 1 / _MOST), _MOST) - 1
    return [1 + _FAST_WEIGHT * difference * min(1.0, part_s * total_s / squares) for part_s in expected_s]


def _correct_both(known: Sequence[tuple[_Means, int]], on_core_s: float, idle_s: float) -> None:
    """Correct means by the time of a bundle on a core, and by the rest of it on free cores [s]."""
    parts = []
    for one, n in known:
        core_s = n * one.mean_s * (one.core_share or 0.0)
        parts.append((core_s, n * one.mean_s - core_s))
    on_core = _factors(on_core_s, [core_s for core_s, _ in parts])
    idle = _factors(idle_s, [rest_s for _, rest_s in parts])
    for (one, n), (core_s, rest_s), core, rest in zip(known, parts, on_core, idle, strict=True):
        if core_s + rest_s > 0:
            corrected_s = core * core_s + rest * rest_s
            one.mean_s, one.core_share = corrected_s / n, _bounded(core * core_s / corrected_s)


def _of_class(by_size: dict[int, _Means], size_class: int) -> _Means:
    """Return the means for a class of sizes; a class without any starts like the nearest one."""
    one = by_size.get(size_class)
    if one is not None:
        return one
    if size_class == UNKNOWN_CLASS:
        return max(by_size.values(), key=lambda each: each.n_sized)
    size = 2.0 ** (size_class - 1)
    nearest, scale = nearest_size(by_size, size)
    like = by_size[nearest]
    nbytes = scaled_nbytes(like.mean_nbytes, scale, size)
    one = by_size[size_class] = _Means(
        size, scaled_s(like.mean_s, scale), nbytes, nbytes, 0, 0, 0, like.core_share
    )
    return one


def _averages(
    known: _Prefix, on_free_cores: Callable[[_Means], tuple[float, float]] | None = None
) -> Averages:
    """Return the means of all tasks of a prefix, and of those of each size; as measured, or on free cores."""
    by_size = {}
    for size_class, one in list(known.by_size.items()):  # a copy: the scheduler may add a class meanwhile
        duration_s, core_share = (one.mean_s, 1.0) if on_free_cores is None else on_free_cores(one)
        by_size[size_class] = Averages(
            *(duration_s, one.mean_nbytes, one.most_nbytes, one.size_nbytes), core_share=core_share
        )
    weights = [max(known.by_size[size_class].n_sized, 1) for size_class in by_size]
    means = by_size.values()
    return Averages(
        fmean([one.duration_s for one in means], weights),
        fmean([one.nbytes for one in means], weights),
        max(one.most_nbytes for one in means),
        by_size=by_size,
        core_share=fmean([one.core_share for one in means], weights),
    )


def keep(learned: OrderedDict[Any, Any], name: object) -> None:
    """Note that a name was used last, and forget the one that was used longest ago if there are too many."""
    learned.move_to_end(name)
    if len(learned) > _KEPT:
        learned.popitem(last=False)


def with_older(older: Mapping[str, Any], newer: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return both, as if the older ones were used before; those of `newer` count if a name is in both."""
    found = OrderedDict((name, one) for name, one in older.items() if name not in newer)
    found.update(newer)
    while len(found) > _KEPT:
        found.popitem(last=False)
    return found


def _on_gpu(kind: str) -> str:
    return f"{kind} on a GPU"


def _kind(ts: TaskState) -> str | None:
    kind = ts.annotations.get(KIND_ANNOTATION) if ts.annotations else None
    return kind if isinstance(kind, str) else None
