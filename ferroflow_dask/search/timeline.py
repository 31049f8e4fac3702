"""Simulation of strategies, in full and by difference, as in FlexFlow.

Z. Jia, M. Zaharia and A. Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019,
section 5. Parts and transfers leave a global queue in the order in which they become ready. Threads and links
serve them first in, first out. A part sends what another worker reads of it as soon as it exists, once.

The delta simulation goes back to the last snapshot before anything can differ, and runs the rest. Deviations:
parts on one worker wait for each other without cost, since they are bundled. Each transfer has the costs of
two Dask tasks: one that sends, and one that reads. Both take time of the scheduler and of their workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from ferroflow_dask.search.problem import Choice, Problem, Table

#: A byte of weights that does not fit counts as this [s]: more than any gain.
_EXCESS_S = 1.0
#: Snapshots of one simulation.
_SNAPSHOTS = 12

#: Ready time, node, part, destination (-1 for the part itself), bytes.
_Event = tuple[float, int, int, int, int]


@dataclass(slots=True)
class _Memory:
    """What a simulation knows at some event."""

    ready_s: list[list[float]]
    arrived: list[list[int]]
    threads: list[list[float]]
    links: list[float]
    scheduler_s: float
    last_s: float
    nbytes: int
    queue: list[_Event]
    n_events: int

    def copy(self) -> _Memory:
        return _Memory(
            [list(x) for x in self.ready_s],
            [list(x) for x in self.arrived],
            [list(x) for x in self.threads],
            list(self.links),
            self.scheduler_s,
            self.last_s,
            self.nbytes,
            list(self.queue),
            self.n_events,
        )


@dataclass(slots=True)
class Simulation:
    """A simulated strategy.

    Parameters
    ----------
    choices : list of Choice
        Of each node.
    makespan_s : float
        From the submission to the end of the last part [s].
    nbytes_moved : int
        Size of all transfers [B].
    starts_s, stops_s : list of list of float
        Of each part of each node, after the submission [s].
    excess_nbytes : int
        Size of weights that do not fit the memory of their worker [B].
    """

    choices: list[Choice]
    makespan_s: float = 0.0
    nbytes_moved: int = 0
    excess_nbytes: int = 0
    starts_s: list[list[float]] = field(default_factory=list)
    stops_s: list[list[float]] = field(default_factory=list)
    #: Number of events that a delta simulation took over.
    n_kept: int = 0
    #: Number of the event at which each part starts.
    at: list[list[int]] = field(default_factory=list)
    n_events: int = 0
    snapshots: list[_Memory] = field(default_factory=list)
    tables: list[dict[int, Table]] = field(default_factory=list)
    durations_s: list[list[float]] = field(default_factory=list)
    needed: list[list[int]] = field(default_factory=list)

    @property
    def cost_s(self) -> float:
        """What a Markov chain lowers: the makespan, but first of all weights must fit [s]."""
        return self.makespan_s + _EXCESS_S * self.excess_nbytes


def simulate(problem: Problem, choices: list[Choice]) -> Simulation:
    """Return the full simulation of a strategy."""
    choices = list(choices)
    for node in problem.changeable:
        for other, choice in problem.following(node, choices[node]).items():
            choices[other] = choice
    run = Simulation(choices)
    n = problem.n_nodes
    run.tables = [{} for _ in range(n)]
    run.durations_s, run.needed = [[] for _ in range(n)], [[] for _ in range(n)]
    for node in range(n):
        _connect(problem, run, node)
    sizes = [len(choice.workers) for choice in choices]
    run.starts_s = [[0.0] * size for size in sizes]
    run.stops_s = [[0.0] * size for size in sizes]
    run.at = [[0] * size for size in sizes]
    machine = problem.machine
    queue: list[_Event] = [
        (0.0, node, part, -1, 0)
        for node, needed in enumerate(run.needed)
        for part, missing in enumerate(needed)
        if not missing
    ]
    heapq.heapify(queue)
    memory = _Memory(
        [[0.0] * size for size in sizes],
        [[0] * size for size in sizes],
        [[0.0] * threads for threads in machine.threads],
        [0.0] * len(machine.bandwidths),
        0.0,
        0.0,
        0,
        queue,
        0,
    )
    interval = max(1, 2 * sum(sizes) // _SNAPSHOTS)
    _advance(problem, run, memory, interval)
    return run


def simulate_change(problem: Problem, before: Simulation, node: int, choice: Choice) -> Simulation:
    """Return the delta simulation of a strategy that differs from a simulated one in one node.

    It is equal to the full simulation, bit by bit.
    """
    choices = list(before.choices)
    changes = {node: choice, **problem.following(node, choice)}
    for changed, found in changes.items():
        choices[changed] = found
    producers = {i for changed in changes for i in problem.values[changed] if i not in changes}
    first = min((event for producer in producers for event in before.at[producer]), default=0)
    snapshot = next((one for one in reversed(before.snapshots) if one.n_events <= first), None)
    is_source = any(not problem.values[changed] for changed in changes)
    if is_source or snapshot is None or not snapshot.n_events:
        return simulate(problem, choices)
    kept = [one for one in before.snapshots if one.n_events < snapshot.n_events]
    run = Simulation(
        choices,
        n_kept=snapshot.n_events,
        starts_s=list(map(list, before.starts_s)),
        stops_s=list(map(list, before.stops_s)),
        at=list(map(list, before.at)),
        tables=list(before.tables),
        durations_s=list(before.durations_s),
        needed=list(before.needed),
    )
    for changed in {*changes, *(reader for one in changes for reader in problem.consumers[one])}:
        run.tables[changed] = dict(run.tables[changed])
        _connect(problem, run, changed)
    memory = snapshot.copy()
    for changed, found in changes.items():
        size = len(found.workers)
        for part_of in (run.starts_s, run.stops_s, memory.ready_s):
            part_of[changed] = [0.0] * size
        memory.arrived[changed], run.at[changed] = [0] * size, [0] * size
    # Earlier snapshots know nothing of these nodes, but have their old numbers of parts.
    run.snapshots = [_resized(one, changes) for one in kept]
    interval = before.snapshots[1].n_events if len(before.snapshots) > 1 else max(1, before.n_events)
    _advance(problem, run, memory, interval)
    return run


def _resized(memory: _Memory, changes: Mapping[int, Choice]) -> _Memory:
    sizes = {node: len(choice.workers) for node, choice in changes.items()}
    if all(len(memory.arrived[node]) == size for node, size in sizes.items()):
        return memory
    found = memory.copy()
    for node, size in sizes.items():
        found.arrived[node], found.ready_s[node] = [0] * size, [0.0] * size
    return found


def _connect(problem: Problem, run: Simulation, node: int) -> None:
    """Note what a node reads, how long its parts take, and for how many parts they wait."""
    degrees, workers = run.choices[node][:2]
    seconds = problem.durations_s(node, run.choices[node])
    needed = [0] * len(workers)
    for producer in problem.values[node]:
        table = problem.table(producer, run.choices[producer].degrees, node, degrees)
        run.tables[node][producer] = table
        for readers in table.readers:
            for part in readers:
                needed[part] += 1
        seconds = [a + b for a, b in zip(seconds, table.copy_s, strict=True)]
    run.durations_s[node], run.needed[node] = seconds, needed


def _advance(problem: Problem, run: Simulation, memory: _Memory, interval: int) -> None:
    """Run a simulation to its end."""
    queue, machine = memory.queue, problem.machine
    workers = [choice.workers for choice in run.choices]
    ready_s, arrived, threads, links = memory.ready_s, memory.arrived, memory.threads, memory.links

    def arrive(node: int, destination: int, parts: list[int], now_s: float) -> None:
        for part in parts:
            if workers[node][part] != destination:
                continue
            ready_s[node][part] = max(ready_s[node][part], now_s)
            arrived[node][part] += 1
            if arrived[node][part] == run.needed[node][part]:
                heapq.heappush(queue, (ready_s[node][part], node, part, -1, 0))

    while queue:
        if not memory.n_events % interval:
            run.snapshots.append(memory.copy())
        now_s, node, part, destination, nbytes = heapq.heappop(queue)
        worker = workers[node][part]
        if destination < 0:
            free_s = threads[worker][0]
            start_s = max(now_s, free_s)
            stop_s = start_s + run.durations_s[node][part] / machine.speeds[worker]
            heapq.heapreplace(threads[worker], stop_s)
            run.starts_s[node][part], run.stops_s[node][part] = start_s, stop_s
            run.at[node][part] = memory.n_events
            memory.last_s = max(memory.last_s, stop_s)
            sent: dict[int, dict[int, int]] = {}
            for consumer in problem.consumers[node]:
                readers = workers[consumer]
                for reader, region, size in run.tables[consumer][node].reads[part]:
                    if readers[reader] != worker:
                        sent.setdefault(readers[reader], {})[region] = size
            for to in sorted(sent):
                heapq.heappush(queue, (stop_s, node, part, to, sum(sent[to].values())))
            destination, arrived_s = worker, stop_s
        else:
            route = machine.route(worker, destination)
            memory.scheduler_s = max(memory.scheduler_s, now_s) + 2 * machine.task_s
            for at in (worker, destination):
                heapq.heapreplace(threads[at], threads[at][0] + machine.worker_s)
            sent_s = memory.scheduler_s + machine.round_trip_s
            begin_s = max([sent_s, *(links[link] for link in route.links)])
            for link in route.links:
                links[link] = begin_s + nbytes / machine.bandwidths[link]
            arrived_s = begin_s + nbytes / route.bandwidth + route.latency_s + machine.round_trip_s
            memory.nbytes += nbytes
        memory.n_events += 1
        for consumer in problem.consumers[node]:
            arrive(consumer, destination, run.tables[consumer][node].readers[part], arrived_s)
    n_parts = sum(map(len, workers))
    n_tasks = 2 * (memory.n_events - n_parts) + len({worker for part in workers for worker in part})
    before_s = machine.submit_s + n_tasks * machine.arrival_s
    run.makespan_s, run.nbytes_moved, run.n_events = before_s + memory.last_s, memory.nbytes, memory.n_events
    run.excess_nbytes = problem.excess_nbytes(run.choices)
