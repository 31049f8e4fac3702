"""Full simulation of a given placement, as in FlexFlow.

Z. Jia, M. Zaharia and A. Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019,
section 5.1. Tasks and transfers leave a global queue in the order in which they become ready. Each device,
a thread or a link, serves them first in, first out. A result is sent to each worker that reads it as soon as
it exists, once. Deviations: a worker has several threads, a route several links that a transfer occupies
together, and the overheads of a runtime delay the tasks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.simulation.devices import Links, Threads
from ferroflow_dask.simulation.graph import TaskGraph, Timeline, Transfer
from ferroflow_dask.simulation.machine import Machine


def run_placed(graph: TaskGraph, machine: Machine, placement: Sequence[int]) -> Timeline:
    """Return the timeline of a placement; O((tasks + edges) · log (tasks + edges)).

    Ties are decided by the number of the task; of its transfers, by that of the destination.

    Parameters
    ----------
    graph : TaskGraph
    machine : Machine
    placement : sequence of int
        Worker of each task.

    Raises
    ------
    UsageError
        A task has no worker, or one that the machine does not have.
    """
    n = len(graph.durations_s)
    _check(placement, n, len(machine.threads))
    durations_s, speeds, route = graph.durations_s, machine.speeds, machine.route
    threads, links = Threads(machine.threads, speeds), Links(machine.bandwidths)
    followers = graph.followers()
    missing = [len(needed) for needed in graph.inputs]
    ready_s = [machine.submit_s + n * machine.arrival_s] * n
    starts_s, stops_s, transfers = [0.0] * n, [0.0] * n, list[Transfer]()
    scheduler_free_s, round_trip_s = 0.0, machine.round_trip_s
    # The destination of a transfer; -1 for the task itself.
    heap = [(ready_s[task], task, -1) for task in range(n) if not missing[task]]
    heapq.heapify(heap)
    while heap:
        now_s, task, destination = heapq.heappop(heap)
        worker = placement[task]
        if destination < 0:
            scheduler_free_s = max(scheduler_free_s, now_s) + machine.task_s
            free_s = threads.free_s(worker)
            start_s = free_s if free_s > scheduler_free_s else scheduler_free_s
            arrived_s = stop_s = start_s + durations_s[task] / speeds[worker]
            threads.occupy(worker, stop_s)
            starts_s[task], stops_s[task] = start_s, stop_s
            for reader in {placement[follower] for follower in followers[task]} - {worker}:
                heapq.heappush(heap, (stop_s, task, reader))
            destination = worker
        else:
            nbytes = next(graph.inputs[f][task] for f in followers[task] if placement[f] == destination)
            sent_s, arrived_s = links.occupy(route(worker, destination), nbytes, now_s)
            transfers.append(Transfer(task, worker, destination, nbytes, sent_s, arrived_s))
        for follower in followers[task]:
            if placement[follower] != destination:
                continue
            ready_s[follower] = max(ready_s[follower], arrived_s + round_trip_s)
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(heap, (ready_s[follower], follower, -1))
    return Timeline(placement, starts_s, stops_s, n * machine.task_s, transfers)


def _check(placement: Sequence[int], n_tasks: int, n_workers: int) -> None:
    if len(placement) != n_tasks:
        raise UsageError(f"placement must have a worker for each of {n_tasks} tasks, got {len(placement)}")
    for task, worker in enumerate(placement):
        if not 0 <= worker < n_workers:
            raise UsageError(f"the worker of task {task} must be one of 0 to {n_workers - 1}, got {worker!r}")
