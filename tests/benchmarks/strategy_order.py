"""Order of strategies by predicted and by measured time, with parts that sleep."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from found_strategies import numbered, searched, sleeping

from ferroflow_dask.bench.markdown import table
from ferroflow_dask.graph import Graph, random_inputs
from ferroflow_dask.model import Model
from ferroflow_dask.search import Problem, Simulation, simulate
from ferroflow_dask.search.candidates import random_choice
from ferroflow_dask.strategy import partition

#: Random strategies to choose from, and how many times slower than the fastest one they may be.
_RANDOM, _SLOWEST = 200, 4.0


@dataclass(slots=True)
class Ordered:
    """Strategies of a model by predicted and by measured time.

    Parameters
    ----------
    model : str
    predicted_s : list of float
        Of each strategy, ascending [s].
    seconds : list of list of float
        Durations of its runs [s].
    """

    model: str
    predicted_s: list[float]
    seconds: list[list[float]] = field(default_factory=list)

    @property
    def measured_s(self) -> list[float]:
        """Median duration of each strategy [s]."""
        return [statistics.median(one) for one in self.seconds]

    def pairs(self) -> tuple[int, int]:
        """Return how many pairs differ by more than the noise, and how many of them are in the right order.

        A pair differs if no run of one is as fast as any run of the other.
        """
        n_apart = n_right = 0
        for a, b in combinations(range(len(self.seconds)), 2):
            if max(self.seconds[a]) < min(self.seconds[b]) or max(self.seconds[b]) < min(self.seconds[a]):
                n_apart += 1
                n_right += (self.predicted_s[a] < self.predicted_s[b]) == (
                    self.measured_s[a] < self.measured_s[b]
                )
        return n_apart, n_right

    @property
    def errors(self) -> list[float]:
        """Measured over predicted time minus 1, of each strategy."""
        pairs = zip(self.measured_s, self.predicted_s, strict=True)
        return [measured / predicted - 1 for measured, predicted in pairs]


def order(
    models: Mapping[str, Callable[[], Graph]],
    n: int,
    repeat: int,
    seconds: float,
    progress: Callable[[str], object] = lambda _: None,
) -> Iterator[Ordered]:
    """Yield for each model some strategies that take turns on two processes, with parts that sleep.

    `n` is how many strategies of each model, from the fastest to slow ones. The other parameters are those of
    `measure`.
    """
    for one in searched(models, seconds, progress):
        chosen = spread_out(one.problem, one.best, n)
        row = Ordered(one.name, [found.makespan_s for found in chosen], [[] for _ in chosen])
        inputs = random_inputs(one.graph)
        placed = []
        for found in chosen:
            strategy = one.problem.strategy(found.choices).on(numbered(one.client))
            placed.append(Model(sleeping(partition(one.graph, strategy), one.cost)).scatter(one.client))
        progress(f"{one.name}: measuring")
        for turn in range(repeat + 1):
            for spent, model in zip(row.seconds, placed, strict=True):
                elapsed_s = _elapsed_s(one.client, model.bind(inputs))
                if turn:
                    spent.append(elapsed_s)
        yield row


def _elapsed_s(client: Any, bound: Any) -> float:
    start = time.perf_counter()
    client.compute(bound).result()
    return time.perf_counter() - start


def spread_out(problem: Problem, best: Simulation, n: int) -> list[Simulation]:
    """Return strategies at equal ratios of predicted time, from the fastest one to slow ones."""
    rng = np.random.default_rng(0)
    found = [best]
    for _ in range(_RANDOM):
        choices = list(best.choices)
        share = rng.random()
        for node in problem.changeable:
            if rng.random() < share:
                choices[node] = random_choice(problem, node, rng)
        found.append(simulate(problem, choices))
    slowest_s = min(max(one.makespan_s for one in found), _SLOWEST * best.makespan_s)
    chosen: list[Simulation] = []
    for target_s in np.geomspace(best.makespan_s, slowest_s, n):
        rest = [one for one in found if all(one is not other for other in chosen)]
        chosen.append(min(rest, key=lambda one: abs(math.log(one.makespan_s / target_s))))
    return sorted(chosen, key=lambda one: one.makespan_s)


def order_table(rows: Sequence[Ordered]) -> str:
    """Return the order of strategies in markdown."""
    header = ("model", "strategies", "predicted [s]", "measured [s]", "error", "pairs apart", "in order")
    lines = []
    for row in rows:
        n_apart, n_right = row.pairs()
        errors = [
            f"{error:+.0%}" for error in (min(row.errors), statistics.median(row.errors), max(row.errors))
        ]
        lines.append(
            (
                row.model,
                str(len(row.predicted_s)),
                f"{row.predicted_s[0]:.3f}–{row.predicted_s[-1]:.3f}",
                f"{min(row.measured_s):.3f}–{max(row.measured_s):.3f}",
                " / ".join(errors),
                str(n_apart),
                str(n_right),
            )
        )
    return table(header, lines, right=header[1:])
