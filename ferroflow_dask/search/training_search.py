"""Search of a training strategy together with the number of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ferroflow_dask.search.problem import Choice
from ferroflow_dask.search.search import Found, rank, search
from ferroflow_dask.search.timeline import simulate
from ferroflow_dask.search.training import TrainingProblem


def search_training(
    make: Callable[[int, int], TrainingProblem],
    *,
    steps: int,
    most: int = 1,
    more: Callable[[TrainingProblem], Mapping[str, list[Choice]]] = lambda _: {},
    spent: Callable[[], float] = lambda: 0.0,
) -> tuple[TrainingProblem, Found]:
    """Return the fastest strategy that was found, and the problem with its microbatches.

    Half of the budget is for one microbatch. Its result and the baselines are then simulated with all numbers
    of microbatches. The other half continues with the fastest number.

    Parameters
    ----------
    make : callable
        Returns the problem with a number of microbatches, and how many of them are in flight.
    steps : int
        As for `search`.
    most : int, optional
        Most microbatches.
    more : callable, optional
        Returns baselines of a problem, as for `search`.
    spent : callable, optional
        As for `search`.

    Raises
    ------
    StrategyError
        No strategy was found that fits the memory of the devices.
    """
    problem = make(1, 1)
    if most == 1:
        return problem, search(problem, steps=steps, more=more(problem), spent=spent)
    half = max(1, steps // 2)
    first = search(problem, steps=half, more=more(problem), spent=lambda: 2 * spent(), must_fit=False)
    starts = [one.choices for one in (first.best, *first.baselines.values())]
    names = [problem.named(choices) for choices in starts]
    problems = [problem, *(make(*option) for option in _options(most))]
    chosen = min(problems, key=lambda one: min(rank(simulate(one, one.of_names(name))) for name in names))
    known = {**more(chosen), "one microbatch": chosen.of_names(problem.named(first.best.choices))}
    found = search(chosen, steps=half, more=known, spent=lambda: 2 * spent() - 1)
    return chosen, Found(found.best, first.baselines, first.n_proposals + found.n_proposals)


def _options(most: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of microbatches above 1, and how many of them are in flight: powers of two."""
    microbatches = 2
    while microbatches <= most:
        yield from ((microbatches, 2**i) for i in range(microbatches.bit_length()))
        microbatches *= 2
