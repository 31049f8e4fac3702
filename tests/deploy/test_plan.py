"""`ferroflow plan`: which jobs meet a deadline or fit a budget."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow
from plans import GRAPH, SETTINGS, planned, sections
from slurm_clusters import SCHEDULER, no_jobs

from ferroflow_dask.deploy import job_kind
from ferroflow_dask.deploy.planning import plan, topology_of
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Builder, Graph, generate_graph
from ferroflow_dask.strategy import check_strategy, read_strategy
from ferroflow_dask.topology import load_topology


def test_the_cheapest_jobs_that_meet_the_deadline(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    facts = planned(tmp_path, "--deadline", "6s", "-o", file)
    best = facts["plan"]
    # Two jobs of one worker need 6 s and more. Three jobs cost 12 node-seconds, two jobs of two workers 6.
    assert (best["section"], best["nodes"], best["workers"]) == ("wide", 2, 4)
    assert 3 < best["low_s"] < best["predicted_s"] < best["high_s"] <= 6 or best["low_s"] < 3
    assert best["node_s"] == pytest.approx(2 * best["predicted_s"])
    assert {(one["section"], one["nodes"]) for one in facts["tried"]} == {
        (section, n) for section in ("narrow", "wide") for n in (1, 2, 3, 4)
    }
    graph = generate_graph("imbalanced", n_heavy=12, heavy_ms=1000.0, n_fast=1)
    strategy = read_strategy(file)
    check_strategy(strategy, graph)
    assert strategy.workers == ("0", "1", "2", "3")
    only = planned(tmp_path, "--deadline", "6s", "--section", "narrow")["plan"]
    assert (only["section"], only["nodes"]) == ("narrow", 3)


def test_the_fastest_jobs_within_a_budget(tmp_path: Path) -> None:
    best = planned(tmp_path, "--budget", "8.5node-seconds")["plan"]
    assert best["section"] == "wide"
    assert best["nodes"] * best["high_s"] <= 8.5
    larger = planned(tmp_path, "--budget", "1node-hours")["plan"]
    assert larger["predicted_s"] < best["predicted_s"]
    faster = planned(tmp_path, "--budget", "8.5node-seconds", "--speed", "narrow=4")["plan"]
    assert faster["section"] == "narrow"


def test_sections_with_gpus_are_named(tmp_path: Path) -> None:
    gpu = {"cores": 1, "memory": "900 MiB", "walltime": "00:30:00", "job_extra_directives": ["--gres=gpu:1"]}
    config = sections(tmp_path, cpu={"cores": 1, "memory": "900 MiB", "walltime": "00:30:00"}, gpu=gpu)
    options = ("--costs", "analytic", "--steps", "10", "--nodes", "2", "--config", config, "--deadline", "60")
    line = "section gpu has GPUs: its workers count as CPU workers; --speed gpu=N says that they are N times "
    line += "faster"
    assert [one for one in answer("plan", *GRAPH, *options).output.splitlines() if "GPUs" in one] == [line]
    assert "GPUs" not in answer("plan", *GRAPH, *options, "--speed", "gpu=9").output
    assert json.loads(answer("plan", *GRAPH, *options, "--json").output)["gpus_as_cpus"] == ["gpu"]


def test_the_table_marks_the_proposal_and_prints_the_run(tmp_path: Path) -> None:
    options = ("--costs", "analytic", "--steps", "40", "--nodes", "3", "--config", sections(tmp_path))
    text = answer("plan", *GRAPH, *options, "--deadline", "6s").output
    assert [line.split()[:2] for line in text.splitlines() if line.rstrip().endswith("proposed")] == [
        ["wide", "2"]
    ]
    graph = "--dag imbalanced --n-heavy 12 --heavy-ms 1000.0 --n-fast 1"
    jobs = f"--cluster slurm --config {sections(tmp_path)} --section wide --jobs 2"
    assert f"proposed: ferroflow run {graph} {jobs}\n" in text
    strategy = str(tmp_path / "s.json")
    text = answer("plan", *GRAPH, *options, "--deadline", "6s", "-o", strategy).output
    assert text.endswith(f"--section wide --jobs 2 --strategy {strategy}\n")


BAD = {
    "no deadline": ((), "give one of --deadline TIME and --budget N-node-hours"),
    "both": (("--deadline", "1s", "--budget", "1node-hours"), "give one of --deadline TIME and --budget"),
    "a deadline of 0": (("--deadline", "0s"), "'--deadline': 0.0 is not in the range x>0"),
    "a deadline below 0": (
        ("--deadline", "-5s"),
        "'--deadline': '-5s' is no duration; write it like 60",
    ),
    "no time": (("--deadline", "soon"), "'--deadline': 'soon' is no duration; write it like"),
    "a budget of 0": (("--budget", "0node-hours"), "--budget must be above 0, got '0node-hours'"),
    "no cost": (("--budget", "10"), "--budget must be a cost like 10node-hours or 90node-seconds, got '10'"),
    "no section": (("--deadline", "1s", "--section", "moon"), "there is no section jobqueue.moon in"),
    "no speed": (("--deadline", "1s", "--speed", "wide"), "--speed must be SECTION=N, got 'wide'"),
    "an unknown speed": (("--deadline", "1s", "--speed", "moon=2"), "unknown section 'moon'"),
    "too early": (
        ("--deadline", "2s"),
        "no plan of at most 2 nodes meets a deadline of 2.00 s; the fastest is 2",
    ),
    "too cheap": (("--budget", "1node-seconds"), "no plan needs at most 1 node-seconds; the cheapest is"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_planned_is_one_line(name: str, tmp_path: Path) -> None:
    options, message = BAD[name]
    fast = ("--costs", "analytic", "--steps", "10", "--nodes", "2", "--config", sections(tmp_path))
    result = ferroflow("plan", *GRAPH, *fast, *options)
    assert_one_line(result.exit_code, result.stderr, USAGE, message)


def test_jobs_are_hosts_with_the_memory_of_the_section(tmp_path: Path) -> None:
    kind = job_kind("wide", sections(tmp_path))
    topology = topology_of(kind, 3, load_topology("this-machine"), 2.0)
    assert [len(host.workers) for host in topology.hosts] == [2, 2, 2, 0]
    assert {(one.threads, one.speed, one.memory_nbytes) for one in topology.workers} == {
        (1, 2.0, 900 * 2**20)
    }
    assert topology.scheduler == topology.client == "login"


def heavy() -> Graph:
    """Return four products whose weights of 16 MiB each must be on a worker."""
    b = Builder("heavy")
    x = b.input("x", np.float32, (1, 2048))
    for _ in range(4):
        x = b.op("MatMul", x, b.constant(np.zeros((2048, 2048), np.float32)))
    b.output(y=x)
    return b.to_graph()


def test_weights_must_fit_the_nodes(tmp_path: Path) -> None:
    small = {"cpu": {"cores": 1, "memory": "120 MiB", "walltime": "00:30:00"}}
    config = sections(tmp_path, **small)
    found = plan(heavy(), deadline_s=60.0, config_file=config, most_nodes=3, steps=60)
    assert {one.nodes for one in found.tried} == {2, 3}  # 64 MiB of weights, 36 MiB for them on a node
    with pytest.raises(UsageError, match="no plan is feasible: the weights do not fit the memory of 1 nodes"):
        plan(heavy(), deadline_s=60.0, config_file=config, most_nodes=1, steps=60)
    with pytest.raises(UsageError, match="steps must be a finite number above 0, got 0"):
        plan(heavy(), deadline_s=60.0, config_file=config, steps=0)


@pytest.mark.cluster
@pytest.mark.usefixtures("slurm")
def test_what_a_plan_proposes_meets_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    strategy, deadline_s = tmp_path / "s.json", 6.0
    best = planned(tmp_path, "--deadline", f"{deadline_s}s", "-o", strategy)["plan"]
    assert (best["section"], best["nodes"]) == ("wide", 2)
    common = {**SETTINGS["slurm"], "log-directory": str(tmp_path), "scheduler-options": SCHEDULER}
    config = sections(tmp_path, **{**SETTINGS, "slurm": common})
    jobs = ("--cluster", "slurm", "--config", config, "--section", best["section"], "--jobs", best["nodes"])
    text = answer("run", *GRAPH, *jobs, "--strategy", strategy, "--json").output
    facts = json.loads(text.splitlines()[-1])
    assert facts["executed_ops"] == 13
    # The ops sleep, 3 s on each worker: a busy machine changes little of that, and 6 s are allowed.
    print(f"deadline {deadline_s} s, predicted {best['predicted_s']:.3f} s, run {facts['makespan_s']:.3f} s")
    assert 3 < facts["makespan_s"] <= deadline_s
    assert no_jobs()
