"""Simulations against reality: the same graphs on a real cluster and on its calibrated topology."""

from __future__ import annotations

import math
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dask._task_spec import Task, TaskRef
from dask.typing import Key
from distributed import Client, wait

from ferroflow_dask import install, uninstall
from ferroflow_dask.bench.markdown import number, percent, table
from ferroflow_dask.bench.simulated_graphs import SLEEPS, Sleeps, virtual_graph
from ferroflow_dask.clients import ask_workers
from ferroflow_dask.deploy.calibration import calibration_of
from ferroflow_dask.deploy.local import local_client
from ferroflow_dask.deploy.measured import measured_topology
from ferroflow_dask.replay import Job, JobGraph, simulate_job
from ferroflow_dask.topology import Topology
from ferroflow_dask.virtual.task import sinks

T = TypeVar("T")

POLICIES = ("dask", "ferroflow")
_NAPS, _NAP_S = 20, 0.005


def sleep(seconds: float, nbytes: int, *inputs: object) -> bytes:
    """Take a time, and return so many bytes."""
    time.sleep(seconds)
    return bytes(nbytes)


def dask_graph(sleeps: Sleeps, name: str) -> tuple[dict[Key, Task], list[Key]]:
    """Return the graph for Dask, and the keys that no task reads."""
    keys: list[Key] = [(name, i) for i in range(len(sleeps))]
    graph = {
        key: Task(key, sleep, seconds, nbytes, *(TaskRef(keys[i]) for i in needed))
        for key, (seconds, needed, nbytes) in zip(keys, sleeps, strict=True)
    }
    read = {i for _, needed, _ in sleeps for i in needed}
    return graph, [key for i, key in enumerate(keys) if i not in read]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A graph under a policy: real makespans, and the simulated one [s]."""

    graph: str
    workers: int
    policy: str
    real_s: tuple[float, ...]
    simulated_s: float

    @property
    def median_s(self) -> float:
        """Median of the real makespans [s]."""
        return statistics.median(self.real_s)

    @property
    def error(self) -> float:
        """Relative error of the simulation; below 0 if it is too short."""
        return self.simulated_s / self.median_s - 1

    @property
    def noise(self) -> float:
        """Relative difference of the longest and the shortest real makespan."""
        return max(self.real_s) / min(self.real_s) - 1

    def in_words(self) -> tuple[str, str, str, str]:
        """Return the real makespan, its noise, the simulated one and the error as text."""
        return number(self.median_s), percent(self.noise), number(self.simulated_s), f"{self.error:+.0%}"


def compare(
    graphs: Sequence[str],
    workers: Sequence[int],
    repeat: int,
    *,
    processes: bool = True,
    progress: Callable[[str], object] = lambda _: None,
) -> Iterator[Comparison]:
    """Yield a comparison for each number of workers, graph and policy.

    Parameters
    ----------
    graphs : sequence of str
        Of `SLEEPS`.
    workers : sequence of int
    repeat : int
        Real runs of each.
    processes : bool, optional
        As in `local_client`.
    progress : callable, optional
        Called with a line on the progress.
    """
    for client, topology in calibrated(workers, processes, progress):
        overshoot_s = statistics.median(ask_workers(client, _overshoot_s).values())
        for name in graphs:
            progress(f"{len(topology.workers)} workers: {name}")
            yield from _compare(client, topology, name, repeat, overshoot_s)


def calibrated(
    workers: Sequence[int], processes: bool, progress: Callable[[str], object]
) -> Iterator[tuple[Client, Topology]]:
    """Yield a local cluster and its measured topology for each number of workers."""
    for n in workers:
        with local_client(n, 1, processes) as client:
            progress(f"{n} workers: calibrating")
            yield client, measured_topology(client, calibration_of(client))


def take_turns(client: Client, repeat: int, run: Callable[[], T]) -> dict[str, list[T]]:
    """Return what runs give under each policy; a first run teaches durations and does not count."""
    found: dict[str, list[T]] = {policy: [] for policy in POLICIES}
    for at in range(repeat + 1):
        for policy in POLICIES:
            uninstall(client) if policy == "dask" else install(client)
            result = run()
            if at:
                found[policy].append(result)
    return found


def _overshoot_s() -> float:
    """Return how much longer a process sleeps than it asks for, as a median [s]; runs on workers."""
    taken = []
    for _ in range(_NAPS):
        start = time.perf_counter()
        time.sleep(_NAP_S)
        taken.append(time.perf_counter() - start - _NAP_S)
    return statistics.median(taken)


def _compare(
    client: Client, topology: Topology, name: str, repeat: int, overshoot_s: float
) -> Iterator[Comparison]:
    sleeps = SLEEPS[name]()
    tasks = virtual_graph(sleeps, name, overshoot_s)
    job = Job((JobGraph(tasks, tuple(sinks(tasks))),), name)
    real = take_turns(client, repeat, lambda: _run(client, sleeps, name))
    for policy in POLICIES:
        simulated = simulate_job(job, topology, policy)
        yield Comparison(name, len(topology.workers), policy, tuple(real[policy]), simulated.makespan_s)


def _run(client: Client, sleeps: Sleeps, name: str) -> float:
    graph, keys = dask_graph(sleeps, f"{name}-{uuid.uuid4().hex}")
    start = time.perf_counter()
    futures = client.get(graph, keys, sync=False)
    wait(futures)
    return time.perf_counter() - start


def comparison_table(found: Sequence[Comparison]) -> str:
    """Return the comparisons in markdown, and what they amount to."""
    header = ("graph", "workers", "policy", "real [s]", "noise", "simulated [s]", "error")
    rows = [(one.graph, str(one.workers), one.policy, *one.in_words()) for one in found]
    right, clear = winners(found)
    lines = [
        mean_error(found),
        f"Policies that differ by more than noise: {clear}; the faster one is predicted in {right}.",
    ]
    return table(header, rows, right=header[1:2] + header[3:]) + "\n\n" + "\n".join(lines)


def mean_error(found: Sequence[Comparison]) -> str:
    """Return the mean and the worst error, and what real runs differ by."""
    errors = [math.exp(abs(math.log1p(one.error))) - 1 for one in found]
    noises = [one.noise for one in found]
    return (
        f"Geometric mean of |error|: {percent(_mean(errors))}; worst {percent(max(errors))}.\n"
        f"Real repetitions differ by {percent(_mean(noises))}, at most {percent(max(noises))}."
    )


def _mean(relative: Sequence[float]) -> float:
    """Return the geometric mean of differences, given relative to 1."""
    return math.exp(statistics.fmean(math.log1p(one) for one in relative)) - 1


def winners(found: Sequence[Comparison]) -> tuple[int, int]:
    """Return in how many cases the faster policy is predicted, of those where one clearly is."""
    cases: dict[tuple[str, int], dict[str, Comparison]] = {}
    for one in found:
        cases.setdefault((one.graph, one.workers), {})[one.policy] = one
    right = clear = 0
    for case in cases.values():
        if len(case) < len(POLICIES):
            continue
        first, second = (case[policy] for policy in POLICIES)
        if max(first.real_s) < min(second.real_s) or max(second.real_s) < min(first.real_s):
            clear += 1
            is_first = first.median_s < second.median_s
            right += is_first == (first.simulated_s < second.simulated_s)
    return right, clear
