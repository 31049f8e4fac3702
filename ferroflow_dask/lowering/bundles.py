"""Which ops are shipped together, so that the predicted makespan is least.

A Dask task costs about a millisecond, whatever it does. A bundle is some ops of a graph that run one after
another as one task; what they hand to each other never leaves it. Of a few ways to cut a graph the one is
taken that `predict` finds fastest on the cluster at hand, one task for each op among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from ferroflow_dask.cost import ClusterProfile
from ferroflow_dask.graph.ir import Graph, Op, TensorSpec
from ferroflow_dask.lowering.coarse import CoarseGraph, factored, longest_first
from ferroflow_dask.lowering.predict import Prediction, predict
from ferroflow_dask.lowering.tasks import exported

#: An op of whose cost nothing is known is taken to last as long as a task costs, times this.
_GUESS = 4.0
#: Ops that last as long as the scheduler takes to feed all threads, times this, travel alone: they can be
#: stolen then, and a cost that is wrong does less harm.
_ALONE = 5.0
#: Among numbers of bundles that are as good as this, the largest is taken: it forgives errors in costs.
_SLACK = 1.05
#: A cut that comes as near to what no cut can beat is taken without a look at others.
_GOOD = 1.05
#: Part of a worker's memory that a bundle may need.
_MEMORY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Bundle:
    """Ops that run as one task, in this order.

    Parameters
    ----------
    ops : tuple of Op
    cost_s : float or None
        Expected duration [s]; None if that of some op is not known.
    """

    ops: tuple[Op, ...]
    cost_s: float | None


@dataclass(frozen=True, slots=True)
class Bundling:
    """A graph cut into bundles.

    Parameters
    ----------
    bundles : tuple of Bundle
        In an order in which they can run.
    prediction : Prediction
    costs_s : mapping of int to float
        What each op was taken to last, by id [s]: known or guessed.
    """

    bundles: tuple[Bundle, ...]
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
    guess_s = fmean(known) if known else _GUESS * cluster.task_s
    filled = {op.id: costs.get(op.id, guess_s) for op in graph.live_ops}
    is_guess = len(known) < len(graph.live_ops)
    most_nbytes = _MEMORY_SHARE * cluster.memory_nbytes
    may_not_fit = bool(cluster.memory_nbytes) and _total_nbytes(graph) > most_nbytes
    best: tuple[Cut, Prediction] | None = None
    good_s = _GOOD * _bound_s(filled.values(), cluster)
    for cut in _cuts(graph, filled, cluster, is_guess):
        # Neither is all of them predicted, nor the memory of all added up: most are out of the question.
        if best is not None and _least_s(cut, cluster) >= best[1].makespan_s:
            continue
        if may_not_fit and not _fits(graph, cut, most_nbytes):
            continue
        prediction = predict(graph, cut, filled, cluster)
        if best is None or prediction.makespan_s < best[1].makespan_s:
            best = (cut, prediction)
        if best[1].makespan_s <= good_s:
            break
    assert best is not None  # one op for each task always fits
    cut, prediction = best
    ops = graph.live_ops
    bundles = tuple(
        Bundle(
            members := tuple(ops[i] for i in positions),
            sum(costs[op.id] for op in members) if all(op.id in costs for op in members) else None,
        )
        for positions in cut
    )
    return Bundling(bundles, prediction, filled)


#: For each bundle the positions of its ops in `Graph.live_ops`.
Cut = Sequence[Sequence[int]]


def _cuts(graph: Graph, costs: Mapping[int, float], cluster: ClusterProfile, is_guess: bool) -> Iterator[Cut]:
    n_ops = len(graph.live_ops)
    coarse = CoarseGraph(graph, costs)
    coarse.reduce(partial(_pack, cluster=cluster, is_guess=is_guess))
    order = coarse.sorted_nodes()
    yield [coarse.members[node] for node in order]
    if n_ops:
        yield [list(range(n_ops))]
    yield _by_level(coarse, order, cluster, is_guess)
    yield [[i] for i in range(n_ops)]


def _bound_s(costs_s: Collection[float], cluster: ClusterProfile) -> float:
    """Return what no cut of ops of these costs is below [s]."""
    least_s = max(sum(costs_s) / cluster.n_threads, max(costs_s, default=0.0))
    return cluster.submit_s + cluster.task_s + least_s


def _least_s(cut: Cut, cluster: ClusterProfile) -> float:
    """Return what no prediction of a cut is below [s]."""
    return cluster.submit_s + len(cut) * cluster.task_s


def _pack(
    costs_s: Sequence[float], is_joined: bool, *, cluster: ClusterProfile, is_guess: bool
) -> list[list[int]]:
    """Share out siblings; `is_joined` says whether something comes before or after them."""
    alone_s = _ALONE * cluster.task_s * cluster.n_threads
    short = [i for i, cost_s in enumerate(costs_s) if cost_s < alone_s]
    alone = [[i] for i, cost_s in enumerate(costs_s) if cost_s >= alone_s]
    if not short:
        return alone
    short_s = [costs_s[i] for i in short]
    n_bundles = _n_bundles(short_s, is_joined and not alone, cluster)
    if is_guess and n_bundles > 1:
        packed = factored(len(short), cluster.n_threads)
    else:
        packed = longest_first(short_s, n_bundles)
    return alone + [[short[i] for i in items] for items in packed]


def _n_bundles(costs_s: Sequence[float], is_joined: bool, cluster: ClusterProfile) -> int:
    """Return how many bundles are best: more share the work among threads, and each costs a task."""
    work_s, longest_s = sum(costs_s), max(costs_s)
    numbers = range(1, min(len(costs_s), cluster.n_threads) + 1)

    def makespan_s(n: int) -> float:
        # One bundle can be fused with its surroundings; several have to be waited for.
        apart_s = cluster.round_trip_s if n > 1 and is_joined else 0.0
        return max(longest_s, work_s / n) + n * cluster.task_s + apart_s

    times_s = [makespan_s(n) for n in numbers]
    good_s = _SLACK * min(times_s)
    return next(n for n in reversed(numbers) if times_s[n - 1] <= good_s)


def _by_level(coarse: CoarseGraph, order: Sequence[int], cluster: ClusterProfile, is_guess: bool) -> Cut:
    """Pack the nodes of each level, whatever they wait for: right where everything waits for everything."""
    level: dict[int, int] = {}
    levels: list[list[int]] = []
    for node in order:
        level[node] = 1 + max((level[earlier] for earlier in coarse.before[node]), default=-1)
        if level[node] == len(levels):
            levels.append([])
        levels[level[node]].append(node)
    cut = []
    for nodes in levels:
        costs_s = [coarse.cost_s[node] for node in nodes]
        groups = [[i] for i in range(len(nodes))]
        if not coarse.are_packed(nodes):
            groups = _pack(costs_s, len(levels) > 1, cluster=cluster, is_guess=is_guess)
        cut += [sorted(p for i in items for p in coarse.members[nodes[i]]) for items in groups]
    return cut


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
