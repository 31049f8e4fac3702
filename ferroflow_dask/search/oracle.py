"""Oracle: a makespan that no strategy of a small problem can beat.

Dynamic programming over down-sets of the parts of operators, as for operators in PHAZE ("Integrated Hardware
Architecture and Device Placement Search", 2024). The model is that of `timeline`, relaxed: links and the
scheduler serve any number of transfers at a time, a transfer has only the bytes of the part that reads it,
and a worker may run its parts in any order. So the optimum of this model is a lower bound of the other one.
A mixed-integer program of the same model would need an order variable for each two parts; there is none.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.search.candidates import degrees_of
from ferroflow_dask.search.problem import Degrees, Problem
from ferroflow_dask.simulation import Machine

#: States that a bound may need.
_MOST_STATES = 1_000_000


class _Placed(NamedTuple):
    """The parts of a node so far. Parts that have not started have worker -1."""

    degrees: Degrees
    workers: tuple[int, ...]
    stops_s: tuple[float, ...]


#: By node: what of it is placed; None if it and all of its readers are complete.
_Nodes = tuple[_Placed | None, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """A down-set: parts that have started, with all that they need.

    Parameters
    ----------
    nodes : tuple
    free_s : tuple of tuple of float
        When the threads of each worker become free, ascending [s].
    last_s : float
        When the last part ends [s].
    now_s : float
        When the last part started [s]. Parts are added in the order in which they start.
    work_s : float
        Least duration of all parts that are left, on a worker of speed 1 [s].
    """

    nodes: _Nodes
    free_s: tuple[tuple[float, ...], ...]
    last_s: float
    now_s: float
    work_s: float


def least_makespan_s(problem: Problem, *, most_states: int = _MOST_STATES) -> float:
    """Return a makespan that no strategy of a problem can beat [s].

    Strategies have the degrees that a search tries, and any worker for each part.

    Parameters
    ----------
    problem : Problem
        At most about eight operators on two workers; others need too many states.
    most_states : int, optional

    Raises
    ------
    UsageError
        More states would be needed.
    """
    return _Oracle(problem, most_states).run()


class _Oracle:
    def __init__(self, problem: Problem, most_states: int) -> None:
        self._problem, self._machine, self._most = problem, problem.machine, most_states
        self._speed = max(problem.machine.speeds)
        self._least_work_s = [
            min(sum(problem.base_s(node, degrees)) for degrees in self._degrees(node))
            for node in range(problem.n_nodes)
        ]
        self._tail_s = [0.0] * problem.n_nodes
        for node in reversed(range(problem.n_nodes)):
            self._tail_s[node] = max(
                (self._step_s(node, reader) for reader in problem.consumers[node]), default=0.0
            )
        #: Of the states with equal nodes and workers, the times of those that no other one beats.
        self._best: dict[object, list[tuple[float, ...]]] = {}

    def _degrees(self, node: int) -> list[Degrees]:
        return degrees_of(self._problem, node) if node in self._problem.changeable else [()]

    def _step_s(self, node: int, reader: int) -> float:
        """Return the least time from the end of a part of a node to the end of all that reads it."""
        least_s = float("inf")
        for made in self._degrees(node):
            for read in self._degrees(reader):
                table, base_s = (
                    self._problem.table(node, made, reader, read),
                    self._problem.base_s(reader, read),
                )
                for readers in table.readers:
                    through_s = [(base_s[part] + table.copy_s[part]) / self._speed for part in readers]
                    rest_s = self._tail_s[reader] if readers else 0.0
                    least_s = min(least_s, min(through_s, default=0.0) + rest_s)
        return least_s

    def run(self) -> float:
        problem, machine = self._problem, self._machine
        nodes: list[_Placed | None] = [_Placed((), (), ())] * problem.n_nodes
        for node in range(problem.first):
            nodes[node] = _Placed((), (0,), (0.0,))
        free_s = tuple((0.0,) * threads for threads in machine.threads)
        start = _State(tuple(nodes), free_s, 0.0, 0.0, sum(self._least_work_s))
        order = count()
        queue = [(self._bound_s(start, 0.0), next(order), start)]
        while queue:
            bound_s, n, state = heapq.heappop(queue)
            if n > self._most:
                raise UsageError(
                    f"a bound must need at most {self._most:,} states, got more; use a smaller graph"
                )
            if self._is_complete(state):
                return machine.submit_s + machine.arrival_s + state.last_s
            for after, tail_s in self._next(state):
                if self._is_new(after):
                    found_s = max(bound_s, self._bound_s(after, tail_s))
                    heapq.heappush(queue, (found_s, next(order), after))
        raise AssertionError("a graph has a schedule")

    def _is_complete(self, state: _State) -> bool:
        return all(placed is None or _is_whole(placed) for placed in state.nodes)

    def _bound_s(self, state: _State, tail_s: float) -> float:
        """Return a time before which no schedule of a state ends [s]."""
        speeds = self._machine.speeds
        busy_s = sum(speed * sum(free) for speed, free in zip(speeds, state.free_s, strict=True))
        total = sum(speed * len(free) for speed, free in zip(speeds, state.free_s, strict=True))
        return max(state.last_s, tail_s, (busy_s + state.work_s) / total)

    def _next(self, state: _State) -> Iterator[tuple[_State, float]]:
        """Yield each state with one more part, and when what follows from this part can end [s]."""
        for node, placed in enumerate(state.nodes):
            if placed is None or _is_whole(placed):
                continue
            for degrees in [placed.degrees] if placed.workers else self._degrees(node):
                n_parts = len(self._problem.parts(node, degrees))
                so_far = placed if placed.workers else _Placed(degrees, (-1,) * n_parts, (0.0,) * n_parts)
                for part, at in enumerate(so_far.workers):
                    needed = None if at >= 0 else self._needed(state, node, degrees, part)
                    for worker in () if needed is None else self._workers(state, node):
                        yield self._started(
                            state, node, so_far, part=part, worker=worker, needed=needed or []
                        )

    def _needed(
        self, state: _State, node: int, degrees: Degrees, part: int
    ) -> list[tuple[float, int, int]] | None:
        """Return end, worker and size of all that a part reads; None if some of it has not started."""
        found = []
        for producer in self._problem.values[node]:
            made = state.nodes[producer]
            assert made is not None
            of = made.degrees if made.workers else self._degrees(producer)[0]
            table = self._problem.table(producer, of, node, degrees)
            for giver, readers in enumerate(table.readers):
                if part not in readers:
                    continue
                if not made.workers or made.workers[giver] < 0:
                    return None
                sizes = {region: size for reader, region, size in table.reads[giver] if reader == part}
                found.append((made.stops_s[giver], made.workers[giver], sum(sizes.values())))
        return found

    def _workers(self, state: _State, node: int) -> Sequence[int]:
        if node in self._problem.changeable:
            return range(len(self._machine.threads))
        # An output is put together on the worker of the first part of its operator.
        (producer,) = self._problem.values[node]
        made = state.nodes[producer]
        assert made is not None
        return made.workers[:1]

    def _seconds(self, state: _State, node: int, degrees: Degrees, part: int) -> float:
        seconds = self._problem.base_s(node, degrees)[part]
        for producer in self._problem.values[node]:
            made = state.nodes[producer]
            if made is not None and made.workers:
                seconds += self._problem.table(producer, made.degrees, node, degrees).copy_s[part]
        return seconds

    def _started(
        self,
        state: _State,
        node: int,
        so_far: _Placed,
        *,
        part: int,
        worker: int,
        needed: list[tuple[float, int, int]],
    ) -> tuple[_State, float]:
        ready_s = [end_s + _sent_s(self._machine, home, worker, nbytes) for end_s, home, nbytes in needed]
        start_s = max([state.now_s, state.free_s[worker][0], *ready_s])
        seconds = self._seconds(state, node, so_far.degrees, part)
        stop_s = start_s + seconds / self._machine.speeds[worker]
        workers = (*so_far.workers[:part], worker, *so_far.workers[part + 1 :])
        stops_s = (*so_far.stops_s[:part], stop_s, *so_far.stops_s[part + 1 :])
        nodes = list(state.nodes)
        nodes[node] = _Placed(so_far.degrees, workers, stops_s)
        base_s = self._problem.base_s(node, so_far.degrees)
        is_first = max(so_far.workers) < 0
        work_s = state.work_s - base_s[part] + (sum(base_s) - self._least_work_s[node] if is_first else 0.0)
        # Nothing starts before the last start.
        free_s = [tuple(max(at, start_s) for at in free) for free in state.free_s]
        free_s[worker] = tuple(sorted((*free_s[worker][1:], stop_s)))
        for known in (node, *self._problem.values[node]):
            if self._is_over(nodes, known):
                nodes[known] = None
        after = _State(tuple(nodes), tuple(free_s), max(state.last_s, stop_s), start_s, work_s)
        return after, stop_s + self._tail_s[node]

    def _is_over(self, nodes: list[_Placed | None], node: int) -> bool:
        needed = (node, *self._problem.consumers[node])
        return all(placed is None or _is_whole(placed) for placed in (nodes[one] for one in needed))

    def _is_new(self, state: _State) -> bool:
        """Return whether no known state is as early in everything; note it if so."""
        key = tuple(None if placed is None else placed[:2] for placed in state.nodes)
        stops_s = (stop for placed in state.nodes if placed is not None for stop in placed.stops_s)
        times = (state.last_s, state.now_s, *(at for free in state.free_s for at in free), *stops_s)
        known = self._best.setdefault(key, [])
        if any(all(a <= b for a, b in zip(one, times, strict=True)) for one in known):
            return False
        known[:] = [one for one in known if not all(b <= a for a, b in zip(one, times, strict=True))]
        known.append(times)
        return True


def _is_whole(placed: _Placed) -> bool:
    return bool(placed.workers) and min(placed.workers) >= 0


def _sent_s(machine: Machine, source: int, destination: int, nbytes: int) -> float:
    """Return how long a value is on its way at least [s]."""
    if source == destination:
        return 0.0
    route = machine.route(source, destination)
    return 2 * machine.task_s + 2 * machine.round_trip_s + nbytes / route.bandwidth + route.latency_s
