"""Measured topology: the hosts of a cluster, and the costs of Dask as processor time of its processes.

Processor time is the same on a busy machine. Only latencies are measured by the clock.
"""

from __future__ import annotations

import operator
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dask.base import annotate
from distributed import Client, wait

from ferroflow_dask.annotations import BUNDLE_ANNOTATION
from ferroflow_dask.clients import ask_workers, check_synchronous, workers_of
from ferroflow_dask.deploy.calibration import Calibration
from ferroflow_dask.deploy.rates import at_least, task_name
from ferroflow_dask.scheduler import install, installed, uninstall
from ferroflow_dask.topology import Host, Link, Runtime, Topology, Worker

#: Tasks of a measurement, its repetitions, submissions, and how long the cluster is watched while idle [s].
_TASKS, _REPETITIONS, _SUBMISSIONS, _IDLE_S = 300, 3, 20, 0.4
_FETCHES = 7
#: How long a measurement waits for tasks [s].
_PATIENCE_S = 60.0
#: The intervals of Dask's messages: `BatchedSend` of scheduler and worker [s].
_TO_WORKERS_S, _TO_SCHEDULER_S = 5e-3, 2e-3
#: The largest relative variation of costs that is believed.
_MOST_NOISE = 0.5
#: Nothing is as fast [s].
_LEAST_S = 1e-6
#: What is assumed between hosts if there is one: 10 Gbit/s.
_ASSUMED = Link(1e-4, 1.25e9)
#: A resource that no worker has.
_NOWHERE = {"ferroflow-calibration": 1.0}


class _Spent(NamedTuple):
    """Processor time of the client's, the scheduler's and the workers' processes, and time [s]."""

    client_s: float
    scheduler_s: float
    workers_s: float
    elapsed_s: float


class _Costs(NamedTuple):
    """Processor time [s] of a submission, and of a task: sending, arriving, messages, workers.

    `noise` is its relative variation.
    """

    submit_s: float
    client_s: float
    graph_s: float
    message_s: float
    worker_s: float
    noise: float


def measured_topology(client: Client, found: Calibration) -> Topology:
    """Return a cluster as a topology, with measured costs of Dask; takes some seconds.

    The cluster should be idle. If the plugin is installed, it is uninstalled for a part of the measurement.

    Parameters
    ----------
    client : distributed.Client
        Synchronous.
    found : Calibration
    """
    check_synchronous(client, "measured_topology")
    with client.as_current():
        return _measured(client, found)


def _measured(client: Client, found: Calibration) -> Topology:
    plugin = installed(client)
    with_plugin = _costs(client) if plugin is not None else None
    if plugin is not None:
        uninstall(client)
    try:
        costs = _costs(client)
        fetch_s = _fetch_s(client)
    finally:
        if plugin is not None:
            install(client, plugin.policy, without=plugin.without, **plugin.options)
    extra_s = 0.0 if with_plugin is None else with_plugin.message_s - costs.message_s
    return _topology(client, found, costs, fetch_s, max(0.0, extra_s))


def _topology(client: Client, found: Calibration, costs: _Costs, fetch_s: float, plugin_s: float) -> Topology:
    profile = found.profile
    latency_s = at_least(1e-5, (profile.round_trip_s - costs.message_s - costs.worker_s) / 2)
    runtime = Runtime(
        submit_s=costs.submit_s,
        client_task_s=costs.client_s,
        graph_task_s=costs.graph_s,
        message_s={
            "task-finished": costs.message_s,
            # Messages of one key, without a transition of a task.
            "add-keys": costs.message_s / 8,
            "other": costs.message_s / 20,
        },
        worker_task_s=costs.worker_s,
        fetch_s=fetch_s,
        plugin_task_s=plugin_s,
        noise=costs.noise,
        to_workers_s=_TO_WORKERS_S,
        to_scheduler_s=_TO_SCHEDULER_S,
    )
    workers = workers_of(client)
    cores = ask_workers(client, _cores)
    by_host: dict[str, list[str]] = {}
    for address in workers:
        by_host.setdefault(found.hosts.get(address, address), []).append(address)
    bandwidth = found.bandwidths.get("on one host", profile.bandwidth)
    between = found.bandwidths.get("between hosts")
    link = _ASSUMED if between is None else Link(latency_s / 2, between)
    hosts = []
    for at, addresses in enumerate(by_host.values()):
        each = tuple(
            Worker(workers[one]["nthreads"], memory_nbytes=int(workers[one]["memory_limit"] or 0))
            for one in addresses
        )
        n_cores = max(cores.get(one, 1) for one in addresses)
        hosts.append(Host(f"host-{at}", n_cores, each, "", link, Link(latency_s, bandwidth)))
    return Topology(hosts, runtime=runtime, name="calibrated")


def _cores() -> int:
    """Return the cores that a process may use; runs on workers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor_s() -> tuple[int, float]:
    return os.getpid(), time.process_time()


def _costs(client: Client) -> _Costs:
    """Measure with tasks that do nothing, as medians of some repetitions."""
    _finish(client, _TASKS // 5)  # opens connections, imports
    idle = _spent(client, lambda: time.sleep(_IDLE_S))
    rates = [seconds / idle.elapsed_s for seconds in idle[:3]]
    found = [(_arrival(client, rates), _run(client, rates)) for _ in range(_REPETITIONS)]
    arrival = [statistics.median(one[0][at] for one in found) for at in range(3)]
    run = [statistics.median(one[1][at] for one in found) for at in range(3)]
    noise = _variation([sum(one[1]) for one in found])
    submit_s = at_least(_LEAST_S, _submission(client, rates)[0] - run[0])
    is_one_process = client.run_on_scheduler(os.getpid) == os.getpid()
    in_workers = os.getpid() in ask_workers(client, os.getpid).values()
    if in_workers:
        # Threads of one process share its interpreter lock. What each part takes cannot be told apart.
        whole = max(run[0], _LEAST_S)
        return _Costs(submit_s, 0.0, whole / 3, whole / 3, whole / 3, noise)
    if is_one_process:
        # One event loop has the time of both: all of it is the scheduler's.
        message_s = at_least(_LEAST_S, run[0] - arrival[0])
        return _Costs(submit_s, 0.0, arrival[0], message_s, at_least(_LEAST_S, run[2]), noise)
    return _Costs(
        submit_s,
        at_least(_LEAST_S, run[0]),
        at_least(_LEAST_S, arrival[1]),
        at_least(_LEAST_S, run[1] - arrival[1]),
        at_least(_LEAST_S, run[2]),
        noise,
    )


def _variation(seconds: list[float]) -> float:
    """Return the standard deviation of durations, relative to their mean."""
    mean_s = statistics.fmean(seconds)
    return min(_MOST_NOISE, statistics.stdev(seconds) / mean_s) if mean_s > 0 else 0.0


def _arrival(client: Client, idle: list[float]) -> list[float]:
    """Return the processor time for each task that arrives and cannot start [s]."""
    futures: list[Any] = []

    def arrive() -> None:
        futures.extend(_get(client, _TASKS, resources=_NOWHERE))
        until_s = time.monotonic() + _PATIENCE_S
        while not client.run_on_scheduler(_has, futures[-1].key) and time.monotonic() < until_s:
            time.sleep(0.01)

    found = _each(_spent(client, arrive), idle, _TASKS)
    futures.clear()
    return found


def _run(client: Client, idle: list[float]) -> list[float]:
    """Return the processor time for each task, from its graph to its result [s]."""
    return _each(_spent(client, lambda: _finish(client, _TASKS)), idle, _TASKS)


def _submission(client: Client, idle: list[float]) -> list[float]:
    """Return the processor time of a graph of one task [s]."""

    def submit() -> None:
        for _ in range(_SUBMISSIONS):
            _finish(client, 1)

    return _each(_spent(client, submit), idle, _SUBMISSIONS)


def _each(spent: _Spent, idle: list[float], n: int) -> list[float]:
    return [
        max(0.0, seconds - rate * spent.elapsed_s) / n for seconds, rate in zip(spent[:3], idle, strict=True)
    ]


def _finish(client: Client, n: int) -> None:
    wait(_get(client, n))


def _get(client: Client, n: int, **options: Any) -> list[Any]:
    name = task_name()
    graph: dict[Any, Any] = {(name, i): (operator.neg, i) for i in range(n)}
    with annotate(**{BUNDLE_ANNOTATION: False}):
        found: list[Any] = client.get(graph, list(graph), sync=False, **options)
    return found


def _has(key: Any, dask_scheduler: Any = None) -> bool:
    return key in dask_scheduler.tasks


def _spent(client: Client, action: Callable[[], object]) -> _Spent:
    """Return the processor time that an action takes, in all processes."""
    before, start = _used(client), time.monotonic()
    action()
    after, stop = _used(client), time.monotonic()
    spent = [_sum(b, a) for b, a in zip(before, after, strict=True)]
    return _Spent(spent[0], spent[1], spent[2], stop - start)


def _sum(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    return sum(seconds - before.get(process, seconds) for process, seconds in after.items())


def _used(client: Client) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    on_scheduler = [client.run_on_scheduler(_processor_s)]
    on_workers = ask_workers(client, _processor_s).values()
    return dict([_processor_s()]), dict(on_scheduler), dict(on_workers)


def _fetch_s(client: Client) -> float:
    """Return how much longer a task takes that fetches a small result, as a median [s]."""
    addresses = list(workers_of(client))
    if len(addresses) < 2:
        return 0.0
    here, there = addresses[:2]
    taken: dict[str, list[float]] = {here: [], there: []}
    for _ in range(_FETCHES):
        for where, seconds in taken.items():
            root = client.submit(operator.neg, 1, key=task_name(), workers=[here])
            wait(root)
            start = time.monotonic()
            wait(client.submit(operator.neg, root, key=task_name(), workers=[where]))
            seconds.append(time.monotonic() - start)
    return max(0.0, statistics.median(taken[there]) - statistics.median(taken[here]))
