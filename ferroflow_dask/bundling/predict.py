"""Predicted makespan of a cut on a cluster, by the light engine's list schedule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

    def homes(self) -> dict[int, str]:
        """Return the worker with most of the inputs from outside, for each piece that has some."""
        return {i: max(held, key=held.__getitem__) for i, held in enumerate(self.held) if held}

    def held_for(self, pieces: Iterable[int]) -> dict[str, float]:
        """Return the bytes of the inputs of some pieces by worker [B]."""
        total: dict[str, float] = {}
        for i in pieces:
            for worker, nbytes in self.held[i].items():
                total[worker] = total.get(worker, 0.0) + nbytes
        return total


def shortest_s(work: Work, n_tasks: int, cluster: ClusterProfile) -> float:
    """Return the makespan that cores and overheads allow at least, if the work is cut into some tasks [s]."""
    on_cores_s = work.cores_s / cluster.cores if cluster.crowding > 1 else 0.0
    return cluster.submit_s + on_cores_s + n_tasks * cluster.added_s


def predict(work: Work, cut: Cut, cluster: ClusterProfile) -> Prediction:
    """Predict how a cut runs; O(edges + bundles · (log threads + bundles they wait for))."""
    reads = Reads(work, cut)
    apart = reads.apart(cluster)
    costs_s = [sum([work.costs_s[i] for i in pieces]) for pieces in cut]
    timeline = run_listed(TaskGraph(costs_s, reads.inputs(apart)), Machine.of_profile(cluster))
    nbytes = timeline.nbytes_moved + _fetched_nbytes(work, cut)
    values_s = cluster.task_s * sum(len(reads.exports[task]) for task in apart)
    least_s = shortest_s(work, len(cut), cluster) + values_s
    return Prediction(max(timeline.makespan_s, least_s), len(cut), nbytes)


def values_apart(work: Work, cut: Cut, cluster: ClusterProfile) -> set[int]:
    """Return the pieces whose results get keys of their own, so that each moves by itself."""
    reads = Reads(work, cut)
    return {i for task in reads.apart(cluster) for i in reads.exports[task]}


class Reads:
    """What the bundles of a cut read from each other.

    Parameters
    ----------
    work : Work
    cut : sequence of sequence of int

    Attributes
    ----------
    exports : dict of int to list of int
        For each bundle that others read: the pieces whose results they read, without those that clients want.
    """

    def __init__(self, work: Work, cut: Cut) -> None:
        self._nbytes, self._last = work.nbytes, work.last
        self._task_of = task_of = [0] * len(work.edges)
        for task, pieces in enumerate(cut):
            for i in pieces:
                task_of[i] = task
        self._read = [
            {j for i in pieces for j in work.edges[i] if task_of[j] != task}
            for task, pieces in enumerate(cut)
        ]
        self.exports: dict[int, list[int]] = {}
        for j in set().union(*self._read).difference(work.last):
            self.exports.setdefault(task_of[j], []).append(j)
        # A result of several values moves whole to each reader.
        self._whole_nbytes = {task: sum(map(work.nbytes, pieces)) for task, pieces in self.exports.items()}

    def apart(self, cluster: ClusterProfile) -> set[int]:
        """Return the bundles of which each result should have a key of its own.

        A key costs the scheduler a task, but no thread. It spares what a reader does not need.
        """
        spared: dict[int, int] = {}
        for read in self._read:
            seen = set()
            for j in read:
                task = self._task_of[j]
                if len(self.exports.get(task, ())) > 1 and j not in self._last:
                    spared[task] = spared.get(task, 0) - self._nbytes(j)
                    seen.add(task)
            for task in seen:
                spared[task] += self._whole_nbytes[task]
        return {
            task
            for task, nbytes in spared.items()
            if nbytes > len(self.exports[task]) * cluster.task_s * cluster.bandwidth
        }

    def inputs(self, apart: Collection[int]) -> list[dict[int, int]]:
        """Return the bytes that each bundle reads of others, of those in `apart` only what it needs [B]."""
        found: list[dict[int, int]] = []
        for read in self._read:
            own: dict[int, int] = {}
            for j in read:
                task = self._task_of[j]
                if task in apart or j in self._last:
                    own[task] = own.get(task, 0) + self._nbytes(j)
                elif task not in own:
                    own[task] = self._whole_nbytes[task]
            found.append(own)
        return found


def _fetched_nbytes(work: Work, cut: Cut) -> int:
    """Return the inputs from outside that the best worker of each bundle does not hold [B]."""
    fetched = 0.0
    for pieces in cut if work.held else ():
        fetched += sum(max(work.held[i].values(), default=0.0) for i in pieces)
        fetched -= max(work.held_for(pieces).values(), default=0.0)
    return int(fetched)
