"""`ferroflow simulate`: table, JSON, page, trace and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow

from ferroflow_dask.bench.simulated_graphs import SLEEPS

GRAPH = ("simulate", "--dag", "imbalanced", "--n-fast", "20", "--n-heavy", "2")
RECORD = {
    "format": "ferroflow record",
    "version": 1,
    "policy": "dask",
    "threads": [1, 1],
    "core_share": 1.0,
    "makespan_s": 2.0,
    "graphs": [{"waits": False, "delay_s": 0.0}],
    "tasks": [[f"t-{i}", 0, 0.5, 100, [], 0, 0.0, True] for i in range(8)],
    "transfers": [],
}


def test_the_table_has_a_row_for_each_policy_and_number_of_workers() -> None:
    shown = answer(*GRAPH, "--workers", "1,2", "--repeat", "1").output
    assert "makespan [s]" in shown
    for policy in ("dask", "ferroflow"):
        rows = [line.split() for line in shown.splitlines() if line.split()[:1] == [policy]]
        assert [row[1] for row in rows] == ["1", "2", "1", "2"]  # table and bars
        assert all("█" in row[2] for row in rows[2:])


def test_json_has_the_numbers() -> None:
    found = json.loads(answer(*GRAPH, "--json", "--policy", "dask", "--workers", "2", "--seed", "7").output)
    (outcome,) = found["outcomes"]
    assert found["tasks"] == 22
    assert (outcome["policy"], outcome["workers"], outcome["executions"]) == ("dask", 2, 22)
    assert outcome["low_s"] < outcome["high_s"]
    assert outcome["bound_s"] <= outcome["makespan_s"]
    assert outcome["efficiency"] == pytest.approx(outcome["bound_s"] / outcome["makespan_s"])


def test_both_engines_and_further_policies_can_be_chosen() -> None:
    light = json.loads(answer(*GRAPH, "--json", "--engine", "light").output)["outcomes"]
    exact = json.loads(answer(*GRAPH, "--json", "--policy", "static, random,no-stealing").output)["outcomes"]
    assert [one["engine"] for one in light] == ["light"] * 2
    assert [one["policy"] for one in exact] == ["static", "random", "no-stealing"]


def test_policies_are_compared_on_the_standard_workloads() -> None:
    arguments = ("simulate", "--standard", "--policy", "ferroflow,dask", "--workers", "4", "--repeat", "1")
    shown = answer(*arguments).output
    rows = [line.split("|")[1:-1] for line in shown.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows[2:]] == list(SLEEPS)
    # Here stock Dask sends all tasks that read one result to the worker that has it.
    (fork_join,) = (row for row in rows if row[0].strip() == "fork-join")
    assert float(fork_join[2]) < float(fork_join[3])
    assert re.search(r"dask takes \d\.\d\d times as long as ferroflow", shown)


def test_a_record_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(RECORD))
    shown = answer("simulate", "--record", path, "--workers", "2,8", "--repeat", "1").output
    assert "8 tasks, 4 s of work" in shown
    assert "recorded: 2 s under dask with 2 threads" in shown


def test_a_page_and_a_trace_are_written(tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    answer(*GRAPH, "--workers", "1,2", "--html", page, "--trace", trace, "--repeat", "1")
    text = page.read_text()
    assert re.search(r"td.{1,12}ferroflow.{1,12}/td", text)  # escaped in the JSON of the page
    assert "Speed-up over one thread" in text
    events = json.loads(trace.read_text())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert len([one for one in tasks if one["pid"] < 3]) == 2 * 22  # dask on one worker, and on two
    assert names[:3] == [
        "dask, 1 workers: worker 0",
        "dask, 2 workers: worker 0",
        "dask, 2 workers: worker 1",
    ]


def test_without_a_calibration_there_is_no_calibrated_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = ferroflow(*GRAPH, "--topology", "calibrated")
    assert_one_line(result.exit_code, result.stderr, USAGE, "run `ferroflow calibrate` first")
