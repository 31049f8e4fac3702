"""Account of the time of a strategy, predicted and measured: compute, transfers, Dask, and waiting.

It is that of the worker that computes most. Before each of its tasks, it waits until the last result that the
task reads exists on another worker. Then that result is transferred. The rest of the gap is Dask's: messages,
the scheduler, and the worker's own work for a task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ferroflow_dask.search import Problem, Simulation

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Account:
    """Parts of the time from the submission to the result, on the worker that computes most.

    Parameters
    ----------
    compute_s, transfer_s, dask_s, waiting_s : float
        [s]
    in_all_s : float
        Compute time of all workers [s].
    """

    compute_s: float
    transfer_s: float
    dask_s: float
    waiting_s: float
    in_all_s: float


class Span(NamedTuple):
    """When and where a task ran, and which tasks it read.

    Parameters
    ----------
    worker : hashable
    start_s, stop_s : float
    reads : tuple of hashable
    transfers : tuple of (float, float)
        When results were on their way to it [s].
    """

    worker: Any
    start_s: float
    stop_s: float
    reads: tuple[Any, ...] = ()
    transfers: tuple[Interval, ...] = ()


def account_of(spans: Mapping[Any, Span], start_s: float, stop_s: float) -> Account:
    """Return the account of tasks between the submission and the result; each worker has one thread."""
    busy_s: dict[Any, float] = {}
    for span in spans.values():
        busy_s[span.worker] = busy_s.get(span.worker, 0.0) + span.stop_s - span.start_s
    busiest = max(busy_s, key=lambda worker: busy_s[worker])
    transfer_s = dask_s = waiting_s = 0.0
    now_s = start_s
    own = [span for span in spans.values() if span.worker == busiest]
    for span in sorted(own, key=lambda span: (span.start_s, span.stop_s)):
        others = (spans[task] for task in span.reads if task in spans)
        ready_s = max((one.stop_s for one in others if one.worker != busiest), default=now_s)
        since_s = max(now_s, min(ready_s, span.start_s))
        moved_s = _covered_s(span.transfers, since_s, span.start_s)
        waiting_s += since_s - now_s
        transfer_s += moved_s
        dask_s += span.start_s - since_s - moved_s
        now_s = span.stop_s
    last_s = max(span.stop_s for span in spans.values())
    return Account(
        busy_s[busiest],
        transfer_s,
        dask_s + stop_s - last_s,
        waiting_s + last_s - now_s,
        sum(busy_s.values()),
    )


def _covered_s(intervals: Sequence[Interval], start_s: float, stop_s: float) -> float:
    """Return how much of the time between two moments is in some interval [s]."""
    total_s = 0.0
    for first_s, last_s in sorted(intervals):
        begin_s, end_s = max(first_s, start_s), min(last_s, stop_s)
        if end_s > begin_s:
            total_s += end_s - begin_s
            start_s = end_s
    return total_s


def predicted(problem: Problem, found: Simulation) -> Account:
    """Return the account of a simulated strategy: each part is a task."""
    before_s = found.makespan_s - max(max(stops) for stops in found.stops_s)
    spans = {}
    for node, choice in enumerate(found.choices):
        for part, worker in enumerate(choice.workers):
            start_s, stop_s = (times[node][part] + before_s for times in (found.starts_s, found.stops_s))
            reads = _reads(problem, found, node, part)
            transfers = tuple((start_s - moving_s, start_s) for moving_s in reads.values())
            spans[node, part] = Span(worker, start_s, stop_s, tuple(reads), transfers)
    return account_of(spans, 0.0, found.makespan_s)


def _reads(problem: Problem, found: Simulation, node: int, part: int) -> dict[tuple[int, int], float]:
    """Return for each part that a part reads, how long its result is on its way [s]."""
    machine, worker = problem.machine, found.choices[node].workers[part]
    moving_s = {}
    for producer, table in found.tables[node].items():
        homes = found.choices[producer].workers
        for giver, (home, readers) in enumerate(zip(homes, table.readers, strict=True)):
            if part in readers:
                nbytes = sum(size for taker, _, size in table.reads[giver] if taker == part)
                route = None if home == worker else machine.route(home, worker)
                way_s = 0.0 if route is None else nbytes / route.bandwidth + route.latency_s
                moving_s[producer, giver] = way_s
    return moving_s


def measured(
    records: Iterable[Mapping[str, Any]],
    reads: Mapping[Any, Iterable[Any]],
    start_s: float,
    stop_s: float,
) -> Account:
    """Return the account of a run.

    Parameters
    ----------
    records : iterable of mapping
        Of Dask's task stream: `key`, `worker` and `startstops` of each task.
    reads : mapping
        Keys that each task of the run reads; other tasks are left out.
    start_s, stop_s : float
        When the run was submitted, and when its result was there, by the clock of the workers [s].
    """
    spans = {}
    for record in records:
        times: dict[str, list[Interval]] = {"compute": [], "transfer": []}
        for one in record["startstops"]:
            times.setdefault(one["action"], []).append((one["start"], one["stop"]))
        if times["compute"] and record["key"] in reads:
            (first_s, _), (_, last_s) = times["compute"][0], times["compute"][-1]
            transfers = tuple(times["transfer"])
            read = tuple(reads[record["key"]])
            spans[record["key"]] = Span(record["worker"], first_s, last_s, read, transfers)
    return account_of(spans, start_s, stop_s)
