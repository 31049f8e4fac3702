"""METG: curves whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest
from bench_rows import row
from metg import (
    Metg,
    metg,
    metg_from_rows,
    metg_table,
)

from ferroflow_dask.bench.schema import BenchRecord


def test_with_constant_overhead_it_is_twice_the_overhead() -> None:
    # Tasks of 5, 10 and 15 ms with 10 ms of overhead each: at 10 ms efficiency is 50 %, granularity 20 ms.
    granularity_s = [0.015, 0.020, 0.025]
    assert metg(granularity_s, [5 / 15, 10 / 20, 15 / 25]) == Metg(0.020)


def test_between_two_points_it_is_interpolated_linearly() -> None:
    assert metg([0.010, 0.030], [0.4, 0.8]).granularity_s == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("granularity_s", "efficiency", "expected"),
    [
        pytest.param(
            [1.0, 2.0, 3.0, 4.0], [0.4, 0.6, 0.4, 0.8], 1.5, id="of two crossings the smaller counts"
        ),
        pytest.param(
            [2.0, 1.0, 3.0], [0.2, 0.6, 0.9], 1.0, id="overhead that shrinks leaves nothing in between"
        ),
        pytest.param([1.0, 1.0], [0.4, 0.5], 1.0, id="points of equal granularity"),
        pytest.param([3.0, 1.0, 2.0], [0.6, 0.4, 0.6], 1.5, id="the smallest size may be slow"),
    ],
)
def test_curves_that_are_not_monotone(
    granularity_s: list[float], efficiency: list[float], expected: float
) -> None:
    assert metg(granularity_s, efficiency).granularity_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("efficiency", "reason"),
    [
        pytest.param([0.1, 0.3], "no task size reaches 50% (best: 30%)", id="never"),
        pytest.param([0.6, 0.9], "the smallest tasks still reach 60%: try smaller ones", id="always"),
        pytest.param([0.5], "the smallest tasks still reach 50%: try smaller ones", id="one point, at it"),
        pytest.param([0.49], "no task size reaches 50% (best: 49%)", id="one point, below"),
    ],
)
def test_a_curve_that_does_not_cross_has_none_and_says_why(efficiency: list[float], reason: str) -> None:
    assert metg([1.0, 2.0][: len(efficiency)], efficiency) == Metg(None, reason)


USUAL: dict[str, Any] = {"width": 4, "steps": 10, "task_ms": 5.0, "radix": 5}


def task_bench(policy: str, makespan_s: float, **changes: Any) -> BenchRecord:
    arguments = {**USUAL, **{name: changes.pop(name) for name in USUAL if name in changes}}
    return row(
        workload="nearest",
        suite="task-bench",
        arguments=arguments,
        ops=40,
        policy=policy,
        makespan_s=makespan_s,
        **changes,
    )


def test_rows_of_sleeping_tasks_become_curves() -> None:
    # 40 tasks on 4 workers: granularity is makespan / 10; tasks of 5, 10, 15 ms with 10 ms of overhead.
    rows = [
        task_bench("ferroflow", 0.010 * (ms + 10), task_ms=ms, repetition=r)
        for ms in (15.0, 5.0, 10.0)
        for r in range(3)
    ]
    (curve,) = metg_from_rows([*rows, row()])
    assert (curve.policy, curve.sizes) == ("ferroflow", (5.0, 10.0, 15.0))
    assert curve.granularity_s == pytest.approx([0.015, 0.020, 0.025])
    assert curve.efficiency == pytest.approx([1 / 3, 1 / 2, 3 / 5])
    assert curve.result == Metg(0.020)
    assert metg_table([curve]).splitlines()[2] == (
        "| nearest width=4 steps=10 radix=5 | 4 × 1 | ferroflow | 20.0 | 3 | – |"
    )


def test_policies_and_clusters_have_curves_of_their_own_and_one_size_is_none() -> None:
    rows = [
        *(task_bench("dask", 1.0, task_ms=ms) for ms in (5.0, 50.0)),
        *(task_bench("dask", 1.0, task_ms=ms, workers=8) for ms in (5.0, 50.0)),
        *(task_bench("ferroflow", 1.0, task_ms=ms) for ms in (5.0, 50.0)),
        task_bench("random", 1.0, task_ms=5.0),
    ]
    curves = metg_from_rows(rows)
    assert {(curve.policy, curve.cluster) for curve in curves} == {
        ("dask", "4 × 1"),
        ("ferroflow", "4 × 1"),
        ("dask", "8 × 1"),
    }


def test_broken_runs_are_on_no_curve() -> None:
    rows = [task_bench("ferroflow", 0.5, task_ms=ms) for ms in (5.0, 10.0, 20.0)]
    rows[1] = task_bench("ferroflow", 0.001, task_ms=10.0, status="wrong result")
    (curve,) = metg_from_rows(rows)
    assert curve.sizes == (5.0, 20.0)


def test_curves_that_differ_in_any_size_have_titles_of_their_own() -> None:
    unusual = ({}, {"radix": 3})
    rows = [task_bench("dask", 1.0, task_ms=ms, **sizes) for ms in (5.0, 50.0) for sizes in unusual]
    assert [curve.title for curve in metg_from_rows(rows)] == [
        "nearest width=4 steps=10 radix=5",
        "nearest width=4 steps=10 radix=3",
    ]
