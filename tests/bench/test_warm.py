"""What a cluster is like before a run that is measured: warm, and with costs learned or forgotten."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from bench_sums import check, fail, plan, sums
from distributed.scheduler import TaskPrefix

from ferroflow_dask.bench.baselines import _forget
from ferroflow_dask.bench.suite import run_plan
from ferroflow_dask.bench.workloads import Instance, Request, Workload


def durations(dask_scheduler: Any) -> dict[str, float]:
    prefixes = dask_scheduler.task_prefixes.items()
    return {name: p.duration_average for name, p in prefixes if p.duration_average >= 0}


@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh clusters", "one cluster"])
def test_unknown_costs_are_unknown_in_every_run(is_fresh: bool) -> None:
    known = []

    def noting(request: Request) -> Instance:
        return sums(request, lambda client: known.append(client.run_on_scheduler(durations)))

    for costs, is_known in (("unknown", False), ("learned", True)):
        known.clear()
        workload = Workload("noting", "", noting, defaults={"n": 2})
        rows = list(run_plan(plan("ferroflow", workload=workload, costs=costs, is_fresh=is_fresh)))
        assert {(row.costs, row.cluster, row.fresh) for row in rows} == {(costs, "local", is_fresh)}
        assert bool(known[-1]) is is_known


def test_learned_costs_are_learned_again_after_a_run_that_broke_the_cluster() -> None:
    known = []

    def breaking(request: Request) -> Instance:
        right = sums(request, lambda client: known.append(client.run_on_scheduler(durations)))
        wrong = partial(check, ["something else"])
        return Instance(
            right.submit, wrong if request.lowering == "other" else right.check, n_ops=right.n_ops
        )

    workload = Workload("breaking", "", breaking, defaults={"n": 2}, lowerings=("plain", "other"))
    for row in run_plan(plan("dask", workload=workload, repetitions=3)):
        assert (row.status == "ok") is (row.lowering == "plain")
        assert row.status != "ok" or known[-1]


def test_learned_costs_are_learned_again_by_the_case_that_broke_the_cluster() -> None:
    known: list[dict[str, float]] = []

    def breaking(request: Request) -> Instance:
        right = sums(request, lambda client: known.append(client.run_on_scheduler(durations)))
        return replace(right, check=fail) if len(known) == 1 else right  # the first that is measured

    workload = Workload("breaking", "", breaking, defaults={"n": 2})
    rows = list(run_plan(plan("dask", workload=workload, repetitions=2)))
    assert [row.status for row in rows] == ["failed: ArithmeticError: broken on purpose", "ok"]
    assert known[-1]


def test_unknown_costs_too_are_measured_on_a_warm_cluster_only() -> None:
    clusters: list[str] = []

    def breaking(request: Request) -> Instance:
        right = sums(request, lambda client: clusters.append(client.scheduler.address))
        return replace(right, check=fail) if len(clusters) == 1 else right

    workload = Workload("breaking", "", breaking, defaults={"n": 2})
    rows = list(run_plan(plan("dask", workload=workload, repetitions=3, costs="unknown")))
    assert [row.status == "ok" for row in rows] == [False, True, True]
    _, new = dict.fromkeys(clusters)
    assert [cluster == new for cluster in clusters] == [False, False, True, True, True]  # one is unmeasured


def test_what_dask_knows_without_having_seen_it_is_not_forgotten() -> None:
    def known(prefix: TaskPrefix) -> tuple[float, float]:
        return prefix.duration_average, prefix.max_exec_time

    prefixes = {name: TaskPrefix(name) for name in ("rechunk-split", "seen")}
    at_first = [known(prefix) for prefix in prefixes.values()]
    assert at_first[0][0] > 0  # Dask's configuration tells that one
    for prefix in prefixes.values():
        prefix.add_duration("compute", 0.0, 3.0)
        prefix.add_exec_time(9.0)
    _forget(SimpleNamespace(task_prefixes=prefixes))
    assert [known(prefix) for prefix in prefixes.values()] == at_first
