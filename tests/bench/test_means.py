"""Geometric means: of all policies over the same cases, and what is left out is named."""

from __future__ import annotations

import pytest
from bench_rows import rows, section

from ferroflow_dask.bench.report import report
from ferroflow_dask.bench.schema import BenchRecord


def test_a_workload_of_many_sizes_counts_once_in_the_mean() -> None:
    sizes = [("merge", 1, 0.5), ("merge", 2, 0.5), ("merge", 3, 0.5), ("tree", 1, 2.0)]
    measured = [
        record
        for workload, n, seconds in sizes
        for policy, s in (("dask", 1.0), ("ferroflow", seconds))
        for record in rows([s, s], workload=workload, arguments={"n": n}, policy=policy)
    ]
    assert "| rsds | 2 | 1.00 |" in section(report(measured), "Geometric means")


def timed(times: dict[str, tuple[float | None, ...]], **more: object) -> list[BenchRecord]:
    """Return rows of Dask, random and ferroflow by workload: 0 for one that is broken, None for none."""
    return [
        record
        for workload, makespans in times.items()
        for policy, s in zip(("dask", "random", "ferroflow"), makespans, strict=True)
        if s is not None
        for record in rows(
            [s or 1.0] * 2,
            workload=workload,
            policy=policy,
            status="ok" if s else "hung",
            bound_s=None,
            **more,
        )
    ]


@pytest.mark.parametrize(
    ("times", "cells", "left_out"),
    [
        pytest.param({"a": (1.0, 1.0, 0.5), "b": (1.0, 1.0, 0.5)}, "2 | 1.00 | 2.00", [], id="all alike"),
        pytest.param(
            {"a": (1.0, 0.5, 0), "b": (1.0, 1.0, 1.0), "c": (1.0, 0, 0.125)},
            "1 | 1.00 | 1.00",
            ["a n=1000: ferroflow is broken", "c n=1000: random is broken"],
            id="each broken where the other wins",
        ),
        pytest.param(
            {"a": (1.0, 1.0, None), "b": (1.0, 0.25, 0.25)},
            "1 | 4.00 | 4.00",
            ["a n=1000: ferroflow did not run"],
            id="one that ran what suits it",
        ),
        pytest.param(
            {"a": (0, 1.0, 1.0), "b": (1.0, 0.5, 0.5)},
            "1 | 2.00 | 2.00",
            ["a n=1000: dask is broken"],
            id="nothing to compare with",
        ),
        pytest.param({"a": (1.0, 0.5, 0)}, "1 | 2.00 | **BROKEN**", [], id="broken throughout"),
        pytest.param(
            {"a": (1.0, 1.0, None), "b": (1.0, None, 1.0)},
            None,
            ["a n=1000: ferroflow did not run", "b n=1000: random did not run"],
            id="nothing in common",
        ),
    ],
)
def test_means_of_all_policies_are_over_the_same_cases_and_the_others_are_named(
    times: dict[str, tuple[float | None, ...]], cells: str | None, left_out: list[str]
) -> None:
    means = section(report(timed(times)), "Geometric means")
    lines = [line for line in means.splitlines() if "| rsds |" in line]
    assert [line.partition("| rsds | ")[2] for line in lines] == ([f"{cells} |"] if cells else [])
    told = [line.removeprefix("- ") for line in means.splitlines() if line.startswith("- ")]
    assert [line.replace(", 4 workers × 1 thread, processes, learned", "") for line in told] == left_out


def test_sizes_that_only_some_policies_ran_are_left_out() -> None:
    measured = [
        *timed({"a": (1.0, 1.0, None)}, arguments={"n": 1}),
        *timed({"a": (1.0, 0.25, 0.25)}, arguments={"n": 2}),
    ]
    means = section(report(measured), "Geometric means")
    assert "| rsds | 1 | 4.00 | 4.00 |" in means
    assert "- a n=1, 4 workers × 1 thread, processes, learned: ferroflow did not run" in means


def test_a_policy_of_one_suite_has_no_mean_over_all_and_takes_nothing_from_others() -> None:
    measured = [*timed({"a": (1.0, None, 0.5)}), *timed({"b": (1.0, 0.5, 0.125)}, suite="dag")]
    lines = section(report(measured), "Geometric means").splitlines()
    assert [line.split(" | ", 2)[2] for line in lines[-3:]] == [
        "rsds | 1 | – | 2.00 |",
        "dag | 1 | 2.00 | 8.00 |",
        "all | 2 | – | 4.00 |",
    ]


def test_costs_have_means_of_their_own() -> None:
    measured = [
        *rows([1.0] * 2),
        *rows([0.5] * 2, policy="ferroflow"),
        *rows([0.125] * 2, policy="ferroflow", costs="known"),
    ]
    lines = section(report(measured), "Geometric means").splitlines()
    assert [line.split(" | ")[1:] for line in lines[-2:]] == [
        ["learned", "rsds", "1", "2.00 |"],
        ["known", "rsds", "1", "8.00 |"],
    ]
