"""How long a cut of a graph should take on a cluster, by list scheduling.

R. L. Graham's list schedule (1969) with what Dask adds: a scheduler that handles one task after another,
a round trip before what waits for a result can start, and the transfer of results between workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ferroflow_dask.cost import ClusterProfile
from ferroflow_dask.graph.ir import Graph


@dataclass(frozen=True, slots=True)
class Prediction:
    """What should happen.

    Parameters
    ----------
    makespan_s : float
        From `compute` to the last result [s].
    n_tasks : int
    nbytes_moved : int
        Results that are fetched from another worker [B]; those of unknown size count as nothing.
    """

    makespan_s: float
    n_tasks: int
    nbytes_moved: int


def predict(
    graph: Graph, cut: Sequence[Sequence[int]], costs: Mapping[int, float], cluster: ClusterProfile
) -> Prediction:
    """Predict how a cut runs; O(edges + bundles · (log threads + bundles they wait for)).

    Parameters
    ----------
    graph : Graph
    cut : sequence of sequence of int
        For each bundle the positions of its ops in `graph.live_ops`; in an order in which they can run.
    costs : mapping of int to float
        Duration of each live op by id [s].
    cluster : ClusterProfile
    """
    work_s, inputs = _tasks(graph, cut, costs)
    rank_s = _ranks(work_s, inputs)
    followers: list[list[int]] = [[] for _ in cut]
    for task, needed in enumerate(inputs):
        for earlier in needed:
            followers[earlier].append(task)
    missing = [len(needed) for needed in inputs]
    # The scheduler sends the ready task of the highest rank as soon as it has time.
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

        # Where inputs are, or where a thread is free first: no other worker can start it earlier.
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
    """When the threads of each worker are free."""

    def __init__(self, threads: Sequence[int]) -> None:
        self._free_s = [[0.0] * n for n in threads]
        # May hold times that are over; those are dropped when they come up.
        self._earliest = [(0.0, worker) for worker in range(len(threads))]

    def free_s(self, worker: int) -> float:
        """Return when a thread of a worker is free [s]."""
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


def _tasks(
    graph: Graph, cut: Sequence[Sequence[int]], costs: Mapping[int, float]
) -> tuple[list[float], list[dict[int, int]]]:
    """Return each bundle's duration [s], and the bytes that it reads of each bundle that it waits for."""
    ops, edges = graph.live_ops, graph.live_edges
    task_of = [0] * len(ops)
    for task, positions in enumerate(cut):
        for i in positions:
            task_of[i] = task
    work_s = [sum([costs[ops[i].id] for i in positions]) for positions in cut]
    inputs: list[dict[int, int]] = []
    for task, positions in enumerate(cut):
        read: dict[int, int] = {}
        outside = [i for i in positions for j in edges[i] if task_of[j] != task]
        for value in {value for i in outside for value in ops[i].operands}:
            producer = graph.producers.get(value)
            if producer is not None and (source := task_of[graph.live_position[producer.id]]) != task:
                read[source] = read.get(source, 0) + (graph.spec(value).nbytes or 0)
        inputs.append(read)
    return work_s, inputs


def _ranks(work_s: Sequence[float], inputs: Sequence[Mapping[int, int]]) -> list[float]:
    rank_s = list(work_s)
    for task in range(len(work_s) - 1, -1, -1):
        for earlier in inputs[task]:
            rank_s[earlier] = max(rank_s[earlier], work_s[earlier] + rank_s[task])
    return rank_s
