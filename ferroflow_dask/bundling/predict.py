"""Predicted makespan of a cut on a cluster, by list scheduling.

R. L. Graham's list schedule (1969), plus the overheads of Dask: the scheduler handles one task at a time, a
dependent starts a round trip after its dependencies, and results are transferred between workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.ranks import ranks_of


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
    """

    makespan_s: float
    n_tasks: int
    nbytes_moved: int


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
    """

    edges: Sequence[Sequence[int]]
    costs_s: Sequence[float]
    nbytes: Callable[[int], int]
    alone: Collection[int] = frozenset()
    last: Collection[int] = frozenset()


def predict(work: Work, cut: Cut, cluster: ClusterProfile) -> Prediction:
    """Predict how a cut runs; O(edges + bundles · (log threads + bundles they wait for))."""
    work_s, inputs = _tasks(work, cut)
    rank_s = ranks_of(work_s, inputs)
    followers: list[list[int]] = [[] for _ in cut]
    for task, needed in enumerate(inputs):
        for earlier in needed:
            followers[earlier].append(task)
    missing = [len(needed) for needed in inputs]
    # The scheduler sends the ready task of the highest rank as soon as it is free.
    ready = [(0.0, -rank_s[task], task) for task, n in enumerate(missing) if not n]
    heapq.heapify(ready)
    threads = _Threads(cluster.threads)
    end_s = [0.0] * len(cut)
    place = [0] * len(cut)
    scheduler_s, moved = 0.0, 0
    while ready:
        ready_s, _, task = heapq.heappop(ready)
        scheduler_s = max(scheduler_s, ready_s) + cluster.task_s

        def start_on(
            worker: int, needed: Mapping[int, int] = inputs[task], now_s: float = scheduler_s
        ) -> float:
            away = [nbytes for earlier, nbytes in needed.items() if place[earlier] != worker]
            fetch_s = cluster.round_trip_s + sum(away) / cluster.bandwidth if away else 0.0
            return max(threads.free_s(worker), now_s) + fetch_s

        # Either a holder of inputs or the worker with the first free thread can start it earliest.
        nearest = {threads.first_free(), *(place[earlier] for earlier in inputs[task])}
        worker = min(nearest, key=lambda worker: (start_on(worker), worker))
        moved += sum(nbytes for earlier, nbytes in inputs[task].items() if place[earlier] != worker)
        end_s[task] = start_on(worker) + work_s[task]
        place[task] = worker
        threads.occupy(worker, end_s[task])
        for follower in followers[task]:
            missing[follower] -= 1
            if not missing[follower]:
                start_s = max(end_s[earlier] for earlier in inputs[follower]) + cluster.round_trip_s
                heapq.heappush(ready, (start_s, -rank_s[follower], follower))
    return Prediction(cluster.submit_s + max(end_s, default=0.0), len(cut), moved)


class _Threads:
    """Times at which the threads of each worker become free."""

    def __init__(self, threads: Sequence[int]) -> None:
        self._free_s = [[0.0] * n for n in threads]
        # It may hold outdated times, which are dropped when they come up.
        self._earliest = [(0.0, worker) for worker in range(len(threads))]

    def free_s(self, worker: int) -> float:
        """Return when the first thread of a worker is free [s]."""
        return self._free_s[worker][0]

    def first_free(self) -> int:
        """Return the worker that has a free thread first."""
        while self._earliest[0][0] < self.free_s(self._earliest[0][1]):
            heapq.heappop(self._earliest)
        return self._earliest[0][1]

    def occupy(self, worker: int, until_s: float) -> None:
        """Take a thread of a worker until a time [s]."""
        heapq.heapreplace(self._free_s[worker], until_s)
        heapq.heappush(self._earliest, (self.free_s(worker), worker))


def _tasks(work: Work, cut: Cut) -> tuple[list[float], list[dict[int, int]]]:
    """Return each bundle's duration [s], and the bytes that it reads from each bundle that it depends on."""
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
    return [sum([costs_s[i] for i in pieces]) for pieces in cut], inputs
