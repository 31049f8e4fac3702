"""Which ops are shipped together, so that the predicted makespan is least.

A Dask task costs about a millisecond, whatever it does. A bundle is some ops of a graph that run one after
another as one task; what they hand to each other never leaves it. How a graph is cut: see `cut`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ferroflow_dask.cost import ClusterProfile
from ferroflow_dask.graph.ir import Graph, Op, TensorSpec
from ferroflow_dask.lowering.cut import GUESS, MEMORY_SHARE, best_cut
from ferroflow_dask.lowering.predict import Cut, Prediction, Work
from ferroflow_dask.lowering.tasks import exported


@dataclass(frozen=True, slots=True)
class Bundling:
    """A graph cut into bundles.

    Parameters
    ----------
    bundles : tuple of tuple of Op
        The ops that run as one task each, in order; the tasks in an order in which they can run.
    prediction : Prediction
    costs_s : mapping of int to float
        What each op was taken to last, by id [s]: known or guessed.
    """

    bundles: tuple[tuple[Op, ...], ...]
    prediction: Prediction
    costs_s: Mapping[int, float]


def bundle(graph: Graph, costs: Mapping[int, float], cluster: ClusterProfile) -> Bundling:
    """Cut a graph into bundles for a cluster; O(ops · log ops).

    Parameters
    ----------
    graph : Graph
    costs : mapping of int to float
        Expected duration of ops by id [s]; where one is missing, so many bundles of decreasing sizes are
        made that stealing can correct what the guess gets wrong.
    cluster : ClusterProfile
    """
    known = [costs[op.id] for op in graph.live_ops if op.id in costs]
    guess_s = fmean(known) if known else GUESS * cluster.task_s
    filled = {op.id: costs.get(op.id, guess_s) for op in graph.live_ops}
    is_guess = len(known) < len(graph.live_ops)
    ops = graph.live_ops
    work = Work(
        graph.live_edges,
        [filled[op.id] for op in ops],
        lambda i: sum(graph.spec(value).nbytes or 0 for value in ops[i].outputs if value),
    )
    most_nbytes = MEMORY_SHARE * cluster.memory_nbytes
    may_not_fit = bool(cluster.memory_nbytes) and _total_nbytes(graph) > most_nbytes
    cut, prediction = best_cut(
        work, cluster, is_guess, lambda cut: not may_not_fit or _fits(graph, cut, most_nbytes)
    )
    bundles = tuple(tuple(ops[i] for i in positions) for positions in cut)
    return Bundling(bundles, prediction, filled)


def _total_nbytes(graph: Graph) -> int:
    """Return the bytes of all values together; those of unknown size count as nothing [B]."""
    specs = Counter((spec.dtype, spec.shape) for spec in graph.specs.values())
    made = sum(n * (TensorSpec(dtype, shape).nbytes or 0) for (dtype, shape), n in specs.items())
    return made + sum(source.spec.nbytes or 0 for source in graph.sources)


def _fits(graph: Graph, cut: Cut, most: float) -> bool:
    """Return whether no bundle of several ops needs more bytes than `most`."""
    ops = graph.live_ops
    nbytes = {value: graph.spec(value).nbytes or 0 for op in ops for value in (*op.operands, *op.outputs)}
    kept = exported(graph, [[ops[i] for i in positions] for positions in cut])
    return all(
        len(positions) == 1 or _peak_nbytes([ops[i] for i in positions], nbytes, kept) <= most
        for positions in cut
    )


def _peak_nbytes(ops: Sequence[Op], nbytes: Mapping[str, int], kept: Collection[str]) -> int:
    """Return the most bytes of values that a bundle holds at a time, all that others read among them [B]."""
    last_read = {value: at for at, op in enumerate(ops) for value in op.operands}
    inside = {value for op in ops for value in op.outputs}
    held = peak = sum(nbytes[value] for value in last_read if value not in inside)
    for at, op in enumerate(ops):
        held += sum(nbytes[value] for value in op.outputs)
        peak = max(peak, held)
        for value in set(op.operands):
            if last_read[value] == at and value in inside and value not in kept:
                held -= nbytes[value]
    return peak
