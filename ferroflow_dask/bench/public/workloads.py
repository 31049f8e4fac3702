"""Suites of workloads: programs that check their own results, since each run's differ."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ferroflow_dask.bench.public.base import Clock, Options, Program, Suite
from ferroflow_dask.bench.workloads import get_workload
from ferroflow_dask.bench.workloads.base import Cluster, Instance, Request, Workload
from ferroflow_dask.exceptions import ResultError

if TYPE_CHECKING:
    from distributed import Client

_HERE, _COILED = "ferroflow-dask, MIT", "after coiled/benchmarks (BSD-3)"
_SOURCES = {"rsds": "after RSDS, arXiv 2010.11105", "task-bench": "after Task Bench, SC'20", "dag": _HERE}
_OWN = frozenset({"straggler", "heavy_tail", "two_speeds", "mapped", "one_by_one", "live_pair"})

#: A workload by name, with its sizes.
Chosen = tuple[str, Mapping[str, Any]]


def _run(workload: Workload, request: Request, client: Client, clock: Clock) -> dict[str, Any]:
    """Run a new instance of a workload.

    The answer has the `problem` with its results, "" if there is none, and fields of the row.
    """
    threads = client.nthreads()
    # Keys depend on the salt: no run finds the results of another.
    own = replace(request, salt=uuid.uuid4().hex, n_threads=sum(threads.values()))
    instance = workload.build(own)
    cluster = Cluster(client, len(threads))
    answer = {"ops": instance.n_ops, "bound_s": instance.bound(own.n_threads)}
    try:
        if instance.prepare is not None:
            instance.prepare(cluster)
        with clock:
            futures = instance.submit(client)
            if instance.during is not None:
                instance.during(cluster)
            results = instance.collect(client, futures) if instance.collect else client.gather([*futures])
        if instance.count_executed is not None:
            answer["executed"] = instance.count_executed(client)
        return {**answer, "problem": _problem(instance, answer, results)}
    finally:
        if instance.restore is not None:
            instance.restore(cluster)


def _problem(instance: Instance, answer: Mapping[str, Any], results: Sequence[Any]) -> str:
    executed = answer.get("executed", instance.n_ops)
    if executed != instance.n_ops:
        return f"executed {executed} ops of {instance.n_ops}"
    try:
        instance.check(results)
    except ResultError as error:
        return str(error)
    return ""


def _fields(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "problem"}


def program_of(
    workload: Workload,
    sizes: Mapping[str, Any],
    *,
    suite: str = "",
    name: str = "",
    lowering: str = "",
    costs: str = "learned",
    seed: int = 0,
) -> Program:
    """Return the program of a workload.

    Parameters
    ----------
    workload : Workload
    sizes : mapping
        A value for every size.
    suite, name : str, optional
        Those of the workload if left out.
    lowering, costs, seed
        As in `Request`.
    """
    lacking = [package for package in workload.needs if not find_spec(package)]
    ways = {"lowering": lowering} if lowering else {}
    known = {"costs": costs} if costs != "learned" else {}
    return Program(
        suite=suite or workload.suite,
        name=name or workload.name,
        source=_HERE if workload.name in _OWN else _SOURCES.get(workload.suite, _COILED),
        run=partial(_run, workload, Request(sizes, seed, "", 0, costs, lowering)),
        sizes={**sizes, **ways, **known},
        expected=lambda: "",
        differs=lambda answer, _: str(answer["problem"]),
        fields=_fields,
        skipped=f"needs {', '.join(lacking)}" if lacking else "",
    )


def _programs(chosen: Iterable[Chosen], costs: str, seed: int, _: Options) -> Sequence[Program]:
    """Return workloads in all ways in which they can be written, named by sizes that are not default."""
    return [
        program_of(
            workload,
            sizes,
            name=_named(workload, sizes, lowering, costs),
            lowering=lowering,
            costs=costs,
            seed=seed,
        )
        for workload, sizes in ((get_workload(name), sizes) for name, sizes in chosen)
        for lowering in workload.lowerings
    ]


def _named(workload: Workload, sizes: Mapping[str, Any], lowering: str, costs: str) -> str:
    words = [f"{name}={value}" for name, value in sizes.items() if workload.defaults[name] != value]
    ways = [lowering] if lowering else []
    ways += [f"costs {costs}"] if costs != "learned" else []
    return " ".join([workload.name, *words, *([f"({', '.join(ways)})"] if ways else [])])


def suites_of(chosen: Iterable[Chosen], costs: str = "learned", seed: int = 0) -> list[Suite]:
    """Return suites of some workloads.

    Parameters
    ----------
    chosen : iterable of (str, mapping)
        Names of workloads, each with a value for every size.
    costs, seed
        As in `Request`.
    """
    suites: dict[str, list[Chosen]] = {}
    for name, sizes in chosen:
        suites.setdefault(get_workload(name).suite, []).append((name, sizes))
    return [
        Suite(name, "Workloads of ferroflow-dask.", partial(_programs, own, costs, seed))
        for name, own in suites.items()
    ]
