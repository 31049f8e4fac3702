"""Search of strategies: delta simulation, baselines, and the gap to an exact search."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from searches import SLOW, assert_equal, machine
from split_cases import random_strategy
from split_models import MODELS, block, cnn, mlp

from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Builder, Graph, generate_graph
from ferroflow_dask.search import ENDLESS, Choice, Problem, search, simulate, simulate_change, time_spent
from ferroflow_dask.search.candidates import neighbours, random_choice, seeds
from ferroflow_dask.search.search import Chain, Ended
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy import check_strategy, partition
from ferroflow_dask.strategy.report import describe
from ferroflow_dask.topology import Route, load_topology


def problem(graph: Graph, n: int = 4) -> Problem:
    return Problem(graph, machine(n), SLOW)


#: Random proposals on each graph.
PROPOSALS = int(os.environ.get("FERROFLOW_PROPOSALS", "100"))
DELTA_GRAPHS = {**MODELS, "resnet": generate_graph("resnet")}


@pytest.mark.parametrize("name", DELTA_GRAPHS)
def test_the_delta_simulation_is_the_full_one_bit_by_bit(name: str) -> None:
    one = problem(DELTA_GRAPHS[name])
    rng = np.random.default_rng(0)
    current = simulate(one, seeds(one)["data-parallel"])
    kept, spent_s = 0.0, {"delta": 0.0, "full": 0.0}
    for _ in range(PROPOSALS):
        node = int(rng.integers(one.changeable.start, one.changeable.stop))
        choice = random_choice(one, node, rng)
        choices = list(current.choices)
        choices[node] = choice
        start = time.process_time()
        found = simulate_change(one, current, node, choice)
        between = time.process_time()
        full = simulate(one, choices)
        spent_s["delta"] += between - start
        spent_s["full"] += time.process_time() - between
        assert_equal(found, full)
        kept += found.n_kept / found.n_events
        if rng.random() < 0.5:
            current = found
    rates = ", ".join(f"{PROPOSALS / seconds:,.0f}/s {kind}" for kind, seconds in spent_s.items())
    print(f"{name}: {PROPOSALS:,} proposals, {rates}, {kept / PROPOSALS:.0%} of the events kept")
    assert kept > PROPOSALS / 5  # it did go back to snapshots


def test_a_timeline_by_hand() -> None:
    b = Builder("two")
    x = b.input("x", np.float32, (4, 4))
    left = b.op("Relu", x, name="left")
    b.output(y=b.op("Tanh", left, name="right"))
    seconds = {"left": 1.0, "right": 2.0}

    class Costs:
        def seconds(self, op: object, graph: Graph) -> float:
            return seconds[graph.ops[0].name] * (graph.spec(graph.outputs[0]).size or 0) / 16

    slow = Machine(
        (1, 1), (1.0, 1.0), (64.0, 64.0), lambda _, to: Route((to,), 0.25, 64.0), round_trip_s=0.25
    )
    one = Problem(b.to_graph(), slow, Costs())
    # Whole: 1 + 2. The second on the other worker: it gets 64 bytes in 1 s, a round trip before and after.
    whole = [Choice((), (0,))] * one.n_nodes
    assert simulate(one, whole).makespan_s == 3.0
    apart = [*whole[:2], Choice((), (1,)), Choice((), (1,))]
    found = simulate(one, apart)
    assert found.makespan_s == 1.0 + 0.25 + 1.0 + 0.25 + 0.25 + 2.0
    assert found.nbytes_moved == 64
    # In halves: half of the input goes to the other worker and half of the output comes back, 0.5 s each.
    half = Choice((("sample", 2),), (0, 1))
    found = simulate(one, [whole[0], half, half, whole[3]])
    assert found.nbytes_moved == 64
    assert found.makespan_s == pytest.approx(1.5 + 2 * (0.25 + 0.5 + 0.25 + 0.25), abs=1e-6)


def test_tasks_of_dask_take_time_of_client_scheduler_and_workers() -> None:
    b = Builder("two")
    b.output(y=b.op("Tanh", b.op("Relu", b.input("x", np.float32, (4, 4)), name="left"), name="right"))

    class Second:
        def seconds(self, op: object, graph: Graph) -> float:
            return 1.0

    free = Machine((1, 1), (1.0, 1.0), (1e12, 1e12), lambda _, to: Route((to,), 0.0, 1e12))
    costly = replace(free, worker_s=0.5, task_s=0.125, submit_s=8.0, arrival_s=2.0)
    whole = [Choice((), (0,))] * 4
    apart = [*whole[:1], Choice((), (1,)), *whole[:2]]
    for links, together_s, apart_s in ((free, 2.0, 2.0), (costly, 8 + 2 + 2.0, 8 + 12 + 2 + 0.75)):
        one = Problem(b.to_graph(), links, Second())
        assert simulate(one, whole).makespan_s == pytest.approx(together_s)
        # Two transfers, six tasks. The second worker is busy with its tasks until 0.5, the scheduler with the
        # first transfer until 0.25 and with the second one from 1.5 to 1.75.
        assert simulate(one, apart).makespan_s == pytest.approx(apart_s, abs=1e-9)


def test_bytes_are_those_of_the_graph_in_parts() -> None:
    for graph in MODELS.values():
        one = problem(graph, 3)
        for seed in range(4):
            strategy = random_strategy(graph, np.random.default_rng(seed), n_workers=3, most=2)
            moved = simulate(one, one.choices(strategy)).nbytes_moved
            assert moved == describe(graph, strategy).nbytes_moved


def test_what_is_found_fits_the_graph_and_is_the_fastest() -> None:
    for graph in MODELS.values():
        one = problem(graph)
        found = search(one, steps=200, seed=1)
        strategy = one.strategy(found.best.choices)
        check_strategy(strategy, graph)
        assert len(partition(graph, strategy).ops) >= len(graph.live_ops)
        assert all(found.best.makespan_s <= base.makespan_s for base in found.baselines.values())
        assert found.best.makespan_s < 0.75 * found.baselines["one device"].makespan_s
        assert found.n_proposals <= 200
        again = simulate(one, one.choices(strategy))
        assert again.makespan_s == found.best.makespan_s


def test_nothing_is_split_where_messages_cost_more() -> None:
    topology = load_topology("this-machine")
    one = Problem(mlp(), Machine.of_topology(topology), AnalyticCost())
    found = search(one, steps=200)
    assert found.best.nbytes_moved == 0
    assert {choice.workers for choice in found.best.choices} == {(0,)}


def test_baselines_are_what_their_names_say() -> None:
    one = problem(block(), 2)
    found = {name: one.strategy(choices) for name, choices in seeds(one).items()}
    kinds = {
        name: {axis for config in strategy.operators.values() for axis in config.degrees}
        for name, strategy in found.items()
    }
    assert kinds["one device"] == set()
    assert kinds["data-parallel"] == {"sample"}
    assert "contracted" not in kinds["output dimensions"]
    assert {"parameter2", "contracted"} <= kinds["Megatron-like"]
    # Columns and rows of both layers, and the heads between the products of attention.
    feed_forward = [name for name in found["Megatron-like"].operators if name.startswith("matmul")][-2:]
    axes = [set(found["Megatron-like"].operators[name].degrees) for name in feed_forward]
    assert axes == [{"parameter2"}, {"contracted"}]


def test_budgets_are_at_least_one_and_end_the_search() -> None:
    one = problem(mlp(), 2)
    with pytest.raises(UsageError, match="steps must be at least 1, got 0"):
        search(one, steps=0)
    with pytest.raises(UsageError, match="chains must be at least 1, got 0"):
        search(one, steps=1, chains=0)
    assert search(one, steps=1).n_proposals == 1


def test_a_budget_in_time_has_shares_for_both_descents() -> None:
    one, part, asked = problem(cnn()), [0.0], []

    def chains(_: Problem, walks: Sequence[Chain], is_over: Callable[[], bool]) -> list[Ended]:
        for now in (1 / 8, 6 / 8, 7 / 8):
            part[0] = now
            asked.append(is_over())
        part[0] = after_chains
        return [(walks[0].start, 0)]

    spans = {}
    for at_first, after_chains in ((1 / 8, 1.0), (1 / 8, 7 / 8), (0.0, 1.0)):
        part[0] = at_first
        found = search(one, steps=ENDLESS, spent=lambda: part[0], run_chains=chains)
        spans[at_first, after_chains] = found.best.makespan_s
        fastest_s = min(base.makespan_s for base in found.baselines.values())
    # The chains add nothing here: without time for a descent, the fastest baseline remains.
    assert spans[1 / 8, 1.0] == fastest_s
    assert spans[1 / 8, 7 / 8] == spans[0.0, 1.0] < fastest_s
    assert asked == 3 * [False, False, True]


@pytest.mark.parametrize("ticks", [80, 800])
def test_a_clock_ends_a_search(ticks: int) -> None:
    # The clock ticks once for each strategy that is simulated.
    clock = count()
    found = search(problem(cnn()), steps=ENDLESS, spent=time_spent(ticks, lambda: float(next(clock))))
    assert 0.7 * ticks < found.n_proposals < ticks


def test_candidates_fit_the_operators() -> None:
    for graph in (cnn(), block()):
        one = problem(graph, 3)
        for node in one.changeable:
            for choice in neighbours(one, node):
                choices = [Choice((), (0,))] * one.n_nodes
                choices[node] = choice
                check_strategy(one.strategy(choices), graph)
