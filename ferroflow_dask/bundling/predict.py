"""Predicted makespan of a cut on a cluster, by the light engine's list schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.simulation import Machine, TaskGraph, run_listed


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected run of a cut.

    Parameters
    ----------
    makespan_s : float
        From `compute` to the last result [s].
    n_tasks : int
    nbytes_moved : int
        Size of the results that are fetched from another worker [B]; unknown sizes count as 0.
    cut : str, optional
        Name of the cut.
    shape : int, optional
        As `repeats.shape_of` returns it.
    """

    makespan_s: float
    n_tasks: int
    nbytes_moved: int
    cut: str = ""
    shape: int = 0


#: The pieces of each bundle, ascending. The bundles are in an order in which they can run.
Cut = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """Pieces of work, in an order in which they can run, to be cut into bundles.

    Parameters
    ----------
    edges : sequence of sequence of int
        For each piece the earlier pieces that it reads from.
    costs_s : sequence of float
        Duration of each piece [s].
    nbytes : callable
        Returns the size of a piece's result [B]; 0 if it is unknown.
    alone : collection of int, optional
        Pieces that must not share a bundle.
    last : collection of int, optional
        Pieces whose results clients want, under their own keys. They end a chain. Several may share a bundle
        if it returns nothing else: what else a bundle returns moves as a whole.
    outside_nbytes : float, optional
        Size of the results of other work that the pieces read [B].
    held : sequence of mapping of str to float, optional
        For each piece, the bytes of its inputs by worker [B]; empty if this does not matter.
    cores_s : float, optional
        Time that all pieces together need on a core [s]; not used if each thread has a core.
    """

    edges: Sequence[Sequence[int]]
    costs_s: Sequence[float]
    nbytes: Callable[[int], int]
    alone: Collection[int] = frozenset()
    last: Collection[int] = frozenset()
    outside_nbytes: float = 0.0
    held: Sequence[Mapping[str, float]] = ()
    cores_s: float = 0.0


def shortest_s(work: Work, n_tasks: int, cluster: ClusterProfile) -> float:
    """Return the makespan that cores and overheads allow at least, if the work is cut into some tasks [s]."""
    on_cores_s = work.cores_s / cluster.cores if cluster.crowding > 1 else 0.0
    return cluster.submit_s + on_cores_s + n_tasks * cluster.added_s


def predict(work: Work, cut: Cut, cluster: ClusterProfile) -> Prediction:
    """Predict how a cut runs; O(edges + bundles · (log threads + bundles they wait for))."""
    timeline = run_listed(_task_graph(work, cut), Machine.of_profile(cluster))
    nbytes = timeline.nbytes_moved + _fetched_nbytes(work, cut)
    return Prediction(max(timeline.makespan_s, shortest_s(work, len(cut), cluster)), len(cut), nbytes)


def _fetched_nbytes(work: Work, cut: Cut) -> int:
    """Return the inputs from outside that the best worker of each bundle does not hold [B]."""
    fetched = 0.0
    for pieces in cut if work.held else ():
        held: Counter[str] = Counter()
        for i in pieces:
            held.update(work.held[i])
        fetched += sum(max(work.held[i].values(), default=0.0) for i in pieces)
        fetched -= max(held.values(), default=0.0)
    return int(fetched)


def _task_graph(work: Work, cut: Cut) -> TaskGraph:
    """Return the bundles as tasks."""
    edges, costs_s = work.edges, work.costs_s
    task_of = [0] * len(edges)
    for task, pieces in enumerate(cut):
        for i in pieces:
            task_of[i] = task
    sources = [{j for i in pieces for j in edges[i] if task_of[j] != task} for task, pieces in enumerate(cut)]
    # A result of several values moves whole to each reader.
    result_nbytes: dict[int, int] = {}
    for j in set().union(*sources):
        result_nbytes[task_of[j]] = result_nbytes.get(task_of[j], 0) + work.nbytes(j)
    inputs = [{task_of[j]: result_nbytes[task_of[j]] for j in read} for read in sources]
    return TaskGraph([sum([costs_s[i] for i in pieces]) for pieces in cut], inputs)
