"""Samples on the scheduler: what runs first of a graph of unknown tasks, and what may happen meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from bundled import (
    CALLS,
    Bundling,
    Gate,
    PlannedError,
    add,
    fail_first,
    gates,
    keys_of,
    leaves,
    on_bundling_cluster,
    task,
)
from cluster_tests import runs_on
from dask.utils import key_split
from distributed import Client, Status, Worker
from one_loop import Cluster, on_cluster
from waiting import comes

from ferroflow_dask import explain, uninstall
from ferroflow_dask.bundling import rewrite
from ferroflow_dask.bundling.plan import Plan, Until
from ferroflow_dask.bundling.snapshot import SentGraph
from ferroflow_dask.policy import stealing
from ferroflow_dask.scheduler.graphs import arrivals, samples
from ferroflow_dask.scheduler.graphs.samples import Samples

pytestmark = pytest.mark.cluster

#: Chains of two tasks in a graph: for two threads, enough for a sample of four tasks of each prefix.
N = 40
VALUES = [i + 2 for i in range(N)]


def set_waits(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Set how long the rest of a graph waits for a sample, by the names of the bounds [s]."""
    for name, value in seconds.items():
        monkeypatch.setattr(samples, f"_{name.upper()}", value)


@pytest.fixture(autouse=True)
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[set[Any]]:
    """Wait for samples and bundles however busy the machine is; return the keys of each sample that ran."""
    set_waits(monkeypatch, first_s=100.0, least_s=100.0)  # longer than a test may take
    monkeypatch.setattr(stealing, "_LATE_S", 60.0)
    CALLS.clear()
    found: list[set[Any]] = []
    stock = Samples.wait

    async def wait(self: Samples, keys: frozenset[Any], *args: Any) -> None:
        found.append(set(keys))
        await stock(self, keys, *args)

    monkeypatch.setattr(Samples, "wait", wait)
    return found


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gates() as make:
        yield make()


def graph(load: Callable[..., Any] = task, **options: Any) -> list[Any]:
    """Return tasks that each read one other task, which `load` makes."""
    return [task(f"clean-{i}", load(f"load-{i}", i, **options)) for i in range(N)]


def prefixes(keys: set[Any]) -> Counter[str]:
    return Counter(map(key_split, keys))


async def can_bundle(cluster: Bundling) -> None:
    """Wait until all workers have announced that they can run bundles."""
    await comes(cluster.stealing.graphs._capable.are_all)


async def are_created(cluster: Bundling, collections: list[Any]) -> None:
    """Wait until all tasks of a graph exist on the scheduler, under their own keys."""
    await comes(lambda: keys_of(*collections) <= set(cluster.scheduler.tasks))


async def is_cancelled(cluster: Bundling) -> None:
    """Wait until the scheduler has cancelled a graph and has no tasks."""
    events = cluster.scheduler.get_events
    await comes(lambda: "cancel" in {event["action"] for _, event in events(cluster.client.id)})
    await cluster.is_empty()


def on_capable_cluster(test: Callable[[Bundling], Any], **options: Any) -> None:
    async def run(cluster: Bundling) -> None:
        await can_bundle(cluster)
        await test(cluster)

    on_bundling_cluster(run, **options)


# The first run


@runs_on(on_capable_cluster)
async def test_a_new_cluster_bundles_a_graph_and_runs_each_task_once(
    cluster: Bundling, sampled: list[set[Any]]
) -> None:
    total = task("total-0", *graph())
    assert await cluster.values(total) == [sum(VALUES) + 1]
    assert [prefixes(keys) for keys in sampled] == [{"load": 4, "clean": 4}]
    assert cluster.counts["created"] > 0
    assert len(cluster.keys) < len(keys_of(total))
    assert CALLS.keys() == keys_of(total)
    assert set(CALLS.values()) == {1}
    story = await explain(cluster.client, min(sampled[0]))
    assert [decision.what for decision in story][:2] == ["in a sample", "placed"]
    assert story[0].reason == "too little is known of its prefix"
    await cluster.is_empty()
    assert await cluster.values(total) == [sum(VALUES) + 1]
    assert len(sampled) == 1  # now its tasks are known


@runs_on(on_capable_cluster)
async def test_a_client_keeps_what_it_wants_of_a_sample_and_releases_the_rest(
    cluster: Bundling, sampled: list[set[Any]]
) -> None:
    futures = cluster.client.compute(graph())
    assert await cluster.client.gather(futures) == VALUES
    (keys,) = sampled
    wanted = {future.key for future in futures}
    assert keys & wanted
    assert keys - wanted
    (state,) = (one for one in cluster.scheduler.clients.values() if one.wants_what)
    await comes(lambda: {ts.key for ts in state.wants_what} == wanted)
    cluster.scheduler.validate_state()
    assert await cluster.client.gather(futures) == VALUES


@runs_on(on_capable_cluster)
async def test_workers_drop_what_only_the_sample_reads(
    cluster: Bundling, sampled: list[set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    states: Counter[tuple[str, str]] = Counter()
    stock = rewrite.rewrite

    def plan(graph: SentGraph, *args: Any) -> Plan:
        states.update((key_split(key), cluster.scheduler.tasks[key].state) for key in graph.sampled)
        return stock(graph, *args)

    monkeypatch.setattr(arrivals, "rewrite", plan)
    assert await cluster.values(task("total-0", *graph())) == [sum(VALUES) + 1]
    assert states == {("load", "released"): 4, ("clean", "memory"): 4}
    assert set(CALLS.values()) == {1}
    await cluster.is_empty()


# Failures


@runs_on(on_capable_cluster)
async def test_the_error_of_a_task_in_a_sample_is_that_of_its_readers(
    cluster: Bundling, sampled: list[set[Any]]
) -> None:
    futures = cluster.client.compute(graph(function=fail_first))
    found = await cluster.client.gather(
        [cluster.client.submit(add, "sum-0", 1, key="sum-0"), *futures], errors="skip"
    )
    errors = [future for future in futures if future.status == "error"]
    (failed,) = errors
    i = failed.key.partition("-")[2]
    error = await failed.exception()
    assert isinstance(error, PlannedError)
    assert error.args == (f"load-{i}",)
    assert f"load-{i}" in sampled[0]
    assert cluster.scheduler.tasks[failed.key].exception_blame.key == f"load-{i}"
    assert found == [2, *(value for value in VALUES if value != int(i) + 2)]
    assert {n for key, n in CALLS.items() if key != "fail_first"} == {1}


@runs_on(on_capable_cluster)
async def test_a_sample_runs_again_elsewhere_if_its_worker_is_lost(
    cluster: Bundling, gate: Gate, sampled: list[set[Any]]
) -> None:
    futures = cluster.client.compute(graph(gate.task))
    await comes(gate.reached.is_set)
    await cluster.workers[0].close(executor_wait=False)
    gate.open()
    assert await cluster.client.gather(futures) == VALUES
    assert len(sampled) == 1


def broken(*_: Any, **__: Any) -> None:
    raise ValueError("planned")


@pytest.mark.parametrize(
    ("patched", "name"),
    [(rewrite, "sample_of"), (samples, "RunningSample"), (Until, "expected_s"), (rewrite, "_bundled")],
    ids=[
        "its sample is not found",
        "its sample is not followed",
        "its duration is not known",
        "it is not cut",
    ],
)
@runs_on(on_capable_cluster)
async def test_a_graph_runs_although(
    cluster: Bundling, patched: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patched, name, broken)
    assert await cluster.values(*graph()) == VALUES
    await cluster.is_empty()
    assert await cluster.values(*graph()) == VALUES


@runs_on(on_capable_cluster)
async def test_a_graph_with_a_cycle_has_the_error_of_dask(cluster: Bundling) -> None:
    cycle: dict[str, Any] = {f"in-{i}": (add, "", f"in-{(i + 1) % N}") for i in range(N)}
    (future,) = cluster.client.get({**cycle, "out-0": (add, "", "in-0")}, ["out-0"], sync=False)
    with pytest.raises(RuntimeError, match="Cycle detected"):
        await future


# What happens while a sample runs


@runs_on(on_capable_cluster)
async def test_a_graph_runs_as_it_came_after_the_deadline(
    cluster: Bundling, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_waits(monkeypatch, first_s=0.05, busy_s=0.05)
    tasks = graph(gate.task)
    futures = cluster.client.compute(tasks)
    await are_created(cluster, tasks)
    assert cluster.counts["created"] == 0
    gate.open()
    assert await cluster.client.gather(futures) == VALUES
    assert set(CALLS.values()) == {1}


@runs_on(on_capable_cluster)
async def test_a_graph_waits_longer_while_its_sample_occupies_all_threads(
    cluster: Bundling, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_waits(monkeypatch, first_s=0.05, least_s=0.01, busy_s=100.0)
    futures = cluster.client.compute(graph(gate.task))
    await comes(gate.reached.is_set)
    (running,) = cluster.stealing.graphs.samples.running
    deadline = running.deadline
    await comes(lambda: running.deadline > deadline)
    assert cluster.counts["created"] == 0
    gate.open()
    assert await cluster.client.gather(futures) == VALUES
    assert cluster.counts["created"] > 0


@pytest.mark.parametrize(
    ("n_running", "n_workers", "until"),
    [(2, 1, 10.0), (1, 1, 2.0), (2, 0, 2.0)],
    ids=["busy", "idle", "paused"],
)
def test_a_sample_must_occupy_all_threads_to_be_waited_for_longer(
    n_running: int, n_workers: int, until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_waits(monkeypatch, first_s=2.0, least_s=0.05)
    states = {i: SimpleNamespace(state="processing" if i < n_running else "queued") for i in range(4)}
    scheduler: Any = SimpleNamespace(tasks=states, total_nthreads=2, running=range(n_workers))
    now = 0.0
    running = Samples(scheduler).begin(states, lambda: 0.0, lambda: now, lambda: None)
    while not running.is_over():
        now = running.deadline
    assert now == pytest.approx(until)


@runs_on(on_capable_cluster)
async def test_nothing_is_left_of_a_client_that_disappears(cluster: Bundling, gate: Gate) -> None:
    other = await Client(cluster.scheduler.address, asynchronous=True, set_as_default=False)
    futures = other.compute(graph(gate.task))
    await comes(gate.reached.is_set)
    other.scheduler_comm.comm.abort()
    await other._close(fast=True)
    gate.open()
    await comes(lambda: other.id not in cluster.scheduler.clients)
    await cluster.is_empty()
    assert await cluster.values(*graph()) == VALUES
    del futures


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "while a sample runs"])
@runs_on(on_capable_cluster)
async def test_futures_may_be_cancelled(cluster: Bundling, at_once: bool, gate: Gate) -> None:
    futures = cluster.client.compute(graph() if at_once else graph(gate.task))
    if not at_once:
        await comes(gate.reached.is_set)
    await cluster.client.cancel(futures)
    gate.open()
    await comes(lambda: {future.status for future in futures} == {"cancelled"})
    await is_cancelled(cluster)
    assert await cluster.values(task("total-0", *leaves("leaf"))) == [466]


@runs_on(on_capable_cluster)
async def test_dask_runs_the_graph_if_the_plugin_is_uninstalled(cluster: Bundling, gate: Gate) -> None:
    tasks = graph(gate.task)
    futures = cluster.client.compute(tasks)
    await comes(gate.reached.is_set)
    await uninstall(cluster.client)
    cluster.assert_stock()
    await are_created(cluster, tasks)  # the sample has not ended
    gate.open()
    assert await cluster.client.gather(futures) == VALUES
    assert set(CALLS.values()) == {1}


@runs_on(on_cluster, limit_s=30)
async def test_a_scheduler_may_close(cluster: Cluster, gate: Gate) -> None:
    await can_bundle(Bundling(cluster.scheduler, cluster.workers, cluster.client))
    futures = cluster.client.compute(graph(gate.task))
    await comes(gate.reached.is_set)
    gate.open()
    await cluster.client.close()
    await cluster.scheduler.close()
    assert cluster.scheduler.status is Status.closed
    del futures


def test_two_clients_may_wait_for_the_same_sample(
    gate: Gate, sampled: list[set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, stock = threading.Barrier(2), rewrite.rewrite

    def plan(graph: SentGraph, *args: Any) -> Plan:
        found = stock(graph, *args)
        if not graph.sampled:
            barrier.wait(20)
        return found

    monkeypatch.setattr(arrivals, "rewrite", plan)

    async def test(cluster: Bundling) -> None:
        async with Client(cluster.scheduler.address, asynchronous=True, set_as_default=False) as other:
            futures = [one.compute(graph(gate.task)) for one in (cluster.client, other)]
            await comes(lambda: len(sampled) == 2)
            await comes(gate.reached.is_set)
            first, second = sampled
            assert first == second
            gate.open()
            assert await cluster.client.gather(futures[0]) == VALUES
            assert await other.gather(futures[1]) == VALUES
            assert {CALLS[key] for key in first} == {1}
            del futures

    on_capable_cluster(test)


# Graphs without a sample


@runs_on(on_bundling_cluster, resources=())
async def test_there_is_no_sample_without_workers(cluster: Bundling, sampled: list[set[Any]]) -> None:
    tasks = graph()
    futures = cluster.client.compute(tasks)
    await are_created(cluster, tasks)
    async with Worker(cluster.scheduler.address, nthreads=1):
        assert await cluster.client.gather(futures) == VALUES
    assert sampled == []


@runs_on(on_capable_cluster)
async def test_tasks_that_the_client_wants_run_once_although_some_are_in_a_sample(
    cluster: Bundling, sampled: list[set[Any]]
) -> None:
    assert await cluster.values(*leaves("leaf", N)) == [i + 1 for i in range(N)]
    assert [len(keys) for keys in sampled] == [4]
    assert set(CALLS.values()) == {1}


@runs_on(on_bundling_cluster, config={"ferroflow.features.samples": False})
async def test_without_samples_a_graph_of_unknown_tasks_runs_as_it_came(
    cluster: Bundling, sampled: list[set[Any]]
) -> None:
    assert await cluster.values(*leaves("leaf", N)) == [i + 1 for i in range(N)]
    assert sampled == []
    assert cluster.counts["created"] == 0


@runs_on(on_bundling_cluster)
async def test_after_a_restart_an_arriving_graph_is_not_created(cluster: Bundling, gate: Gate) -> None:
    await can_bundle(cluster)
    futures = cluster.client.compute(graph(gate.task))
    await comes(lambda: bool(cluster.scheduler.tasks))
    await cluster.scheduler.restart(stimulus_id="test", wait_for_workers=False, timeout=10)
    gate.open()
    await comes(lambda: not cluster.stealing.graphs._arrivals._under_way)
    assert not cluster.scheduler.tasks
    await comes(lambda: {future.status for future in futures} == {"cancelled"})
