"""Make the runs of a plan, interleaved, and yield a row for each."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

from ferroflow_dask.bench.machine import stamp
from ferroflow_dask.bench.observe import Measurement
from ferroflow_dask.bench.plan import Case, Plan
from ferroflow_dask.bench.schema import OK, BenchRecord
from ferroflow_dask.bench.session import Session, Start
from ferroflow_dask.bench.workloads.base import Instance, Request

Made = tuple[Instance, Measurement]


def run_plan(
    plan: Plan,
    *,
    done: Collection[str] = (),
    timeout_s: float = 300.0,
    start: Start | None = None,
    on_step: Callable[[str], object] | None = None,
    on_problem: Callable[[str], object] | None = None,
) -> Iterator[BenchRecord]:
    """Yield the row of each run of a plan as soon as it is made.

    All policies take turns on one cluster; runs that must know nothing of the past have another. All cases
    of a workload run once, in an order drawn anew, before any runs again. Before, each case runs once
    unmeasured, which opens connections and, where costs are learned, teaches them; and once more on a cluster
    that takes the place of one on which a run broke. Where such a warm-up breaks, the next run of that case
    is not made: its row says what broke.

    Parameters
    ----------
    plan : Plan
    done : collection of identities
        Runs to leave out, by `Plan.identity`.
    timeout_s : float, optional
        After which a run counts as hung [s].
    start : callable, optional
        Starts a cluster such as the plan says, as `Session` takes it; a local one if left out.
    on_step : callable, optional
        Told what is about to run.
    on_problem : callable, optional
        Told, in a line, of a cluster that failed to end; a warning if left out. The runs go on with another.
    """
    tell = on_step or (lambda _: None)
    invocation = uuid.uuid4().hex
    with _Places(plan, timeout_s, start, on_problem) as places:
        for group in plan.groups():
            left = [
                (case, repetition)
                for repetition in range(plan.repetitions)
                for case in plan.order(group, repetition)
                if plan.identity(case, repetition) not in done
            ]
            first_runs = {case.identity(): case for case, _ in left}.values()
            tell(f"{group[0].workload.name} · start of what is missing")
            places.prepare(first_runs)
            broken: dict[tuple[Any, ...], Made] = {}
            for case in first_runs:
                tell(f"{case.workload.name} · {case.policy} · warm-up")
                if made := _broken_warm_up(plan, case, 0, places.of(case)):
                    broken[case.identity()] = made
            for case, repetition in left:
                tell(f"{case.workload.name} · {case.policy}")
                made = broken.pop(case.identity(), None) or _measured(plan, case, repetition, places.of(case))
                yield _row(plan, case, repetition, *made, invocation=invocation)


class _Places:
    """Where cases run: a cluster for those that learn, and one for those that must not."""

    def __init__(
        self,
        plan: Plan,
        timeout_s: float,
        start: Start | None,
        on_problem: Callable[[str], object] | None,
    ) -> None:
        self._plan = plan
        self._start = start
        self._on_problem = on_problem
        self._timeout_s = timeout_s
        self._stack = ExitStack()
        self._places: dict[str, Session] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self, cases: Iterable[Case]) -> None:
        """Start what the cases need and is not there; let clusters forget what they have learned."""
        for case in cases:
            name = self._name(case)
            if name not in self._places:
                options = (self._timeout_s, self._start, self._on_problem)
                session = Session(self._plan.shape, self._plan.seed, *options)
                self._places[name] = self._stack.enter_context(session)
        for place in self._places.values():
            place.forget()
        gc.unfreeze()  # what runs of other workloads have left may go

    def of(self, case: Case) -> Session:
        """Return where a case runs."""
        return self._places[self._name(case)]

    @staticmethod
    def _name(case: Case) -> str:
        return "unknown" if case.costs == "unknown" else "learned"


def _measured(plan: Plan, case: Case, repetition: int, place: Session) -> Made:
    """Make a run where everything is as it must be before; if that cannot be had, return what broke."""
    if plan.is_fresh:
        place.renew()
    if not _is_ready(case, place) and (broken := _broken_warm_up(plan, case, repetition, place)):
        return broken
    if case.costs == "unknown":
        place.forget()
    return _run(plan, case, repetition, place)


def _is_ready(case: Case, place: Session) -> bool:
    return case.identity() in (place.warm if case.costs == "unknown" else place.taught)


def _broken_warm_up(plan: Plan, case: Case, repetition: int, place: Session) -> Made | None:
    """Run a case unmeasured; return what came of it if it broke."""
    instance, measurement = _run(plan, case, repetition, place)
    if measurement.status == OK:
        return None
    return instance, replace(measurement, status=f"warm-up: {measurement.status}")


def _run(plan: Plan, case: Case, repetition: int, place: Session) -> Made:
    request = Request(
        arguments=case.arguments,
        seed=plan.seed + repetition,
        salt=uuid.uuid4().hex,
        n_threads=plan.shape.n_threads,
        costs=case.costs,
        lowering=case.lowering,
    )
    instance = case.workload.build(request)
    measurement = place.measure(instance, case.policy)
    if measurement.status != OK:
        place.renew()  # nobody knows what state it is in
        return instance, measurement
    place.warm.add(case.identity())
    place.taught.add(case.identity())
    return instance, measurement


def _row(
    plan: Plan,
    case: Case,
    repetition: int,
    instance: Instance,
    measurement: Measurement,
    *,
    invocation: str,
) -> BenchRecord:
    seen = dict(measurement.seen)
    shape = plan.shape
    busy_s, longest_s = seen.pop("t1_s", 0.0), seen.pop("t_inf_s", 0.0)
    t1_s = busy_s if instance.t1_s is None else instance.t1_s
    t_inf_s = longest_s if instance.t_inf_s is None else instance.t_inf_s
    bound_s = max(t1_s / shape.n_threads, t_inf_s) if instance.bound_s is None else instance.bound_s
    is_ok = measurement.status == OK
    predicted = instance.predicted() if is_ok and instance.predicted is not None else None
    available_s = measurement.makespan_s * shape.n_threads  # 0 of a run that failed before the clock started
    return BenchRecord(
        **plan.facts(case, repetition),
        suite=case.workload.suite,
        invocation=invocation,
        makespan_s=measurement.makespan_s,
        bound_s=bound_s if is_ok else None,
        efficiency=bound_s / measurement.makespan_s if is_ok else None,
        predicted_s=None if predicted is None else predicted.makespan_s,
        predicted_tasks=None if predicted is None else predicted.n_tasks,
        predicted_bytes=None if predicted is None else predicted.nbytes_moved,
        ops=instance.n_ops,
        idle_fraction=max(0.0, 1 - busy_s / available_s) if available_s else 0.0,
        status=measurement.status,
        **seen,
        **stamp(),
    )
