"""Streams between the scheduler and its workers send at once, until there is too much to send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_tests import runs_on
from distributed import Client, Worker
from distributed.comm import CommClosedError
from one_loop import Cluster, on_cluster
from waiting import comes

from ferroflow_dask import FerroflowPlugin, install, uninstall
from ferroflow_dask.scheduler.features import low_latency_worker as batching
from ferroflow_dask.scheduler.features.low_latency_messages import TOPIC
from ferroflow_dask.scheduler.features.low_latency_worker import (
    Interval,
    Load,
    WorkerLoad,
)

#: What Dask waits between two batches to a worker and back [s].
DASKS = (0.005, 0.002)
#: From a client and back [s].
DASKS_CLIENT = (0.01, 0.002)


def intervals(cluster: Cluster) -> list[tuple[Any, Any]]:
    return [
        (cluster.scheduler.stream_comms[worker.address].interval, worker.batched_stream.interval)
        for worker in cluster.workers
    ]


def are_short(cluster: Cluster) -> bool:
    return all(type(pause).__name__ == "Interval" for pair in intervals(cluster) for pause in pair)


def are_dasks(cluster: Cluster) -> bool:
    return all(pair == DASKS for pair in intervals(cluster))


def ours(plugins: Iterable[str]) -> list[str]:
    return [name for name in plugins if "ferroflow-batching" in name]


@pytest.mark.cluster
@runs_on(on_cluster)
async def test_all_streams_are_shortened_and_given_back(cluster: Cluster) -> None:
    await comes(lambda: are_short(cluster))
    async with Worker(cluster.scheduler.address, nthreads=1) as late:
        assert type(late.batched_stream.interval).__name__ == "Interval"
        cluster.workers.append(late)
        await comes(lambda: are_short(cluster))
        assert await cluster.client.gather(cluster.map(50, 0.0)) == list(range(50))
        await uninstall(cluster.scheduler)
        await comes(lambda: are_dasks(cluster))
        cluster.workers.remove(late)
    assert not ours(cluster.scheduler.worker_plugins)


@pytest.mark.cluster
@runs_on(on_cluster)
async def test_installing_again_keeps_them_short(cluster: Cluster) -> None:
    for _ in range(20):
        await uninstall(cluster.scheduler)
        await cluster.client.register_plugin(FerroflowPlugin())
        await cluster.client.register_plugin(FerroflowPlugin())
    owners = (cluster.scheduler.worker_plugins, *(worker.plugins for worker in cluster.workers))
    await comes(lambda: all(len(ours(plugins)) == 1 for plugins in owners))
    assert are_short(cluster)
    assert await cluster.client.gather(cluster.map(50, 0.0)) == list(range(50))
    await uninstall(cluster.scheduler)
    await comes(lambda: are_dasks(cluster))


@pytest.mark.cluster
def test_a_worker_that_leaves_while_it_is_told_is_no_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_told = 0

    async def gone(**_: Any) -> None:
        nonlocal n_told
        n_told += 1
        raise CommClosedError("it has left")

    async def test(cluster: Cluster) -> None:
        monkeypatch.setattr(cluster.scheduler, "broadcast", gone)
        for n in (1, 2):
            await cluster.client.register_plugin(FerroflowPlugin())
            await comes(lambda n=n: n_told == 2 * n - 1)
            await uninstall(cluster.scheduler)
            await comes(lambda n=n: n_told == 2 * n)
            assert not ours(cluster.scheduler.worker_plugins)
        await asyncio.sleep(0.05)  # what was raised would be logged a little later

    others = {
        "ferroflow.features.bundles": False,
        "ferroflow.features.prefetch": False,
        "ferroflow.features.working_sets": False,
        "ferroflow.inline-limit": 0,
    }
    on_cluster(test, plugin=False, config=others)
    assert "Traceback" not in caplog.text


def told(scheduler: Any) -> set[str]:
    """Return the clients that are told whether messages leave at once."""
    clients: set[str] = scheduler._broker._topics[TOPIC].subscribers
    return clients


@pytest.mark.cluster
@runs_on(on_cluster, plugin=False)
async def test_clients_have_short_streams_too(cluster: Cluster) -> None:
    def between(client: Client) -> tuple[Any, Any]:
        there = cluster.scheduler.client_comms.get(client.id)
        here = client.scheduler_comm
        return getattr(here, "interval", None), getattr(there, "interval", None)

    assert between(cluster.client) == DASKS_CLIENT
    await install(cluster.client)
    async with Client(cluster.scheduler.address, asynchronous=True) as late:
        for client in (cluster.client, late):
            await comes(lambda client=client: isinstance(between(client)[1], Interval))
        await comes(lambda: isinstance(between(cluster.client)[0], Interval))
        assert between(late)[0] == DASKS_CLIENT[0]  # nobody has told it
        assert await late.submit(sum, [1, 2]) == 3
        await install(cluster.client, policy="ring")
        await comes(lambda: isinstance(between(cluster.client)[0], Interval))
        await uninstall(late)
        for client in (cluster.client, late):
            await comes(lambda client=client: between(client) == DASKS_CLIENT)
        await install(cluster.client)
        await comes(lambda: isinstance(between(cluster.client)[0], Interval))
        await uninstall(cluster.client)
        assert between(cluster.client) == DASKS_CLIENT
        await install(late)
        await comes(lambda: isinstance(between(late)[0], Interval))
        assert between(cluster.client)[0] == DASKS_CLIENT[0]  # which does not take part any more
    await comes(lambda: late.id not in cluster.scheduler.client_comms)
    assert late.id not in told(cluster.scheduler)


@pytest.mark.cluster
@runs_on(on_cluster, plugin=False, limit_s=30)
async def test_a_client_keeps_its_short_interval_when_another_client_installs_again(cluster: Cluster) -> None:
    def is_short(client: Client) -> bool:
        return isinstance(client.scheduler_comm.interval, Interval)

    await install(cluster.client)
    await comes(lambda: is_short(cluster.client))
    async with Client(cluster.scheduler.address, asynchronous=True) as other:
        await install(other, policy="ring")
        await comes(lambda: is_short(cluster.client) and is_short(other))
    await uninstall(cluster.client)
    assert not told(cluster.scheduler)


@pytest.mark.cluster
@pytest.mark.filterwarnings("default:ferroflow:UserWarning")
@runs_on(on_cluster, plugin=False)
async def test_a_failure_gives_all_ends_back(cluster: Cluster) -> None:
    def here() -> Any:
        return cluster.client.scheduler_comm.interval

    def there() -> Any:
        return cluster.scheduler.client_comms[cluster.client.id].interval

    await install(cluster.client)
    await comes(lambda: isinstance(here(), Interval) and isinstance(there(), Interval))
    await comes(lambda: are_short(cluster))
    cluster.stealing.guard.fail(ZeroDivisionError("the policy is broken"))
    await comes(lambda: (here(), there()) == DASKS_CLIENT)
    await comes(lambda: are_dasks(cluster))
    assert await cluster.client.submit(sum, [1, 2]) == 3


@pytest.mark.cluster
@runs_on(on_cluster)
async def test_an_interval_of_somebody_else_stays(cluster: Cluster) -> None:
    await comes(lambda: are_short(cluster))
    address = cluster.workers[0].address
    cluster.scheduler.stream_comms[address].interval = 0.123
    await uninstall(cluster.scheduler)
    await comes(lambda: intervals(cluster)[1] == DASKS)
    assert cluster.scheduler.stream_comms[address].interval == 0.123


#: A time longer than a window and one shorter, of which sums are exact [s].
LONG_S, SHORT_S = 2**-5, 2**-8
#: What passes between two questions, and what of it the thread worked [s]: the load that is told.
WATCHED: dict[str, tuple[list[tuple[float, float]], list[float]]] = {
    "the part of the last window": (
        [(LONG_S, LONG_S), (LONG_S, LONG_S / 2), (LONG_S, 0.0)],
        [1.0, 0.5, 0.0],
    ),
    "not before a window is over": ([(LONG_S, LONG_S)] + [(SHORT_S, 0.0)] * 3, [1.0, 1.0, 1.0, 0.0]),
    "nobody asked for long": ([(LONG_S, LONG_S), (0.5, 0.5), (LONG_S, LONG_S)], [1.0, 0.0, 1.0]),
    "a clock that is set back": ([(LONG_S, 0.0), (-5.0, 0.0), (LONG_S, 0.0)], [0.0, 1.0, 0.0]),
}


@pytest.mark.parametrize(("passed", "expected"), WATCHED.values(), ids=WATCHED)
def test_the_load_is_that_of_the_last_window(
    passed: list[tuple[float, float]], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loads(Load(), passed, monkeypatch) == expected


def test_a_worker_with_other_tasks_to_run_is_under_full_load(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: list[str] = []
    worker: Any = SimpleNamespace(state=SimpleNamespace(ready=ready))
    load = WorkerLoad(worker)
    idle = [(LONG_S, 0.0)] * 2
    assert loads(load, idle, monkeypatch) == [0.0, 0.0]
    ready.append("next")
    assert loads(load, idle, monkeypatch) == [1.0, 1.0]
    ready.clear()
    assert loads(load, idle, monkeypatch) == [0.0, 0.0]


def loads(load: Load, passed: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return what a load is after each of the times that pass [s], with what of it the thread worked [s]."""
    now_s, worked_s = 100.0, 0.0
    monkeypatch.setitem(Load.at.__globals__, "_busy_s", lambda: worked_s)
    load.at(now_s)
    found = []
    for elapsed_s, part_s in passed:
        now_s += elapsed_s
        worked_s += part_s
        found.append(load.at(now_s))
    return found


def test_time_at_work_is_not_that_asleep() -> None:
    ran_s, busy_s = time.thread_time(), batching._busy_s()
    while time.thread_time() < ran_s + 0.05:
        pass
    assert batching._busy_s() - busy_s > 0.03  # what is under way is told some milliseconds late
    start_s, busy_s = time.perf_counter(), batching._busy_s()
    time.sleep(0.1)
    assert batching._busy_s() - busy_s < time.perf_counter() - start_s - 0.05


@pytest.mark.parametrize(("load", "share"), [(0.0, 0.0), (0.8, 0.0), (0.9, 0.5), (1.0, 1.0), (1.2, 1.0)])
def test_pauses_grow_with_the_load(load: float, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "at", lambda self, now_s: load)
    assert 10.0 + Interval(Load(), 0.004) == pytest.approx(10.0 + share * 0.004)
