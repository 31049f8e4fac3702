"""Search of strategies: Markov chain Monte Carlo, then a greedy descent; an exact search of small graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.search.candidates import neighbours, random_choice, seeds
from ferroflow_dask.search.problem import Choice, Problem
from ferroflow_dask.search.timeline import Simulation, simulate, simulate_change

#: A proposal that is slower by this part of the makespan is accepted once in e times.
_TEMPERATURE = 0.02
#: Strategies that an exact search may have to look at.
_MOST_EXACT = 200_000


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Parameters
    ----------
    best : Simulation
    baselines : dict of str to Simulation
        Strategies that the search started from.
    n_proposals : int
        Strategies that were simulated.
    """

    best: Simulation
    baselines: dict[str, Simulation] = field(default_factory=dict)
    n_proposals: int = 0


def search(
    problem: Problem,
    *,
    steps: int,
    seed: int = 0,
    more: Mapping[str, list[Choice]] | None = None,
    is_over: Callable[[], bool] = lambda: False,
    watch: Callable[[int, float], object] = lambda _steps, _best_s: None,
) -> Found:
    """Return the fastest strategy that was found.

    Chains start from the fastest baselines. A proposal replaces the choice of a random operator. It is
    accepted with the probability of Metropolis et al. (1953). A greedy descent follows.

    Parameters
    ----------
    problem : Problem
    steps : int
        Strategies to simulate at most, the descent among them.
    seed : int, optional
        Of the random numbers.
    more : mapping of str to list of Choice, optional
        Baselines besides those of `candidates.seeds`: the choice of each node.
    is_over : callable, optional
        Returns whether the search must end.
    watch : callable, optional
        Called with the number of steps and the makespan of the best strategy so far [s].

    Raises
    ------
    UsageError
        `steps` is less than 1.
    """
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
    rng = np.random.default_rng(seed)
    baselines = {
        name: simulate(problem, choices) for name, choices in {**seeds(problem), **(more or {})}.items()
    }
    best = min(baselines.values(), key=lambda one: one.makespan_s)
    # A quarter of the steps for the descents before and after the chains.
    best, n = _descended(problem, best, steps // 8, is_over)
    chains = sorted([best, *baselines.values()], key=lambda one: one.makespan_s)[:3]
    for i, start in enumerate(chains):
        until = steps * 7 // 8 if i == len(chains) - 1 else n + (steps * 7 // 8 - n) // (len(chains) - i)
        current = start
        while n < until and not is_over():
            n += 1
            node = int(rng.integers(problem.changeable.start, problem.changeable.stop))
            choice = random_choice(problem, node, rng)
            if choice == current.choices[node]:
                continue
            proposed = simulate_change(problem, current, node, choice)
            worse_s = proposed.makespan_s - current.makespan_s
            if worse_s <= 0 or rng.random() < math.exp(-worse_s / (_TEMPERATURE * best.makespan_s)):
                current = proposed
            if current.makespan_s < best.makespan_s:
                best = current
            watch(n, best.makespan_s)
    best, n_more = _descended(problem, best, steps - n, is_over)
    watch(n + n_more, best.makespan_s)
    return Found(best, baselines, n + n_more)


def _descended(
    problem: Problem, start: Simulation, steps: int, is_over: Callable[[], bool]
) -> tuple[Simulation, int]:
    """Return the end of a greedy descent, and the number of strategies that it simulated."""
    best, n, is_better = start, 0, True
    while is_better:
        is_better = False
        for node in problem.changeable:
            for choice in neighbours(problem, node):
                if n >= steps or is_over():
                    return best, n
                if choice == best.choices[node]:
                    continue
                n += 1
                found = simulate_change(problem, best, node, choice)
                if found.makespan_s < best.makespan_s:
                    best, is_better = found, True
    return best, n


def search_exactly(problem: Problem) -> Simulation:
    """Return the fastest of all strategies that a descent could reach: an oracle for small graphs.

    Raises
    ------
    UsageError
        There are too many.
    """
    options = [list(neighbours(problem, node)) for node in problem.changeable]
    n = math.prod(map(len, options))
    if n > _MOST_EXACT:
        raise UsageError(f"an exact search must have at most {_MOST_EXACT:,} strategies, got {n:,}")
    return min(_all(problem, options), key=lambda one: one.makespan_s)


def _all(problem: Problem, options: list[list[Choice]]) -> Iterator[Simulation]:
    for choices in product(*options):
        found = [Choice((), (0,))] * problem.n_nodes
        for node, choice in zip(problem.changeable, choices, strict=True):
            found[node] = choice
        yield simulate(problem, found)
