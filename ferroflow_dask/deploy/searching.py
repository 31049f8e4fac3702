"""Searches of strategies on this machine: chains in processes, and the placement `auto` as a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import cloudpickle

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.lowering.bundles import AUTO, bundle
from ferroflow_dask.search import Choice, Problem
from ferroflow_dask.search.candidates import degrees_of
from ferroflow_dask.search.search import Chain, Ended, RunChains, run_chain
from ferroflow_dask.simulation import TaskGraph, run_listed


def auto_choices(problem: Problem, profile: ClusterProfile) -> list[Choice]:
    """Return the choice of each node that `granularity="auto"` amounts to.

    The bundles are those that `bind` would make. A list schedule stands for the scheduler.

    Parameters
    ----------
    problem : Problem
    profile : ClusterProfile
        Of the machine of the problem.
    """
    nodes = dict(zip((op.id for op in problem.ops), problem.changeable, strict=True))
    costs = {op: problem.base_s(node, ())[0] for op, node in nodes.items()}
    bundles = bundle(problem.graph, costs, profile, AUTO).bundles
    number = {op.id: i for i, ops in enumerate(bundles) for op in ops}
    inputs: list[dict[int, int]] = [{} for _ in bundles]
    for i, ops in enumerate(bundles):
        for one in ops:
            for producer in problem.values[nodes[one.id]]:
                made = problem.op(producer)
                if made is not None and number[made.id] != i:
                    (reads,) = problem.table(producer, (), nodes[one.id], ()).reads
                    inputs[i].setdefault(number[made.id], 0)
                    inputs[i][number[made.id]] += sum(size for _, _, size in reads)
    durations_s = [sum(costs[op.id] for op in ops) for ops in bundles]
    placed = run_listed(TaskGraph(durations_s, inputs), problem.machine).workers
    choices = [Choice((), (0,))] * problem.n_nodes
    for op, node in nodes.items():
        choices[node] = Choice((), (placed[number[op]],))
    return choices


def in_processes(n: int) -> RunChains:
    """Return a function that runs chains in processes, for `search`.

    The results are those of one process. Each process gets a copy of the graph.

    Parameters
    ----------
    n : int
        Number of processes.
    """

    def run(problem: Problem, chains: Sequence[Chain], is_over: Callable[[], bool]) -> Iterator[Ended]:
        # A budget in time goes there, too: all processes of a machine have one monotonic clock.
        packed = cloudpickle.dumps((_without_costs(problem), is_over))
        with ProcessPoolExecutor(min(n, len(chains)), get_context("spawn")) as pool:
            tasks = [pool.submit(_run, packed, chain) for chain in chains]
            yield from (task.result() for task in tasks)

    return run


def _without_costs(problem: Problem) -> Problem:
    """Return a problem that knows all durations that a chain may ask for: clients stay here."""
    for node in problem.changeable:
        for degrees in degrees_of(problem, node):
            problem.base_s(node, degrees)
    return problem.with_cost(AnalyticCost())


def _run(packed: bytes, chain: Chain) -> Ended:
    problem, is_over = cloudpickle.loads(packed)
    return run_chain(problem, chain, is_over)
