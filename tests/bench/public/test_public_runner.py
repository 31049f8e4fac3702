"""Public comparisons: sides, rounds and rows."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import psutil
import pytest
from public_suites import SUITE, limited_suite

from ferroflow_dask.bench.public import get_suite
from ferroflow_dask.bench.public.base import Options, Suite, missing
from ferroflow_dask.bench.public.host import Place
from ferroflow_dask.bench.public.page import page
from ferroflow_dask.bench.public.runner import run_suites
from ferroflow_dask.bench.public.sides import Rules
from ferroflow_dask.bench.public.summary import summarize
from ferroflow_dask.bench.schema import OK, BenchRecord, identity_of

pytestmark = pytest.mark.cluster
OPTIONS = Options(workers=2)
RULES = Rules(place=Place(workers=2), rounds=2, is_new_for_each=False, timeout_s=60)


def made(suite: Suite, rules: Rules = RULES, options: Options = OPTIONS, **more: Any) -> list[BenchRecord]:
    rows = list(run_suites([suite], options, rules, **more))
    group = os.getpgid(0)
    children = psutil.Process().children(recursive=True)
    assert not [one for one in children if os.getpgid(one.pid) != group], "processes of sides are left"
    return rows


@pytest.fixture(scope="module")
def rows() -> list[BenchRecord]:
    return made(SUITE)


def test_each_side_runs_each_round_and_gives_the_right_answer(rows: list[BenchRecord]) -> None:
    sided = [row for row in rows if row.policy in RULES.sides and row.workload in ("sums", "prepared")]
    assert {row.status for row in sided} == {OK}
    assert Counter((row.workload, row.policy, row.repetition) for row in sided) == {
        (name, policy, n): 1 for name in ("sums", "prepared") for policy in RULES.sides for n in range(2)
    }


def test_rows_have_all_measures(rows: list[BenchRecord]) -> None:
    for row in (row for row in rows if row.policy in RULES.sides and row.status == OK):
        assert 0 <= (row.sent_s or 0) <= (row.created_s or 0) <= (row.started_s or 0) <= row.makespan_s
        assert 0 < (row.first_result_s or 0) <= row.makespan_s
        assert (row.worker_cpu_s or 0) > 0
        assert row.client_cpu_s is not None
        assert row.peak_worker_memory > 2**20
        assert (row.peak_client_memory or 0) > 2**20
        assert row.peak_scheduler_memory is None, "the scheduler is in the process of the client"
        assert (row.messages or 0) >= (row.batches or 0) > 0
        assert row.bundled is (True if row.policy == "ferroflow" else None)


def test_stock_dask_sees_all_tasks_and_the_plugin_fewer(rows: list[BenchRecord]) -> None:
    tasks = {row.policy: row.tasks for row in rows if row.workload == "sums" and row.policy in RULES.sides}
    assert tasks["dask"] == tasks["dask-again"] == 60 + 15 + 4 + 1
    assert 0 < tasks["ferroflow"] < tasks["dask"]


def test_idle_sides_take_no_cpu_time(rows: list[BenchRecord]) -> None:
    assert all(row.others_cpu_s == 0 for row in rows if row.policy in RULES.sides and row.status == OK)


def test_anchors_other_schedulers_and_programs_that_do_not_run_have_rows(rows: list[BenchRecord]) -> None:
    others = {(row.workload, row.policy, row.lowering, row.status) for row in rows} - {
        (row.workload, row.policy, "", OK) for row in rows if row.policy in RULES.sides
    }
    assert others == {
        ("sums", "threads", "", OK),
        ("sums", "pool", "as usual", OK),
        ("absent", "dask", "", "skipped: it needs a moon"),
        ("night", "dask", "", "skipped: the moon is down"),
    }


def test_the_page_lists_programs_that_do_not_run_once_with_their_reason(rows: list[BenchRecord]) -> None:
    _, lines = page(summarize([row for row in rows if row.policy in RULES.sides], "2026-11"), "").split(
        "## Broken, or not run"
    )
    assert lines.split("\n") == [
        *("", ""),
        "- small absent, dask: it needs a moon",
        "- small night, dask: the moon is down",
        "",
    ]


def test_runs_that_are_done_are_left_out(rows: list[BenchRecord]) -> None:
    left = rows[3]
    again = made(SUITE, done={identity_of(row) for row in rows if row.status == OK and row is not left})
    assert [identity_of(row) for row in again if row.status == OK] == [identity_of(left)]


def test_each_program_may_have_new_clusters_whose_first_runs_are_rows() -> None:
    rules = replace(RULES, rounds=1, is_new_for_each=True, place=Place(workers=1, is_separate=True))
    rows = [row for row in made(SUITE, rules) if row.policy in RULES.sides and row.status == OK]
    assert Counter((row.fresh, row.costs, row.cluster) for row in rows) == {
        (True, "unknown", "separate"): 6,
        (False, "learned", "separate"): 6,
    }
    assert all((row.peak_scheduler_memory or 0) > 2**20 for row in rows)


@pytest.mark.parametrize(
    ("place", "limit"),
    [
        (Place(workers=2), 256 * 2**20),
        (Place(workers=2, is_separate=True), 256 * 2**20),
        (Place(workers=2, memory_limit="300MiB"), 300 * 2**20),
    ],
    ids=["the suite's", "the suite's, in processes of their own", "the user's"],
)
def test_a_suite_has_limits_of_its_own_unless_the_user_gives_them(place: Place, limit: int) -> None:
    rules = replace(RULES, place=place, rounds=1, timeout_s=1, sides={"dask": None})
    assert [row.status for row in made(limited_suite(limit), rules)] == [OK]


@pytest.mark.parametrize("name", ["tasks", "shapes", "workflows", "tpch"])
def test_a_program_of_each_suite_runs_on_all_sides(name: str, tmp_path: Any) -> None:
    suite = get_suite(name)
    if lacking := missing(suite):
        pytest.skip(f"needs {', '.join(lacking)}")
    options = replace(OPTIONS, data=tmp_path, scale=0.01)
    program = next(one for one in suite.programs(options) if not one.skipped)
    rules = replace(RULES, rounds=0, is_new_for_each=True)
    rows = made(suite, rules, replace(options, only=(program.name,)))
    assert {row.policy: row.status for row in rows if row.policy in RULES.sides} == dict.fromkeys(
        RULES.sides, OK
    )
