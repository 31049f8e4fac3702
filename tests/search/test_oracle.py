"""A bound of the makespan of all strategies, and the gap of found ones to it."""

from __future__ import annotations

import os
from itertools import product
from statistics import median

import numpy as np
import pytest
from searches import SLOW
from split_models import block

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Builder
from ferroflow_dask.search import Choice, Problem, least_makespan_s, search, simulate
from ferroflow_dask.search.candidates import degrees_of
from ferroflow_dask.simulation import Machine
from ferroflow_dask.topology import Route

#: Random graphs.
GRAPHS = int(os.environ.get("FERROFLOW_ORACLES", "6"))


def random_problem(seed: int, n_ops: tuple[int, int] = (3, 6)) -> Problem:
    """Return operators that read each other at random, on two workers with a link of random bandwidth."""
    rng = np.random.default_rng(seed)
    b = Builder("random")
    n = int(rng.integers(4, 9)) * 4
    values = [b.input("x", np.float32, (n, n))]
    for _ in range(int(rng.integers(*n_ops))):
        x, y = (values[int(i)] for i in rng.integers(max(0, len(values) - 2), len(values), size=2))
        weight = b.constant(np.zeros((n, n), np.float32))
        kind = int(rng.integers(4))
        made = [("MatMul", x, weight), ("MatMul", x, y), ("Softmax", x), ("Add", x, y)][kind]
        values.append(b.op(*made))
    b.output(*b.sinks)
    bandwidth = 10.0 ** rng.uniform(8, 10)
    links = Machine(
        (1, 1),
        (1.0, float(rng.choice([0.5, 1.0]))),
        (bandwidth,) * 2,
        lambda _, to: Route((to,), 1e-7, bandwidth),
        round_trip_s=1e-7,
    )
    return Problem(b.to_graph(), links, SLOW)


def all_strategies(problem: Problem) -> list[list[Choice]]:
    options = [
        [
            Choice(degrees, workers)
            for degrees in degrees_of(problem, node)
            for workers in product(range(2), repeat=len(problem.parts(node, degrees)))
        ]
        for node in problem.changeable
    ]
    before = [Choice((), (0,))] * problem.first
    after = [Choice((), (0,))] * (problem.n_nodes - problem.first - len(options))
    return [[*before, *chosen, *after] for chosen in product(*options)]


def test_no_strategy_beats_the_bound_and_some_reach_it() -> None:
    reached = 0
    for seed in range(12):
        one = random_problem(seed, (2, 3))
        best_s = min(simulate(one, choices).makespan_s for choices in all_strategies(one))
        least_s = least_makespan_s(one)
        assert least_s <= best_s * (1 + 1e-12)
        reached += best_s <= 1.001 * least_s
    assert reached >= 6


def test_the_gap_of_found_strategies_to_the_bound_is_small() -> None:
    gaps = []
    for seed in range(GRAPHS):
        one = random_problem(seed, (3, 5))
        found = search(one, steps=6000, seed=seed).best
        gaps.append(found.makespan_s / least_makespan_s(one) - 1)
        assert gaps[-1] >= -1e-12
    print(f"gap on {GRAPHS} random graphs: median {median(gaps):.2%}, worst {max(gaps):.2%}")
    assert median(gaps) <= 0.03
    assert max(gaps) <= 0.15


def test_larger_problems_are_refused() -> None:
    problem = Problem(block(), random_problem(0).machine, SLOW)
    with pytest.raises(UsageError, match="a bound must need at most 1,000 states, got more; use a smaller"):
        least_makespan_s(problem, most_states=1000)
