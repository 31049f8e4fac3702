"""Task views: tasks of distributed's scheduler as a policy sees them."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import count, islice
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from dask.typing import Key

from ferroflow_dask.annotations import ANNOTATIONS, COST_ANNOTATION, CPU, GPU, RANK_ANNOTATION
from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.device_reports import kind_of_worker
from ferroflow_dask.policy import TaskView
from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.fixed_values import FixedValues

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core

#: Holders of one input that are looked at: enough to find a near one.
_HOLDERS = 16
#: Longer declared durations are mistakes [s]: thirty years.
_LONGEST_S = 1e9
_BOTH = frozenset((CPU, GPU))
#: From this likeness on, the name of an annotation is a misspelt one of ours.
_MISSPELT = 0.85
#: The abstract class comes last, since its instance check is slow.
_NUMBERS = (float, int, Real)
#: Shared by all tasks: fewer objects mean less work for Python's garbage collector.
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def declared_cost(ts: TaskState, kind: str = CPU) -> float | None:
    """Return the declared duration of a task on a kind of worker [s]: its annotation, or its bundle's cost.

    None if there is none, or an invalid one.
    """
    declared = (ts.annotations or {}).get(COST_ANNOTATION)
    if declared is None:
        bundle = bundle_in(ts.run_spec)
        return None if bundle is None else bundle.cost_s
    return _seconds(declared.get(kind) if isinstance(declared, dict) else declared)


def declared_kinds(ts: TaskState) -> frozenset[str]:
    """Return the kinds of workers in a task's cost annotation; empty if it is no mapping."""
    declared = (ts.annotations or {}).get(COST_ANNOTATION)
    return frozenset(declared) if isinstance(declared, dict) else frozenset()


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value) if isinstance(value, _NUMBERS) else -1.0
    except OverflowError:
        return None
    return seconds if 0 <= seconds <= _LONGEST_S else None


def mistake_in(declared: object) -> str | None:
    """Return the wrong part of a declared cost: kind of worker, duration or type; None if it is valid."""
    for kind, value in declared.items() if isinstance(declared, dict) else ((CPU, declared),):
        if kind not in _BOTH:
            return "kind of worker"
        if value is not None and _seconds(value) is None:
            return "duration" if isinstance(value, _NUMBERS) else "type"
    return None


def _rank(ts: TaskState) -> float | None:
    return _seconds((ts.annotations or {}).get(RANK_ANNOTATION))


@dataclass(frozen=True, slots=True)
class Restrictions:
    """Restrictions of a task, under the names that `Scheduler.valid_workers` reads.

    An immutable copy that tasks share; distributed may change a task's own restrictions, as shuffles do. Two
    more come from this package: the workers with all fixed inputs of the task, and those that it refused.
    """

    worker_restrictions: frozenset[str]
    host_restrictions: frozenset[str]
    resources: frozenset[tuple[str, float]]
    loose_restrictions: bool
    kinds: frozenset[str]
    holders: frozenset[str] | None = None
    refused: tuple[str, ...] = ()

    @property
    def resource_restrictions(self) -> dict[str, float]:
        """Amounts of resources."""
        return dict(self.resources)


class AllowedWorkers(Collection[str]):
    """The workers that restrictions allow; computed again after the set of workers has changed."""

    def __init__(self, views: TaskViews, restrictions: Restrictions) -> None:
        self._views = views
        self._restrictions = restrictions
        self._version = -1
        self._addresses: frozenset[str] = frozenset()

    def _now(self) -> frozenset[str]:
        if self._version != self._views.version:
            self._version = self._views.version
            self._addresses = self._views.allowed_now(self._restrictions)
        return self._addresses

    def __contains__(self, address: object) -> bool:
        return address in self._now()

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


class TaskViews:
    """Makes task views; O(dependencies) each.

    Parameters
    ----------
    core : Core
    fixed : FixedValues
    """

    def __init__(self, core: Core, fixed: FixedValues) -> None:
        self._scheduler = core.scheduler
        self._view = core.view
        self._hooks = core.hooks
        self._fixed = fixed
        self._refused = core.refused
        self._costs = core.learned.costs
        self._numbers = count()
        #: Counts changes of the set of workers.
        self.version = 0
        self._allowed: WeakValueDictionary[Restrictions, AllowedWorkers] = WeakValueDictionary()
        self._resources: dict[str, dict[str, float]] = {}
        self._warned: set[str] = set()

    def known_cost(self, ts: TaskState) -> float | None:
        """Return the declared duration of a task, else that of its kind [s]; None if there is neither."""
        declared = declared_cost(ts)
        if not ts.annotations:
            return declared
        kinds = declared_kinds(ts)
        if declared is None and kinds:
            declared = declared_cost(ts, GPU)
        if (declared is None or not kinds <= _BOTH) and COST_ANNOTATION in ts.annotations:
            self._warn_of_mistake(ts)
        return self._costs.of_kind(ts) if declared is None else declared

    def _warn_of_mistake(self, ts: TaskState) -> None:
        """Warn the clients of an invalid cost annotation, once for each kind of mistake."""
        declared = (ts.annotations or {})[COST_ANNOTATION]
        mistake = mistake_in(declared)
        if mistake is None or mistake in self._warned:
            return
        self._warned.add(mistake)
        _distributed.warn_clients(
            self._scheduler,
            f"ferroflow: {COST_ANNOTATION} of task {reprlib.repr(ts.key)} must be seconds from 0 to "
            f"{_LONGEST_S:g}, or a dict of them for {CPU!r} and {GPU!r}; got {reprlib.repr(declared)}, "
            f"whose {mistake} is ignored",
        )

    def annotations_arrived(self, names: Iterable[str]) -> None:
        """Warn the clients, once each, of a graph's annotations whose names look like misspelt ones."""
        for name in names:
            if name in ANNOTATIONS or name in self._warned or not isinstance(name, str):
                continue
            for near in get_close_matches(name, ANNOTATIONS, n=1, cutoff=_MISSPELT):
                self._warned.add(name)
                _distributed.warn_clients(
                    self._scheduler, f"ferroflow: there is no annotation {name!r}; did you mean {near!r}?"
                )

    def _costs_by_kind(self, ts: TaskState, on_cpu: float | None) -> Mapping[str, float]:
        """Return a task's duration by kind of worker [s]; empty if the cluster has one kind only."""
        if not self._view.has_devices or not ts.annotations:
            return _NOTHING
        on_gpu = None
        if declared_kinds(ts):
            on_cpu, on_gpu = declared_cost(ts), declared_cost(ts, GPU)
            if on_gpu is None or on_cpu is None:
                self._warn_of_mistake(ts)
        if on_gpu is None:
            on_gpu = self._costs.on_device(ts)
        found = {CPU: on_cpu, GPU: on_gpu}
        return {kind: seconds for kind, seconds in found.items() if seconds is not None}

    def depends_on_kind(self, ts: TaskState) -> bool:
        """Return whether a task's durations on CPU and GPU workers of this cluster are known."""
        return self._view.has_devices and len(self._costs_by_kind(ts, self.known_cost(ts))) > 1

    def has_rank(self, ts: TaskState) -> bool:
        """Return whether a task has an upward rank, or a known cost that stands for it.

        The cost of a bundle does not: Dask's order holds few results at once, an order by costs many.
        """
        if not ts.annotations:
            return False
        return _rank(ts) is not None or (bundle_in(ts.run_spec) is None and self.known_cost(ts) is not None)

    def workers_changed(self) -> None:
        """Note that a worker joined, left, paused or resumed."""
        self.version += 1

    def see_resources(self) -> None:
        """Note changes of the workers' resources, for which distributed has no event."""
        if self._scheduler.resources != self._resources:
            self._resources = {name: dict(supply) for name, supply in self._scheduler.resources.items()}
            self.version += 1

    def __call__(self, ts: TaskState) -> TaskView:
        """Return the view of a task as it is now.

        Its cost is the declared one, else the one learned for its kind, else Dask's average of its prefix,
        else Dask's default.
        """
        annotations, prefix, bundle = ts.annotations, ts.prefix, bundle_in(ts.run_spec)
        if annotations:
            cost, rank = self.known_cost(ts), _rank(ts)
        else:
            rank = None
            cost = None if bundle is None else bundle.cost_s
        costs_s = self._costs_by_kind(ts, cost) if self._view.has_devices else _NOTHING
        if cost is None and costs_s:
            cost = min(costs_s.values())
        expected_s = cost
        if cost is None and prefix.duration_average >= 0:
            expected_s = prefix.duration_average
        held: dict[str, int] = {}
        n_held: dict[str, int] = {}
        near: dict[str, int] | None = {} if len(self._scheduler.host_info) > 1 else None
        total = n_inputs = 0
        has_fixed = False
        if ts.dependencies:
            total, n_inputs, has_fixed = self._find_inputs(ts, held, n_held, near)
        is_bound = has_fixed or ts.key in self._refused
        is_bound |= bool(ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions)
        return TaskView(
            ts.key,
            cost_s=_distributed.prefix_duration(self._scheduler, ts) if expected_s is None else expected_s,
            priority=ts.priority or (),
            index=self._index(ts),
            rank_s=cost if rank is None else rank,
            has_cost=cost is not None,
            held=held or _NOTHING,
            near=near,
            n_held=n_held or _NOTHING,
            input_bytes=total,
            output_bytes=int(self._costs.nbytes(ts) or 0) if self._view.has_devices else 0,
            n_inputs=n_inputs,
            allowed=self._allowed_of(ts, has_fixed) if is_bound or self._view.has_devices else None,
            is_movable=not (ts.actor or prefix.name in _distributed.NEVER_STOLEN),
            is_bundle=bundle is not None,
            is_guess=expected_s is None,
            costs_s=costs_s,
            n_steps=len(bundle.steps) if bundle is not None and bundle.returns_results else 0,
        )

    def _find_inputs(
        self, ts: TaskState, held: dict[str, int], n_held: dict[str, int], near: dict[str, int] | None
    ) -> tuple[int, int, bool]:
        """Add the inputs of a task to mappings as in `TaskView`.

        Return their bytes, their number and whether one of them is fixed.
        """
        total = n_inputs = 0
        fixed, has_fixed = self._fixed, False
        n_workers = len(self._scheduler.workers)
        inlined: Collection[Key] = ()
        for hook in self._hooks.arrives_with:
            found = hook(ts)
            inlined = {*inlined, *found} if inlined else found
        for dependency in ts.dependencies:
            if dependency.type in fixed.types or (fixed.prefixes and fixed.is_fixed(dependency)):
                has_fixed = True
            holders = dependency.who_has or ()
            if len(holders) == n_workers:
                continue  # every worker has it: no worker is nearer than another
            if dependency.key in inlined:
                for holder in islice(holders, _HOLDERS):
                    held.setdefault(holder.address, 0)
                continue
            nbytes = dependency.get_nbytes()
            total += nbytes
            n_inputs += 1
            hosts = set()
            for holder in islice(holders, _HOLDERS):
                address = holder.address
                held[address] = held.get(address, 0) + nbytes
                n_held[address] = n_held.get(address, 0) + 1
                if near is not None and (host := holder.host) not in hosts:
                    hosts.add(host)
                    near[host] = near.get(host, 0) + nbytes
        return total, n_inputs, has_fixed

    def _allowed_of(self, ts: TaskState, has_fixed: bool) -> AllowedWorkers | None:
        kinds = declared_kinds(ts) if self._view.has_devices else frozenset()
        holders = self._fixed.holders(ts) if has_fixed else None
        refused = self._refused.get(ts.key, ())
        # Preferences for workers or hosts ("loose" restrictions) are not binding.
        names = () if ts.loose_restrictions else (ts.worker_restrictions, ts.host_restrictions)
        is_free = holders is None and not (refused or ts.resource_restrictions or any(names))
        if is_free and kinds in (frozenset(), _BOTH):
            return None
        if ts.resource_restrictions:
            self.see_resources()
        workers, hosts = (frozenset(one or ()) for one in names or ((), ()))
        needed = frozenset((ts.resource_restrictions or {}).items())
        is_loose = bool(ts.loose_restrictions)
        restrictions = Restrictions(workers, hosts, needed, is_loose, kinds, holders, refused)
        allowed = self._allowed.get(restrictions)
        if allowed is None:
            allowed = self._allowed[restrictions] = AllowedWorkers(self, restrictions)
        return allowed

    def allowed_now(self, restrictions: Restrictions) -> frozenset[str]:
        """Return the running workers that restrictions allow."""
        found = _distributed.valid_workers(self._scheduler, restrictions)
        valid = set(self._scheduler.running if found is None else found)
        if restrictions.holders is not None:
            valid = {ws for ws in valid if ws.address in restrictions.holders}
        for refused in (restrictions.refused, restrictions.refused[-1:]):
            if others := {ws for ws in valid if ws.address not in refused}:
                valid = others
                break
        of_kind = {ws for ws in valid if kind_of_worker(ws) in restrictions.kinds}
        return frozenset(ws.address for ws in of_kind or valid)

    def _index(self, ts: TaskState) -> int:
        # Keys of lowered graphs, like those of one-dimensional collections, end in their number.
        if isinstance(ts.key, tuple) and len(ts.key) == 2 and isinstance(ts.key[1], int):
            return ts.key[1]
        return next(self._numbers)
