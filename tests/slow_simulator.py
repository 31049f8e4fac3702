"""A slow, obvious simulator of a placement: at each step it looks at all tasks and transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ferroflow_dask.topology import Topology


def slow_timeline(
    durations_s: Sequence[float],
    inputs: Sequence[Mapping[int, int]],
    topology: Topology,
    placement: Sequence[int],
) -> tuple[dict[int, tuple[float, float]], dict[tuple[int, int], tuple[float, float]]]:
    """Return start and stop of each task, and of each transfer by task and destination."""
    hosts, workers = topology.host_of, topology.workers
    threads = [[0.0] * worker.threads for worker in workers]
    links = [0.0] * len(topology.bandwidths)
    tasks: dict[int, tuple[float, float]] = {}
    transfers: dict[tuple[int, int], tuple[float, float]] = {}
    nbytes = {(j, placement[i]): size for i, needed in enumerate(inputs) for j, size in needed.items()}
    wanted = [(j, worker) for j, worker in nbytes if placement[j] != worker]
    while len(tasks) < len(durations_s) or len(transfers) < len(wanted):
        ready = []
        for task, needed in enumerate(inputs):
            here = placement[task]
            ends = [tasks.get(j) if placement[j] == here else transfers.get((j, here)) for j in needed]
            if task not in tasks and None not in ends:
                ready.append((max((end[1] for end in ends if end), default=0.0), task, -1))
        ready += [
            (tasks[j][1], j, worker) for j, worker in wanted if j in tasks and (j, worker) not in transfers
        ]
        now_s, task, destination = min(ready)
        if destination < 0:
            free = threads[placement[task]]
            first = free.index(min(free))
            start_s = max(now_s, free[first])
            free[first] = start_s + durations_s[task] / workers[placement[task]].speed
            tasks[task] = start_s, free[first]
        else:
            route = topology.route(hosts[placement[task]], hosts[destination])
            size = nbytes[task, destination]
            start_s = max([now_s, *(links[link] for link in route.links)]) if size else now_s
            for link in route.links if size else ():
                links[link] = start_s + size / topology.bandwidths[link]
            transfers[task, destination] = start_s, start_s + size / route.bandwidth + route.latency_s
    return tasks, transfers
