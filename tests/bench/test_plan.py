"""What a plan of benchmarks runs: which cases, in which order, and how runs are told apart."""

from __future__ import annotations

import bench_rows
import pytest
from bench_sums import SHAPE, SUMS, plan, sums

from ferroflow_dask.bench.plan import Case, Plan, make_cases
from ferroflow_dask.bench.schema import identity_of
from ferroflow_dask.bench.workloads import Workload
from ferroflow_dask.exceptions import UnknownNameError, UsageError


def test_the_order_is_drawn_anew_for_each_repetition_and_the_same_for_each_seed() -> None:
    wanted = plan("dask", "dask-again", "static", "ferroflow")
    orders = [[case.identity() for case in wanted.order(wanted.cases, i)] for i in range(5)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    again = plan("dask", "dask-again", "static", "ferroflow")
    assert [case.identity() for case in again.order(again.cases, 3)] == orders[3]


def test_groups_of_equally_many_cases_have_orders_of_their_own() -> None:
    policies = ["dask", "dask-again", "static", "ferroflow"]
    workloads = [(Workload(name, "", sums), {}) for name in ("one", "other", "third")]
    wanted = Plan(make_cases(workloads, policies, ["learned"]), SHAPE, repetitions=3)
    orders = {
        tuple(case.policy for repetition in range(3) for case in wanted.order(group, repetition))
        for group in wanted.groups()
    }
    assert len(orders) == 3


def test_runs_are_told_apart_by_sizes_that_are_lists_too() -> None:
    wanted = plan("dask")
    known = {wanted.identity(case, 0) for case in wanted.cases}
    shapes = [identity_of(bench_rows.row(arguments={"shape": [2, n]})) for n in (3, 3, 4)]
    assert len(set(shapes)) == 2
    assert not known & set(shapes)


def test_dask_has_learned_costs_where_ours_are_known() -> None:
    cases = make_cases([(SUMS, {"n": 1})], ["dask", "ferroflow"], ["known", "learned"])
    assert [(case.policy, case.lowering, case.costs) for case in cases] == [
        ("dask", "plain", "learned"),
        ("dask", "other", "learned"),
        ("ferroflow", "plain", "known"),
        ("ferroflow", "plain", "learned"),
    ]


def test_a_case_without_anything_to_run_is_told() -> None:
    with pytest.raises(UsageError, match="nothing to run"):
        make_cases([(SUMS, {"n": 1})], [], ["known"])
    with pytest.raises(UnknownNameError, match="unknown policy 'greedy'; choose one of: dask"):
        make_cases([(SUMS, {"n": 1})], ["greedy"], ["learned"])
    with pytest.raises(UsageError, match="costs are 'guessed'"):
        make_cases([(SUMS, {"n": 1})], ["dask"], ["guessed"])


def test_cases_of_one_workload_are_interleaved() -> None:
    other = Workload("other", "", sums, defaults={"n": 1})
    cases = make_cases([(SUMS, {"n": 1}), (other, {"n": 1}), (SUMS, {"n": 2})], ["ferroflow"], ["learned"])
    groups: list[list[Case]] = list(Plan(cases, SHAPE, 1).groups())
    assert [(case.workload.name, case.arguments["n"]) for group in groups for case in group] == [
        ("sums", 1),
        ("other", 1),
        ("sums", 2),
    ]
    assert len(groups) == 3
