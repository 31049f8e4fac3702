"""Strategies of a training iteration to start from, and sizes of a simulated one."""

from __future__ import annotations

from collections.abc import Sequence

from ferroflow_dask.search.candidates import spread
from ferroflow_dask.search.problem import Choice, Degrees, Problem
from ferroflow_dask.search.timeline import Simulation
from ferroflow_dask.search.training import TrainingProblem
from ferroflow_dask.strategy.spaces import Axis


def least_traffic(problem: TrainingProblem) -> list[Choice]:
    """Return all operators on all workers, each split so that the busiest link is busy for the least time.

    Samples, a part of the weights, or both are split. That generalises A. Krizhevsky, "One weird trick for
    parallelizing convolutional neural networks", 2014.
    """
    n = len(problem.machine.threads)
    choices = [Choice((), (0,))] * problem.n_nodes
    for first, nodes in problem.groups.items():
        options = [spread(problem, degrees) for degrees in _both_ways(problem, first, n) or [()]]
        costs = [_busiest_s(problem, nodes, choice, choices) for choice in options]
        best = options[costs.index(min(costs))]
        for node in nodes:
            choices[node] = best
    return choices


def _both_ways(problem: TrainingProblem, node: int, n: int) -> list[Degrees]:
    """Return the degrees that split samples and one dimension of weights into as many parts as workers."""
    op = problem.op(node)
    space = "" if op is None else problem.spaces[op.name]
    axes = [] if isinstance(space, str) else list(space.axes)
    samples = next((axis.size for axis in axes if axis.name == "sample"), 1)
    others: list[Axis | None] = [axis for axis in axes if axis.name.startswith("parameter")]
    options = []
    for other in others or [None]:
        inside = 1
        while inside <= n:
            if not n % inside and n // inside <= samples and inside <= (1 if other is None else other.size):
                found = {"sample": n // inside, **({} if other is None else {other.name: inside})}
                options.append(tuple(sorted((axis, degree) for axis, degree in found.items() if degree > 1)))
            inside *= 2
    return options


def _busiest_s(problem: TrainingProblem, nodes: list[int], choice: Choice, before: list[Choice]) -> float:
    """Return how long a choice keeps the busiest link busy: values, gradients and weights [s]."""
    machine = problem.machine
    busy_s: dict[int, float] = {}

    def send(source: int, destination: int, nbytes: float) -> None:
        if source != destination:
            for link in machine.route(source, destination).links:
                busy_s[link] = busy_s.get(link, 0.0) + nbytes / machine.bandwidths[link]

    for node in nodes:
        for producer in problem.values[node]:
            made = before[producer]
            table = problem.table(producer, made.degrees, node, choice.degrees)
            for home, reads in zip(made.workers, table.reads, strict=True):
                for part, _, nbytes in reads:
                    send(home, choice.workers[part], nbytes)
                    send(choice.workers[part], home, nbytes)
    for holders, size in problem.shards(nodes[0], choice.degrees):
        for holder in holders[1:]:
            send(choice.workers[holder], choice.workers[holders[0]], size)
            send(choice.workers[holders[0]], choice.workers[holder], size)
    return max(busy_s.values(), default=0.0)


def compute_s(problem: Problem, found: Simulation) -> float:
    """Return the time that all parts take together, without transfers [s]."""
    speeds = problem.machine.speeds
    return sum(
        seconds / speeds[worker]
        for choice, durations in zip(found.choices, found.durations_s, strict=True)
        for worker, seconds in zip(choice.workers, durations, strict=True)
    )


def nbytes_between(problem: Problem, found: Simulation, places: Sequence[int]) -> int:
    """Return the size of all transfers between different places, such as hosts [B].

    Parameters
    ----------
    problem : Problem
    found : Simulation
    places : sequence of int
        Of each worker.
    """
    total = 0
    for node, choice in enumerate(found.choices):
        for part, home in enumerate(choice.workers):
            sent = {
                (found.choices[reader].workers[taker], region): nbytes
                for reader in problem.consumers[node]
                for taker, region, nbytes in found.tables[reader][node].reads[part]
            }
            total += sum(nbytes for (to, _), nbytes in sent.items() if places[to] != places[home])
    return total
