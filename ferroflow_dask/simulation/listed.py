"""List scheduling with the overheads of Dask: the light engine's idea of a run with a good policy.

R. L. Graham's list schedule (1969). The ready task of the highest rank goes to the worker that can finish it
first. The overheads are those of Dask. The scheduler handles one task at a time. A dependent is ready a round
trip after its dependencies. A worker fetches the results that it lacks when it gets the task.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from math import inf

from ferroflow_dask.ranks import ranks_of
from ferroflow_dask.simulation.devices import Links, Threads
from ferroflow_dask.simulation.graph import TaskGraph, Timeline, Transfer
from ferroflow_dask.simulation.machine import Machine

#: Holders of inputs that are compared: those with the most bytes.
_HOLDERS = 8


def run_listed(graph: TaskGraph, machine: Machine) -> Timeline:
    """Return the timeline of a list schedule; O((tasks + edges) · log tasks)."""
    return _Run(graph, machine).timeline()


class _Run:
    def __init__(self, graph: TaskGraph, machine: Machine) -> None:
        self._graph, self._machine = graph, machine
        n = len(graph.durations_s)
        self._threads = Threads(machine.threads, machine.speeds)
        self._links = Links(machine.bandwidths)
        self._workers, self._starts_s, self._stops_s = [0] * n, [0.0] * n, [0.0] * n
        #: When a result has arrived at a worker that fetched it [s], by task and worker.
        self._arrived_s: dict[tuple[int, int], float] = {}
        self._transfers: list[Transfer] = []

    def timeline(self) -> Timeline:
        """Run all tasks."""
        graph, machine = self._graph, self._machine
        n, followers = len(graph.durations_s), graph.followers()
        rank_s = ranks_of(graph.durations_s, graph.inputs)
        missing = [len(needed) for needed in graph.inputs]
        first_s = machine.submit_s + n * machine.arrival_s
        # The scheduler sends the ready task of the highest rank as soon as it is free.
        ready = [(first_s, -rank_s[task], task) for task, n_missing in enumerate(missing) if not n_missing]
        heapq.heapify(ready)
        scheduler_s = 0.0
        while ready:
            ready_s, _, task = heapq.heappop(ready)
            scheduler_s = max(scheduler_s, ready_s) + machine.task_s
            self._send(task, scheduler_s)
            for follower in followers[task]:
                missing[follower] -= 1
                if not missing[follower]:
                    last_s = max([self._stops_s[earlier] for earlier in graph.inputs[follower]])
                    heapq.heappush(ready, (last_s + machine.round_trip_s, -rank_s[follower], follower))
        return Timeline(self._workers, self._starts_s, self._stops_s, n * machine.task_s, self._transfers)

    def _send(self, task: int, now_s: float) -> None:
        """Place a task, let its worker fetch the inputs, and run it."""
        duration_s, inputs = self._graph.durations_s[task], self._graph.inputs[task]
        threads, speeds = self._threads, self._machine.speeds
        # Either a holder of inputs or the worker with the first free thread can finish it earliest.
        candidates = threads.first_free()
        if inputs:
            candidates = sorted({*candidates, *self._holders(inputs)})
        worker, best_s = candidates[0], inf
        for candidate in candidates if len(candidates) > 1 else ():
            fetched_s = self._expected_s(inputs, candidate, now_s) if inputs else now_s
            stop_s = max(threads.free_s(candidate), fetched_s) + duration_s / speeds[candidate]
            if stop_s < best_s:
                worker, best_s = candidate, stop_s
        fetched_s = self._fetch(inputs, worker, now_s) if inputs else now_s
        start_s = max(threads.free_s(worker), fetched_s) + self._machine.pause_s
        stop_s = start_s + duration_s / speeds[worker]
        threads.occupy(worker, stop_s)
        self._workers[task], self._starts_s[task], self._stops_s[task] = worker, start_s, stop_s

    def _holders(self, inputs: Mapping[int, int]) -> list[int]:
        held: dict[int, int] = {}
        for earlier, nbytes in inputs.items():
            worker = self._workers[earlier]
            held[worker] = held.get(worker, 0) + nbytes
        if len(held) <= _HOLDERS:
            return list(held)
        return heapq.nlargest(_HOLDERS, held, key=lambda worker: (held[worker], -worker))

    def _expected_s(self, inputs: Mapping[int, int], worker: int, now_s: float) -> float:
        """Return when a worker would have all inputs, if it fetched them one after the other [s]."""
        free_s = last_s = now_s
        for earlier, nbytes in inputs.items():
            source = self._workers[earlier]
            if source == worker:
                continue
            known_s = self._arrived_s.get((earlier, worker))
            if known_s is None:
                route = self._machine.route(source, worker)
                if nbytes:
                    free_s = self._links.start_s(route, free_s) + nbytes / route.bandwidth
                known_s = free_s + route.latency_s
            last_s = max(last_s, known_s)
        return last_s

    def _fetch(self, inputs: Mapping[int, int], worker: int, now_s: float) -> float:
        """Let a worker fetch the inputs that it lacks; return when it has all of them [s]."""
        last_s = now_s
        for earlier, nbytes in inputs.items():
            source = self._workers[earlier]
            if source == worker:
                continue
            arrived_s = self._arrived_s.get((earlier, worker))
            if arrived_s is None:
                start_s, arrived_s = self._links.occupy(self._machine.route(source, worker), nbytes, now_s)
                self._arrived_s[earlier, worker] = arrived_s
                self._transfers.append(Transfer(earlier, source, worker, nbytes, start_s, arrived_s))
            last_s = max(last_s, arrived_s)
        return last_s
