"""Describe a task of distributed's scheduler as a policy sees it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ferroflow_dask.annotations import COST_ANNOTATION, CPU, GPU, RANK_ANNOTATION
from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.plugin import seams
from ferroflow_dask.plugin.devices import kind_of_worker
from ferroflow_dask.plugin.durations import Durations
from ferroflow_dask.policy import TaskView

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

#: Holders of one input that are looked at: enough to find a near one, and no more however many there are.
_HOLDERS = 16
#: Likewise readers of one input, or else workers, that are looked at for where it is on its way to, and the
#: least size of it that makes this worth the time [B].
_READERS = 16
_LEAST_NBYTES = 2**16
#: Declared durations beyond this are mistakes [s]: thirty years.
_LONGEST_S = 1e9
_BOTH = frozenset((CPU, GPU))
#: The abstract class comes last: to ask it takes longer, and each task is asked.
_NUMBERS = (float, int, Real)
#: Shared by all tasks: the fewer objects a large graph makes, the less Python's collector looks through them.
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def declared_cost(ts: TaskState, kind: str = CPU) -> float | None:
    """Return the duration that a task was annotated with [s], or that it has as a bundle.

    None where it has none that makes sense.
    """
    declared = (ts.annotations or {}).get(COST_ANNOTATION)
    if declared is None:
        bundle = bundle_in(ts.run_spec)
        return None if bundle is None else bundle.cost_s
    return _seconds(declared.get(kind) if isinstance(declared, dict) else declared)


def declared_kinds(ts: TaskState) -> frozenset[str]:
    """Return the kinds of workers that a task was annotated with costs for; none if it says nothing."""
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
    """Return what is wrong with a declared cost, in a word or two; None where nothing is."""
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
    """Where a task may run, under the names that `Scheduler.valid_workers` reads of a task.

    A copy: tasks share it, and each task's own may be changed, as shuffles do.
    """

    worker_restrictions: frozenset[str]
    host_restrictions: frozenset[str]
    resources: frozenset[tuple[str, float]]
    loose_restrictions: bool
    kinds: frozenset[str]

    @property
    def resource_restrictions(self) -> dict[str, float]:
        """How much of each resource is needed."""
        return dict(self.resources)


class AllowedWorkers(Collection[str]):
    """The workers that a kind of restriction admits now; computed anew when workers have changed."""

    def __init__(self, describer: TaskDescriber, restrictions: Restrictions) -> None:
        self._describer = describer
        self._restrictions = restrictions
        self._version = -1
        self._addresses: frozenset[str] = frozenset()

    def _now(self) -> frozenset[str]:
        if self._version != self._describer.version:
            self._version = self._describer.version
            self._addresses = self._describer.allowed_now(self._restrictions)
        return self._addresses

    def __contains__(self, address: object) -> bool:
        return address in self._now()

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


class TaskDescriber:
    """Describes tasks as they are now; O(dependencies) each."""

    def __init__(
        self, scheduler: Scheduler, durations: Durations, comes_with: Callable[[TaskState, TaskState], bool]
    ) -> None:
        self._scheduler = scheduler
        self._comes_with = comes_with
        self._durations = durations
        self._numbers = count()
        #: Counts changes of the set of workers.
        self.version = 0
        self.has_gpus = False
        self._allowed: WeakValueDictionary[Restrictions, AllowedWorkers] = WeakValueDictionary()
        self._resources: dict[str, dict[str, float]] = {}
        self._told: set[str] = set()

    def known_cost(self, ts: TaskState) -> float | None:
        """Return the duration that is declared for a task, or learned of its kind [s]; None if neither."""
        declared = declared_cost(ts)
        if not ts.annotations:
            return declared
        kinds = declared_kinds(ts)
        if declared is None and kinds:
            declared = declared_cost(ts, GPU)
        if (declared is None or not kinds <= _BOTH) and COST_ANNOTATION in ts.annotations:
            self._tell_mistake(ts)
        return self._durations.of(ts) if declared is None else declared

    def _tell_mistake(self, ts: TaskState) -> None:
        """Warn the clients of a declared cost that makes no sense, once for each kind of mistake."""
        declared = (ts.annotations or {})[COST_ANNOTATION]
        mistake = mistake_in(declared)
        if mistake is None or mistake in self._told:
            return
        self._told.add(mistake)
        seams.warn_clients(
            self._scheduler,
            f"ferroflow: task {reprlib.repr(ts.key)} is annotated with {COST_ANNOTATION}="
            f"{reprlib.repr(declared)}, whose {mistake} is not allowed and left out; give seconds "
            f"from 0 to {_LONGEST_S:g}, or a dict of them for {CPU!r} and {GPU!r}",
        )

    def _costs_by_kind(self, ts: TaskState, on_cpu: float | None) -> Mapping[str, float]:
        """Return what a task takes on workers of each kind [s], where there are several kinds."""
        if not self.has_gpus or not ts.annotations:
            return _NOTHING
        on_gpu = None
        if declared_kinds(ts):
            on_cpu, on_gpu = declared_cost(ts), declared_cost(ts, GPU)
            if on_gpu is None or on_cpu is None:
                self._tell_mistake(ts)
        if on_gpu is None:
            on_gpu = self._durations.on_device(ts)
        found = {CPU: on_cpu, GPU: on_gpu}
        return {kind: seconds for kind, seconds in found.items() if seconds is not None}

    def has_rank(self, ts: TaskState) -> bool:
        """Return whether a task says, or its cost does, how much is still to run once it starts."""
        return _rank(ts) is not None or self.known_cost(ts) is not None

    def workers_changed(self) -> None:
        """Note that a worker joined, left, paused or resumed."""
        self.version += 1
        self.has_gpus = any(kind_of_worker(ws) == GPU for ws in self._scheduler.workers.values())

    def see_resources(self) -> None:
        """Note if the resources of workers have changed, of which there is no event."""
        if self._scheduler.resources != self._resources:
            self._resources = {name: dict(supply) for name, supply in self._scheduler.resources.items()}
            self.version += 1

    def __call__(self, ts: TaskState) -> TaskView:
        """Return what a policy may know of a task.

        The cost is the declared one, else what was learned of tasks of the same kind, else what is expected
        of tasks of the same group and prefix, else Dask's default.
        """
        cost = self.known_cost(ts)
        rank = _rank(ts)
        costs_s = self._costs_by_kind(ts, cost)
        if cost is None and costs_s:
            cost = min(costs_s.values())
        expected_s = self._durations.expected(ts) if cost is None else cost
        held: dict[str, int] = {}
        coming: dict[str, int] = {}
        n_held: dict[str, int] = {}
        inlined: dict[str, int] = {}
        near: dict[str, int] | None = {} if len(self._scheduler.host_info) > 1 else None
        total = n_inputs = n_inlined = n_readers = 0
        for dependency in ts.dependencies:
            holders = dependency.who_has or ()
            if len(holders) == len(self._scheduler.workers):
                continue  # it is everywhere: no worker is nearer than another
            n_readers = max(n_readers, len(dependency.dependents))
            if self._comes_with(ts, dependency):
                n_inlined += 1
                for holder in islice(holders, _HOLDERS):
                    inlined[holder.address] = inlined.get(holder.address, 0) + 1
                continue
            nbytes = dependency.get_nbytes()
            total += nbytes
            n_inputs += 1
            hosts = set()
            for holder in islice(holders, _HOLDERS):
                held[holder.address] = held.get(holder.address, 0) + nbytes
                n_held[holder.address] = n_held.get(holder.address, 0) + 1
                if near is not None and holder.host not in hosts:
                    hosts.add(holder.host)
                    near[holder.host] = near.get(holder.host, 0) + nbytes
            for address in self._fetching(dependency, ts) if nbytes >= _LEAST_NBYTES else ():
                coming[address] = coming.get(address, 0) + nbytes
                n_held[address] = n_held.get(address, 0) + 1
        return TaskView(
            ts.key,
            cost_s=seams.prefix_duration(self._scheduler, ts) if expected_s is None else expected_s,
            priority=ts.priority or (),
            index=self._index(ts),
            rank_s=cost if rank is None else rank,
            has_cost=cost is not None,
            held=held or _NOTHING,
            coming=coming or _NOTHING,
            near=near,
            n_held=n_held or _NOTHING,
            input_bytes=total,
            output_bytes=int(self._durations.nbytes(ts) or 0) if self.has_gpus else 0,
            n_inputs=n_inputs,
            inlined=inlined or _NOTHING,
            n_inlined=n_inlined,
            n_readers=n_readers,
            allowed=self._allowed_of(ts),
            is_movable=not (ts.actor or seams.is_never_stolen(ts)),
            is_guess=expected_s is None,
            costs_s=costs_s,
        )

    def _fetching(self, needed: TaskState, ts: TaskState) -> Iterator[str]:
        """Yield workers that fetch a result for another task than `ts`; not all where there are many."""
        workers: Iterable[WorkerState | None]
        if len(needed.dependents) > _READERS:
            workers = islice(self._scheduler.workers.values(), _READERS)
        else:
            workers = {other.processing_on for other in needed.dependents}
        for ws in workers:
            if ws is not None and ws is not ts.processing_on and seams.is_on_its_way_to(ws, needed):
                yield ws.address

    def _allowed_of(self, ts: TaskState) -> AllowedWorkers | None:
        kinds = declared_kinds(ts) if self.has_gpus else frozenset()
        if not (kinds or ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions):
            return None
        # Preferences for workers or hosts ("loose" restrictions) do not bind.
        names = () if ts.loose_restrictions else (ts.worker_restrictions, ts.host_restrictions)
        if not (ts.resource_restrictions or any(names)) and kinds in (frozenset(), _BOTH):
            return None
        if ts.resource_restrictions:
            self.see_resources()
        workers, hosts = (frozenset(one or ()) for one in names or ((), ()))
        needed = frozenset((ts.resource_restrictions or {}).items())
        restrictions = Restrictions(workers, hosts, needed, bool(ts.loose_restrictions), kinds)
        allowed = self._allowed.get(restrictions)
        if allowed is None:
            allowed = self._allowed[restrictions] = AllowedWorkers(self, restrictions)
        return allowed

    def allowed_now(self, restrictions: Restrictions) -> frozenset[str]:
        """Return the running workers on which tasks of such restrictions may run."""
        found = seams.valid_workers(self._scheduler, restrictions)
        valid = set(self._scheduler.running if found is None else found)
        of_kind = {ws for ws in valid if kind_of_worker(ws) in restrictions.kinds}
        return frozenset(ws.address for ws in of_kind or valid)

    def _index(self, ts: TaskState) -> int:
        # The tasks of our graphs, like the chunks of a collection, end in their number.
        if isinstance(ts.key, tuple) and len(ts.key) == 2 and isinstance(ts.key[1], int):
            return ts.key[1]
        return next(self._numbers)
