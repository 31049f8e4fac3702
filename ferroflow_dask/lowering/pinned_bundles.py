"""Bundles of graphs whose ops name their workers: fewer tasks, if that delays nothing.

The finest bundles delay nothing, but each of them is a Dask task. They are merged as long as a simulation
with the costs of Dask does not become longer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op

#: Processor time of a worker for a task, and time from the end of a task to a dependent's start [s].
_TASK_S, _ROUND_TRIP_S = 1e-3, 2e-3
#: Between two workers: of one host, or over 10 Gbit/s [B/s].
_BANDWIDTH = 1.25e9
#: Bundles that are merged with each other: later ones start after them anyway.
_WINDOW = 96

#: Bundles of a graph stay those of the first costs: workers keep a session for each bundle.
_known: WeakKeyDictionary[Graph, list[tuple[Op, ...]]] = WeakKeyDictionary()


@dataclass(slots=True)
class _Group:
    """Ops that are one task.

    Parameters
    ----------
    worker : str
    ops : list of int
        Ascending.
    seconds : float
        [s]
    to : frozenset of str or None
        The workers that read it if it only sends values; None if it computes.
    """

    worker: str
    ops: list[int]
    seconds: float
    to: frozenset[str] | None


def bundles_of(graph: Graph, costs: Mapping[int, float]) -> list[tuple[Op, ...]]:
    """Return bundles of ops, each on one worker.

    Values that other workers read are results of bundles of their own, one for each set of readers. A worker
    gets no value that it does not read.

    Parameters
    ----------
    graph : Graph
        Of ops with workers.
    costs : mapping of int to float
        Expected durations by op id [s]; others count as 0. Those of the first call for a graph count.
    """
    if graph not in _known:
        ops, edges = graph.live_ops, graph.live_edges
        groups = _finest(ops, edges, costs)
        found = _with_sends(graph, _merged(groups, graph))
        _known[graph] = [tuple(ops[i] for i in group) for group in found]
    return _known[graph]


def _finest(ops: Sequence[Op], edges: Sequence[Sequence[int]], costs: Mapping[int, float]) -> list[_Group]:
    """Return groups of ops: all wait for the same values of other workers, the same workers wait for all."""
    after = _reversed(edges)
    moves = [any(ops[k].worker != op.worker for k in after[i]) for i, op in enumerate(ops)]
    # What reaches an op from other workers, and what it reaches that moves, as sets of bits.
    before_it, after_it = [0] * len(ops), [0] * len(ops)
    for i, op in enumerate(ops):
        for j in edges[i]:
            before_it[i] |= before_it[j] | (1 << j if ops[j].worker != op.worker else 0)
    for i in reversed(range(len(ops))):
        after_it[i] = 1 << i if moves[i] else 0
        for k in after[i]:
            after_it[i] |= after_it[k]
    root = list(range(len(ops)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i, op in enumerate(ops):
        for j in edges[i]:
            is_equal = (before_it[i], after_it[i]) == (before_it[j], after_it[j])
            if is_equal and op.worker == ops[j].worker and not (op.is_send or ops[j].is_send):
                root[find(i)] = find(j)
    found: dict[object, _Group] = {}
    for i, op in enumerate(ops):
        to = frozenset(ops[k].worker for k in after[i]) if op.is_send else None
        source = find(edges[i][0]) if edges[i] else -1
        key = (source, op.worker, to) if to is not None else find(i)
        group = found.setdefault(key, _Group(op.worker, [], 0.0, to))
        group.ops.append(i)
        group.seconds += costs.get(op.id, 0.0)
    return list(found.values())


def _reversed(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in edges]
    for i, before in enumerate(edges):
        for j in before:
            after[j].append(i)
    return after


def _merged(groups: list[_Group], graph: Graph) -> list[_Group]:
    """Return groups that were merged as long as that delayed nothing, in an order in which they can run."""
    reads = _reads(groups, graph)
    _, order = _simulated(groups, reads)
    number = {at: i for i, at in enumerate(order)}
    groups = [groups[at] for at in order]
    reads = [{number[j]: delay for j, delay in reads[at].items()} for at in order]
    found: list[_Group] = []
    for first in range(0, len(groups), _WINDOW):
        window = range(first, min(first + _WINDOW, len(groups)))
        inside = [{j - first: s for j, s in reads[i].items() if j in window} for i in window]
        found += _merged_window(groups[first : window.stop], inside)
    return found


def _reads(groups: Sequence[_Group], graph: Graph) -> list[dict[int, float]]:
    """Return for each group the groups that it reads, and how long their values take to reach it [s]."""
    ops, edges = graph.live_ops, graph.live_edges
    home = {i: at for at, group in enumerate(groups) for i in group.ops}
    found: list[dict[int, float]] = []
    for at, group in enumerate(groups):
        nbytes: dict[int, int] = {}
        for j in dict.fromkeys(j for i in group.ops for j in edges[i] if home[j] != at):
            size = sum(graph.spec(value).nbytes or 0 for value in ops[j].outputs if value)
            nbytes[home[j]] = nbytes.get(home[j], 0) + (size if ops[j].worker != group.worker else 0)
        found.append({j: _ROUND_TRIP_S + size / _BANDWIDTH for j, size in nbytes.items()})
    return found


def _simulated(groups: Sequence[_Group], reads: Sequence[Mapping[int, float]]) -> tuple[float, list[int]]:
    """Return the makespan [s], and the groups in the order in which they start; fewer in a cycle."""
    after: list[list[int]] = [[] for _ in groups]
    missing, ready_s = [len(found) for found in reads], [0.0] * len(groups)
    for i, found in enumerate(reads):
        for j in found:
            after[j].append(i)
    # Dask gives priority to tasks that only send.
    queue = [(0.0, group.to is None, i) for i, group in enumerate(groups) if not missing[i]]
    heapq.heapify(queue)
    free_s: dict[str, float] = {}
    order, last_s = [], 0.0
    while queue:
        now_s, _, i = heapq.heappop(queue)
        order.append(i)
        group = groups[i]
        stop_s = max(now_s, free_s.get(group.worker, 0.0)) + _TASK_S + group.seconds
        free_s[group.worker] = stop_s
        last_s = max(last_s, stop_s)
        for k in after[i]:
            ready_s[k] = max(ready_s[k], stop_s + reads[k][i])
            missing[k] -= 1
            if not missing[k]:
                heapq.heappush(queue, (ready_s[k], groups[k].to is None, k))
    return last_s, order


def _merged_window(groups: Sequence[_Group], reads: Sequence[Mapping[int, float]]) -> list[_Group]:
    """Merge groups with those that they read, and groups that send to the same workers."""
    kept: list[_Group] = list(groups)
    known = [dict(found) for found in reads]
    best_s, order = _simulated(kept, known)
    is_better = True
    while is_better:
        is_better = False
        for a, b in _pairs(kept, known):
            trial, trial_reads = _joined(kept, known, a, b)
            seconds, found = _simulated(trial, trial_reads)
            if len(found) == len(trial) and seconds <= best_s:
                kept, known, best_s, order, is_better = trial, trial_reads, seconds, found, True
                break
    return [kept[i] for i in order]


def _pairs(groups: Sequence[_Group], reads: Sequence[Mapping[int, float]]) -> Iterator[tuple[int, int]]:
    """Yield pairs of groups that may be one."""
    last: dict[tuple[str, frozenset[str]], int] = {}
    for i, group in enumerate(groups):
        if group.to is not None:
            key = (group.worker, group.to)
            if key in last:
                yield last[key], i
            last[key] = i
            continue
        for j in reads[i]:
            if groups[j].worker == group.worker and groups[j].to is None:
                yield j, i


def _joined(
    groups: Sequence[_Group], reads: Sequence[Mapping[int, float]], a: int, b: int
) -> tuple[list[_Group], list[dict[int, float]]]:
    """Return groups of which two are one, in the place of the first."""
    one, other = groups[a], groups[b]
    both = _Group(one.worker, sorted([*one.ops, *other.ops]), one.seconds + other.seconds, one.to)
    number = [i - (i > b) if i != b else a - (a > b) for i in range(len(groups))]
    joined = [both if i == a else group for i, group in enumerate(groups) if i != b]
    found: list[dict[int, float]] = [{} for _ in joined]
    for i, needed in enumerate(reads):
        at = number[i]
        for j, seconds in needed.items():
            if number[j] != at:
                found[at][number[j]] = max(seconds, found[at].get(number[j], 0.0))
    return joined, found


def _with_sends(graph: Graph, groups: Sequence[_Group]) -> Iterator[list[int]]:
    """Yield groups with what they send to others, if that is all that is read of them."""
    edges, ops = graph.live_edges, graph.live_ops
    home = {i: at for at, group in enumerate(groups) for i in group.ops}
    wanted = set(graph.outputs)
    read_by: list[set[int]] = [set() for _ in groups]
    for i, before in enumerate(edges):
        for j in before:
            if home[i] != home[j]:
                read_by[home[j]].add(home[i])
    sends: dict[int, int] = {}
    for at, group in enumerate(groups):
        is_wanted = any(not wanted.isdisjoint(ops[i].outputs) for i in group.ops)
        if group.to is None and not is_wanted and len(read_by[at]) == 1:
            (reader,) = read_by[at]
            sources = {home[j] for i in groups[reader].ops for j in edges[i]}
            if groups[reader].to is not None and sources == {at}:
                sends[reader] = at
    for at, group in enumerate(groups):
        if at not in sends:
            more = (groups[reader].ops for reader, source in sends.items() if source == at)
            yield sorted([*group.ops, *_chained(more)])


def _chained(lists: Iterable[list[int]]) -> list[int]:
    return [i for one in lists for i in one]
