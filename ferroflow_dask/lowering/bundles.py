"""Which ops are shipped together, so that the predicted makespan is least: all, some, or each alone.

A Dask task costs about a millisecond, whatever it does. A bundle is some ops of a graph that run one after
another as one task; what they hand to each other never leaves it. How a graph is cut: see `cut`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from ferroflow_dask.bundling.cut import GUESS, MEMORY_SHARE, best_cut
from ferroflow_dask.bundling.predict import Cut, Prediction, Work, predict
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.exceptions import UnknownNameError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op, TensorSpec
from ferroflow_dask.lowering.tasks import exported

#: All ops as one piece of work, in one session where a provider has such; in bundles; or each by itself.
GRANULARITIES = ("whole", "bundles", "ops")
#: The one that is predicted to be fastest.
AUTO = "auto"
#: A graph stays whole where that is predicted to take at most this times as long as in pieces: a session
#: fuses ops, of which a prediction knows nothing.
_WHOLE_IF_WITHIN = 1.05


@dataclass(frozen=True, slots=True)
class Bundling:
    """A graph cut into tasks.

    Parameters
    ----------
    bundles : tuple of tuple of Op
        The ops that run as one task each, in order; the tasks in an order in which they can run.
    granularity : str
        Of `GRANULARITIES`.
    predictions : mapping of str to Prediction
        Of that granularity, and of others that were considered.
    costs_s : mapping of int to float
        What each op was taken to last, by id [s]: known or guessed.
    """

    bundles: tuple[tuple[Op, ...], ...]
    granularity: str
    predictions: Mapping[str, Prediction]
    costs_s: Mapping[int, float]

    @property
    def prediction(self) -> Prediction:
        """What should happen."""
        return self.predictions[self.granularity]


def bundle(
    graph: Graph, costs: Mapping[int, float], cluster: ClusterProfile, granularity: str = "bundles"
) -> Bundling:
    """Cut a graph into tasks for a cluster; O(ops · log ops).

    Parameters
    ----------
    graph : Graph
    costs : mapping of int to float
        Expected duration of ops by id [s]; where one is missing, so many bundles of decreasing sizes are
        made that stealing can correct what the guess gets wrong.
    cluster : ClusterProfile
    granularity : str, optional
        Of `GRANULARITIES`, or `auto`.

    Raises
    ------
    UnknownNameError
        There is no such granularity.
    """
    check_granularity(granularity)
    work, fits, is_guess = _work(graph, costs, cluster)
    n_ops = len(graph.live_ops)
    whole: Cut = [list(range(n_ops))] if n_ops else []
    cuts: dict[str, tuple[Cut, Prediction]] = {}
    if granularity == "whole" or (granularity == AUTO and is_for_sessions(graph) and fits(whole)):
        cuts["whole"] = whole, predict(work, whole, cluster)
    if granularity in (AUTO, "bundles"):
        cuts["bundles"] = best_cut(work, cluster, is_guess, fits)
    if granularity == "ops":
        every: Cut = [[i] for i in range(n_ops)]
        cuts["ops"] = every, predict(work, every, cluster)
    predictions = {name: prediction for name, (_, prediction) in cuts.items()}
    chosen = _fastest(predictions)
    bundles = tuple(tuple(graph.live_ops[i] for i in positions) for positions in cuts[chosen][0])
    filled = {op.id: cost_s for op, cost_s in zip(graph.live_ops, work.costs_s, strict=True)}
    return Bundling(bundles, chosen, predictions, filled)


def predictions_of(
    graph: Graph, costs: Mapping[int, float], cluster: ClusterProfile
) -> dict[str, Prediction]:
    """Return what should happen under each granularity; the parameters are those of `bundle`."""
    found: dict[str, Prediction] = {}
    for granularity in GRANULARITIES:
        found.update(bundle(graph, costs, cluster, granularity).predictions)
    return found


def check_granularity(granularity: str) -> None:
    """Raise for what is none of `GRANULARITIES`, nor `auto`."""
    if granularity not in (AUTO, *GRANULARITIES):
        raise UnknownNameError.of("granularity", granularity, (AUTO, *GRANULARITIES))


def default_granularity(graph: Graph, has_profile: bool, has_gpu_costs: bool) -> str | None:
    """Return the granularity where the caller names none.

    Without a measured cluster, one session is nearly always the fastest. Where ops have costs on GPUs, each
    runs where it ends first. A graph without inputs would be computed when its session is opened.

    Parameters
    ----------
    graph : Graph
    has_profile : bool
        Whether the cluster was measured.
    has_gpu_costs : bool
        Whether costs of ops on GPUs are known.
    """
    if has_gpu_costs or not (graph.inputs and is_for_sessions(graph)):
        return None
    return AUTO if has_profile else "whole"


def is_for_sessions(graph: Graph) -> bool:
    """Return whether all ops are of ONNX's kind; ferroflow's own are run one by one anyway."""
    return all(op.domain != FERROFLOW_DOMAIN for op in graph.live_ops)


def _fastest(predictions: Mapping[str, Prediction]) -> str:
    whole, bundles = predictions.get("whole"), predictions.get("bundles")
    if whole is not None and bundles is not None:
        is_as_fast = whole.makespan_s <= _WHOLE_IF_WITHIN * bundles.makespan_s
        return "whole" if is_as_fast else "bundles"
    return next(iter(predictions))


def _work(
    graph: Graph, costs: Mapping[int, float], cluster: ClusterProfile
) -> tuple[Work, Callable[[Cut], bool], bool]:
    """Return what is to be cut, what tells whether a cut fits the workers, and whether costs are guesses."""
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
    fits = partial(_fits, graph, most_nbytes) if may_not_fit else lambda _: True
    return work, fits, is_guess


def _total_nbytes(graph: Graph) -> int:
    """Return the bytes of all values together; those of unknown size count as nothing [B]."""
    specs = Counter((spec.dtype, spec.shape) for spec in graph.specs.values())
    made = sum(n * (TensorSpec(dtype, shape).nbytes or 0) for (dtype, shape), n in specs.items())
    return made + sum(source.spec.nbytes or 0 for source in graph.sources)


def _fits(graph: Graph, most: float, cut: Cut) -> bool:
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
