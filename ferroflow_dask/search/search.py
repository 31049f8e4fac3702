"""Search of strategies: Markov chain Monte Carlo, then a greedy descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np

from ferroflow_dask.exceptions import StrategyError, UsageError
from ferroflow_dask.search.candidates import neighbours, random_choice, seeds
from ferroflow_dask.search.problem import Choice, Problem
from ferroflow_dask.search.timeline import Simulation, simulate, simulate_change

#: A proposal that is slower by this part of the makespan is accepted once in e times.
_TEMPERATURE = 0.02
#: Chains of a search.
_CHAINS = 3
#: More steps than any budget in seconds allows.
ENDLESS = 10**9
#: Part of a budget, in steps or in time, that each descent may use. The one before the chains must leave time
#: for them. The one after them takes back what random changes made worse.
_DESCENT = 1 / 8
#: Part of the proposals that change two operators: a better split of one often needs that of another one.
_TWO = 0.25
_WHOLE = Choice((), (0,))
#: After the name of a baseline whose results are computed twice, since it does not fit otherwise.
RECOMPUTED = ", recomputed"
#: Proposals of a chain before the next chain has its turn.
_SLICE = 32


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


@dataclass(frozen=True, slots=True)
class Chain:
    """A Markov chain of strategies.

    Parameters
    ----------
    start : list of Choice
        Of each node.
    steps : int
        Strategies to propose.
    seed : tuple of int
        Of the random numbers.
    """

    start: list[Choice]
    steps: int
    seed: tuple[int, ...]


#: Best choices of a chain, and the number of strategies that it proposed.
Ended = tuple[list[Choice], int]
#: Runs chains until they end or a function returns that they must.
RunChains = Callable[[Problem, Sequence[Chain], Callable[[], bool]], Iterable[Ended]]


def search(
    problem: Problem,
    *,
    steps: int,
    seed: int = 0,
    chains: int = _CHAINS,
    more: Mapping[str, list[Choice]] | None = None,
    spent: Callable[[], float] = lambda: 0.0,
    watch: Callable[[int, float], object] = lambda _steps, _best_s: None,
    run_chains: RunChains | None = None,
    must_fit: bool = True,
) -> Found:
    """Return the fastest strategy that was found.

    Chains start from the fastest baselines. A proposal replaces the choice of a random operator, or of two.
    It is accepted with the probability of Metropolis et al. (1953). A greedy descent follows. Each chain has
    random numbers of its own, so it does not matter in which order or process the chains run.

    Parameters
    ----------
    problem : Problem
    steps : int
        Strategies to simulate at most, the descent among them.
    seed : int, optional
        Of the random numbers.
    chains : int, optional
        Number of Markov chains.
    more : mapping of str to list of Choice, optional
        Baselines besides those of `candidates.seeds`: the choice of each node.
    spent : callable, optional
        Returns which part of a further budget is spent, as that of `time_spent`. The first descent ends at an
        eighth of both budgets, the chains at seven eighths, and the search at 1.
    watch : callable, optional
        Called with the number of steps and the makespan of the best strategy so far [s].
    run_chains : callable, optional
        Runs chains elsewhere, as `deploy.searching.in_processes` does. By default they take turns here.
    must_fit : bool, optional
        Whether to raise if nothing fits the memory of the workers.

    Raises
    ------
    UsageError
        `steps` or `chains` is less than 1.
    StrategyError
        No strategy was found that fits the memory of the workers.
    """
    for name, value in (("steps", steps), ("chains", chains)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    baselines = _baselines(problem, more or {})
    best = with_less_computed_twice(problem, min(baselines.values(), key=rank))
    others = [one.choices for one in baselines.values()]
    best, n = _descended(problem, best, others, int(_DESCENT * steps), lambda: spent() >= _DESCENT)
    starts = sorted([best, *baselines.values()], key=rank)[:_CHAINS]
    share = (int((1 - _DESCENT) * steps) - n) // chains
    walks = [Chain(starts[i % len(starts)].choices, share, (seed, i)) for i in range(chains)]
    before = n
    run = run_chains or partial(_in_turn, watch=lambda more, best_s: watch(before + more, best_s))
    for choices, n_chain in run(problem, walks, lambda: spent() >= 1 - _DESCENT):
        n += n_chain
        found = simulate(problem, choices)
        best = min(best, found, key=rank)
        watch(n, best.makespan_s)
    best, n_more = _descended(problem, best, others, steps - n, lambda: spent() >= 1)
    watch(n + n_more, best.makespan_s)
    if best.excess_nbytes and must_fit:
        raise StrategyError(
            f"no strategy was found whose {problem.held} fit: {best.excess_nbytes:,} B are too much for the "
            f"memory of {len(problem.machine.threads)} workers; use more workers, or larger ones"
        )
    return Found(best, baselines, n + n_more)


def _baselines(problem: Problem, more: Mapping[str, list[Choice]]) -> dict[str, Simulation]:
    """Return the simulated baselines; those that do not fit also with most results computed twice.

    Of n operators, each √n-th one keeps its results: T. Chen et al., "Training Deep Nets with Sublinear
    Memory Cost", 2016.
    """
    step = max(1, round(math.sqrt(len(problem.leading))))
    leading = problem.leading[step - 1 :: step]
    kept = {one for node in leading for one in (node, *problem.following(node, _WHOLE))}
    found = {name: simulate(problem, choices) for name, choices in {**seeds(problem), **more}.items()}
    too_large = [(name, one.choices) for name, one in found.items() if one.excess_nbytes]
    for name, choices in too_large if problem.may_recompute else ():
        again = [choice._replace(recompute=node not in kept) for node, choice in enumerate(choices)]
        found[name + RECOMPUTED] = simulate(problem, again)
    return found


def with_less_computed_twice(problem: Problem, one: Simulation) -> Simulation:
    """Return a strategy that keeps further results, from the longest operators on, while they fit."""
    twice = [node for node in problem.leading if one.choices[node].recompute]
    if one.excess_nbytes or not twice:
        return one
    choices = list(one.choices)
    for node in sorted(twice, key=lambda node: -sum(problem.durations_s(node, choices[node]))):
        kept = choices[node]._replace(recompute=False)
        changed = list(choices)
        for there, choice in {node: kept, **problem.following(node, kept)}.items():
            changed[there] = choice
        if not problem.excess_nbytes(changed):
            choices = changed
    return simulate(problem, choices)


def rank(one: Simulation) -> tuple[int, float, int]:
    """Return what a search minimises: what does not fit, then the makespan, then second forward passes."""
    return one.excess_nbytes, one.makespan_s, sum(choice.recompute for choice in one.choices)


def time_spent(seconds: float, clock: Callable[[], float]) -> Callable[[], float]:
    """Return a function that returns which part of some seconds is over, counted from now on a clock."""
    start_s = clock()
    return lambda: (clock() - start_s) / seconds


def walk(problem: Problem, chain: Chain) -> Iterator[Simulation]:
    """Yield the best strategy so far, after each proposal of a chain."""
    rng = np.random.default_rng(chain.seed)
    current = best = simulate(problem, chain.start)
    for _ in range(chain.steps):
        proposed = current
        for _ in range(2 if rng.random() < _TWO else 1):
            node = problem.leading[int(rng.integers(len(problem.leading)))]
            choice = random_choice(problem, node, rng)
            if problem.may_recompute and (proposed.excess_nbytes or proposed.choices[node].recompute):
                choice = choice._replace(recompute=bool(rng.integers(2)))
            if choice != proposed.choices[node]:
                proposed = simulate_change(problem, proposed, node, choice)
        if proposed is not current:
            worse_s = proposed.cost_s - current.cost_s
            if worse_s <= 0 or rng.random() < math.exp(-worse_s / (_TEMPERATURE * best.makespan_s)):
                current = proposed
            if rank(current) < rank(best):
                best = current
        yield best


def run_chain(problem: Problem, chain: Chain, is_over: Callable[[], bool]) -> Ended:
    """Run a chain to its end, or until the search must end."""
    choices, n = chain.start, 0
    for best in walk(problem, chain):
        choices, n = best.choices, n + 1
        if is_over():
            break
    return choices, n


def _in_turn(
    problem: Problem,
    chains: Sequence[Chain],
    is_over: Callable[[], bool],
    watch: Callable[[int, float], object],
) -> list[Ended]:
    """Run some proposals of each chain, then of the next one: each gets its share of the time."""
    walks = dict(enumerate(walk(problem, chain) for chain in chains))
    choices, steps = [chain.start for chain in chains], [0] * len(chains)
    best_s = math.inf
    while walks and not is_over():
        for i, one in list(walks.items()):
            for best in islice(one, _SLICE):
                choices[i], steps[i] = best.choices, steps[i] + 1
                best_s = min(best_s, best.makespan_s)
                watch(sum(steps), best_s)
                if is_over():
                    break
            if steps[i] >= chains[i].steps:
                del walks[i]
    return list(zip(choices, steps, strict=True))


def _descended(
    problem: Problem,
    start: Simulation,
    others: Sequence[list[Choice]],
    steps: int,
    is_over: Callable[[], bool],
) -> tuple[Simulation, int]:
    """Return the end of a greedy descent, and the number of strategies that it simulated.

    For each operator, it also tries the choices that other strategies have for it.
    """
    best, n, is_better = start, 0, True
    while is_better:
        is_better = False
        for node in problem.leading:
            options = [*(other[node] for other in others), *neighbours(problem, node)]
            now = best.choices[node]
            if problem.may_recompute and (best.excess_nbytes or now.recompute):
                options.insert(0, now._replace(recompute=not now.recompute))
            for choice in dict.fromkeys(options):
                if n >= steps or is_over():
                    return best, n
                if choice == best.choices[node]:
                    continue
                n += 1
                found = simulate_change(problem, best, node, choice)
                if rank(found) < rank(best):
                    best, is_better = found, True
    return best, n
