"""`ferroflow search`, and costs that workers measure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import answer
from dask.distributed import Client
from split_models import block

from ferroflow_dask.cli.cluster_options import Duration
from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.deploy.parts import WorkerCost, measure_op
from ferroflow_dask.deploy.searching import auto_choices
from ferroflow_dask.graph import Builder, TensorSpec, generate_graph
from ferroflow_dask.search import Problem, simulate
from ferroflow_dask.search.candidates import degrees_of, seeds
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy import check_strategy, read_strategy
from ferroflow_dask.topology import load_topology

GRAPH = ("--dag", "transformer", "--seq-len", "64", "--d-model", "64", "--n-heads", "4")
FAST = ("--topology", "flexflow-p100", "--workers", "4", "--costs", "analytic", "--steps", "60")


def test_search_writes_a_strategy_that_info_shows(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    facts = json.loads(answer("search", *GRAPH, *FAST, "-o", file, "--json").output)
    assert facts["proposals"] <= 60
    found = facts["strategies"].pop("found")
    assert set(facts["strategies"]) >= {"one device", "data-parallel", "Megatron-like", 'granularity="auto"'}
    assert all(found["makespan_s"] <= one["makespan_s"] for one in facts["strategies"].values())
    graph = generate_graph("transformer", seq_len=64, d_model=64, n_heads=4)
    check_strategy(read_strategy(file), graph)
    shown = json.loads(answer("info", *GRAPH, "--strategy", file, "--json").output)["strategy"]
    assert shown["bytes_moved"] == found["bytes_moved"]


def test_search_prints_the_baselines() -> None:
    text = answer("search", *GRAPH, *FAST).output
    for name in ("one device", "data-parallel", "sequence-parallel", "output dimensions", "found"):
        assert name in text


def test_processes_find_what_one_process_finds(tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.json" for n in (1, 3)]
    for n, file in zip((1, 3), files, strict=True):
        answer("search", *GRAPH, *FAST, "--steps", "200", "--processes", n, "-o", file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_processes_share_a_budget_in_time() -> None:
    budget = ("--topology", "flexflow-p100", "--workers", "4", "--costs", "analytic", "--seconds", "1s")
    facts = json.loads(answer("search", *GRAPH, *budget, "--processes", "2", "--json").output)
    assert facts["proposals"] >= 2  # each chain simulates one strategy before it looks at the clock
    found = facts["strategies"].pop("found")
    assert all(found["makespan_s"] <= one["makespan_s"] for one in facts["strategies"].values())


def test_a_search_goes_on_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    spans = []
    for _ in range(3):
        resume = ("--resume", file) if file.exists() else ()
        facts = json.loads(answer("search", *GRAPH, *FAST, *resume, "-o", file, "--json").output)[
            "strategies"
        ]
        assert ("resumed" in facts) == bool(resume)
        spans.append(facts["found"]["makespan_s"])
        if resume:
            assert facts["resumed"]["makespan_s"] == spans[-2]
    assert spans == sorted(spans, reverse=True)


def test_what_auto_would_do_is_a_baseline() -> None:
    graph = generate_graph("imbalanced", n_heavy=4, heavy_ms=200.0, n_fast=4)
    topology = load_topology("this-machine").with_workers(2)
    problem = Problem(graph, Machine.of_topology(topology), AnalyticCost())
    auto = simulate(problem, auto_choices(problem, topology.profile()))
    assert 0.4 < auto.makespan_s < 0.45  # two of the four long ops on each worker
    assert simulate(problem, seeds(problem)["one device"]).makespan_s > 0.8
    # Messages cost more than the operators of a small model.
    small = Problem(block(), Machine.of_topology(topology), AnalyticCost())
    assert simulate(small, auto_choices(small, topology.profile())).nbytes_moved == 0


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        pytest.param("60", "seconds", 60.0, id="a number is seconds"),
        pytest.param("60s", "seconds", 60.0, id="seconds"),
        pytest.param("1.5m", "seconds", 90.0, id="minutes"),
        pytest.param("1e2", "seconds", 100.0, id="an exponent"),
        pytest.param("250 ms", "seconds", 0.25, id="milliseconds with a blank"),
        pytest.param("5", "milliseconds", 5.0, id="a number is milliseconds"),
        pytest.param("2s", "milliseconds", 2000.0, id="seconds as milliseconds"),
    ],
)
def test_durations_have_units(text: str, unit: str, expected: float) -> None:
    assert Duration(unit).convert(text, None, None) == pytest.approx(expected)


@pytest.mark.cluster
def test_costs_of_parts_are_measured_once_for_each_shape(process_client: Client) -> None:
    graph = block()
    machine = Machine.of_topology(load_topology("this-machine"))
    cost = WorkerCost(process_client)
    problem = Problem(graph, machine, cost)
    nodes = problem.changeable[:8]
    for node in nodes:
        for degrees in degrees_of(problem, node)[:2]:
            assert all(seconds > 0 for seconds in problem.base_s(node, degrees))
    n = cost.n_measured
    assert n < sum(len(degrees_of(problem, node)[:2]) for node in nodes)
    again = Problem(graph, machine, cost)
    for node in nodes:
        assert again.base_s(node, ()) == problem.base_s(node, ())
    assert cost.n_measured == n


@pytest.mark.cluster
def test_costs_are_those_in_the_session_of_the_model(process_client: Client) -> None:
    graph, cost = block(), WorkerCost(process_client)
    op = graph.live_ops[-1]
    alone_s = cost.seconds(op, graph)
    cost.fit(graph)
    assert alone_s is not None
    assert 0 < cost.factor != 1
    assert cost.seconds(op, graph) == cost.factor * alone_s
    own = WorkerCost(process_client)
    own.fit(generate_graph("imbalanced"))
    assert own.factor == 1


def test_operators_that_fail_on_random_numbers_are_estimated() -> None:
    b = Builder("odd")
    x = b.input("x", np.float32, (4, 6))
    b.output(y=b.op("Reshape", x, b.input("shape", np.int64, (2,)), spec=TensorSpec.of(np.float32, (6, 4))))
    graph = b.to_graph()
    (op,) = graph.ops
    specs = {name: graph.spec(name) for name in op.inputs}
    assert measure_op(op, graph.opsets, specs, {}) is None
    known = {"shape": np.array([6, 4])}
    assert (measure_op(op, graph.opsets, specs, known) or 0) > 0
    assert AnalyticCost().seconds(op, graph) is not None
