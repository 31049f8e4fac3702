"""Graphs and the tasks that a scheduler has: kept keys, shared values, changes, and cancelled tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from bundled import (
    CALLS,
    Bundling,
    Gate,
    apart,
    chain,
    fork,
    gates,
    keys_of,
    leaves,
    on_bundling_cluster,
    take_all_for_short,
    task,
)
from cluster_tests import runs_on
from distributed import Client
from distributed.utils_test import captured_logger
from waiting import comes

from ferroflow_dask import install, uninstall
from ferroflow_dask.bundling import rewrite
from ferroflow_dask.scheduler.graphs import arrivals
from ferroflow_dask.scheduler.graphs.bundles import Bundles

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _all_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_for_short(monkeypatch)


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gates() as make:
        yield make()


# Tasks that exist, and values of other graphs


@runs_on(on_bundling_cluster)
async def test_keys_that_exist_stay_as_they_are(cluster: Bundling) -> None:
    inner, outs = fork()
    held = cluster.client.persist(inner[9])
    with captured_logger("distributed.scheduler") as log:
        assert await cluster.values(*outs) == [13, 14, 15]
    assert "run_spec" not in log.getvalue()
    assert set(CALLS.values()) == {1}
    assert cluster.keys == {"inc-9", cluster.bundle_of("inc"), "out-0", "out-1", "out-2"}
    assert await cluster.client.compute(held) == 10


@runs_on(on_bundling_cluster)
async def test_a_client_gets_a_value_that_a_bundle_of_another_graph_returns(
    cluster: Bundling, gate: Gate
) -> None:
    inner, outs = fork()
    futures = cluster.client.compute([gate.task("last-0", inner[-1]), *outs])
    await comes(gate.reached.is_set)
    assert await cluster.values(inner[-1]) == [12]
    assert cluster.counts["shared"] == 1
    gate.open()
    await cluster.client.gather(futures)
    assert set(CALLS.values()) == {1}


@runs_on(on_bundling_cluster)
async def test_three_graphs_read_a_value_that_a_bundle_returns(cluster: Bundling, gate: Gate) -> None:
    inner, outs = fork()
    futures = cluster.client.compute([gate.task("last-0", inner[-1]), *outs])
    await comes(gate.reached.is_set)
    for name in ("dec", "double"):
        futures.append(cluster.client.compute(chain(name, inner[-1])[-1]))
        await comes(lambda: f"{name}-11" in cluster.keys)  # noqa: B023
    gate.open()
    assert await cluster.client.gather(futures) == [13, 13, 14, 15, 24, 24]
    assert cluster.counts["shared"] == 2
    assert set(CALLS.values()) == {1}


# A prefetched task may run twice.
@runs_on(on_bundling_cluster, config={"ferroflow.features.prefetch": False})
async def test_a_bundle_that_no_worker_has_returns_one_more_value(cluster: Bundling, gate: Gate) -> None:
    start = gate.future(cluster.client)
    inner, outs = fork(start)
    futures = cluster.client.compute(outs)
    more = cluster.client.compute(chain("dec", inner[5])[-1])
    await comes(lambda: "dec-11" in cluster.keys)
    assert cluster.counts["shared"] == 1
    cluster.scheduler.validate_state()
    gate.open()
    assert await cluster.client.gather([*futures, more]) == [14, 15, 16, 19]
    assert set(CALLS.values()) == {1}


@runs_on(on_bundling_cluster)
async def test_a_task_in_a_bundle_that_was_sent_runs_again(cluster: Bundling, gate: Gate) -> None:
    inner = chain("inc", 0, 4)
    last = chain("next", gate.task("inc-4", inner[-1]), 6)[-1]
    futures = cluster.client.compute([task(f"out-{i}", last, i) for i in range(3)])
    await comes(gate.reached.is_set)
    more = cluster.client.compute(chain("dec", inner[-1])[-1])
    await comes(lambda: "dec-11" in cluster.keys)
    assert cluster.counts["again"] == 4
    assert cluster.counts["shared"] == 0
    gate.open()
    assert await cluster.client.gather([*futures, more]) == [12, 13, 14, 16]
    assert {key for key, n in CALLS.items() if n == 2} == keys_of(inner[-1])


# Changes and failures while a graph is bundled


def broken(*_: Any, **__: Any) -> Any:
    raise ValueError("planned")


@runs_on(on_bundling_cluster)
async def test_a_graph_runs_as_it_came_after_a_change_of_its_premises(
    cluster: Bundling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "revalidate", lambda plan, snapshot: False)
    assert await cluster.values(*fork()[1]) == [13, 14, 15]
    assert cluster.keys == keys_of(*fork()[1])
    assert cluster.counts["created"] == 0


@pytest.mark.parametrize(
    ("patched", "name"),
    [(rewrite, "bundle_graph"), (Bundles, "carry_out"), (Bundles, "facts")],
    ids=["cut", "compared with tasks", "compared with bundles"],
)
@runs_on(on_bundling_cluster)
async def test_a_graph_runs_as_it_came_with_one_warning_if_it_cannot_be(
    cluster: Bundling, patched: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patched, name, broken)
    with captured_logger("ferroflow_dask", level=logging.WARNING) as log:
        assert await cluster.values(*fork()[1]) == [13, 14, 15]
    assert log.getvalue().count("a graph could not be bundled and runs as it came") == 1
    assert cluster.keys == keys_of(*fork()[1])


@runs_on(on_bundling_cluster, plugin=False)
async def test_an_uninstalled_plugin_leaves_a_graph_in_flight_to_dask(cluster: Bundling, gate: Gate) -> None:
    stock = dict(cluster.scheduler.stream_handlers)
    await install(cluster.client)
    bundles = cluster.bundles
    start = gate.future(cluster.client)
    futures = cluster.client.compute(fork(start)[1])
    await comes(lambda: len(bundles))
    await uninstall(cluster.client)
    assert keys_of(*fork(start)[1]) <= set(cluster.scheduler.tasks)
    handlers = cluster.scheduler.stream_handlers
    assert all(
        handlers[name] == stock[name] for name in ("update-graph", "task-erred", "reschedule", "cancel-keys")
    )
    assert "_find_lost_dependencies" not in vars(cluster.scheduler)
    assert not [name for worker in cluster.workers for name in worker.plugins if "ferroflow" in name]
    cluster.assert_stock()
    gate.open()
    assert await cluster.client.gather(futures) == [14, 15, 16]
    cluster.forget_seen()
    total = task("total-0", *leaves("leaf"))
    assert await cluster.values(total) == [466]
    assert cluster.keys == keys_of(total)


def test_a_graph_runs_as_it_came_if_the_plugin_is_uninstalled_while_it_is_bundled(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = rewrite.bundle_graph

    def bundle_graph(*args: Any, **options: Any) -> Any:
        gate.reached.set()
        gate.opened.wait(20)
        return stock(*args, **options)

    monkeypatch.setattr(rewrite, "bundle_graph", bundle_graph)

    async def test(cluster: Bundling) -> None:
        futures = cluster.client.compute(fork()[1])
        await comes(gate.reached.is_set)
        await uninstall(cluster.client)
        gate.open()
        assert await cluster.client.gather(futures) == [13, 14, 15]
        assert cluster.keys == keys_of(*fork()[1])

    on_bundling_cluster(test)


# Cancelled tasks whose readers are in bundles


N, KEPT = 60, 20


async def readers_of_some(cluster: Bundling, start: Any) -> tuple[list[Any], list[Any]]:
    """Return futures of separate tasks, and of bundled tasks of which each reads one of them."""
    sources = [apart(f"source-{i}", start, i) for i in range(N)]
    first = cluster.client.compute(sources)
    second = cluster.client.compute([task(f"reader-{i}", one) for i, one in enumerate(sources)])
    await comes(lambda: f"reader-{N - 1}" in cluster.scheduler.tasks)
    assert cluster.counts["created"] >= 1
    return first, second


async def half_is_lost(cluster: Bundling, first: list[Any], second: list[Any], start: int = 0) -> None:
    """Assert that readers of cancelled tasks are cancelled, and that all else has its value."""
    await comes(lambda: all(one.status == "cancelled" for one in first[KEPT:] + second[KEPT:]))
    assert await cluster.client.gather(second[:KEPT]) == [start + i + 2 for i in range(KEPT)]
    assert await cluster.client.gather(first[:KEPT]) == [start + i + 1 for i in range(KEPT)]
    assert await cluster.client.submit(sum, [1, 2]) == 3


@runs_on(on_bundling_cluster)
async def test_before_they_run(cluster: Bundling, gate: Gate) -> None:
    first, second = await readers_of_some(cluster, gate.task("gate-0"))
    await cluster.client.cancel(first[KEPT:])
    await comes(lambda: second[-1].status == "cancelled")
    gate.open()
    await half_is_lost(cluster, first, second, start=1)


@runs_on(on_bundling_cluster)
async def test_after_they_have_run(cluster: Bundling) -> None:
    first, second = await readers_of_some(cluster, 0)
    await cluster.client.gather(second)
    await cluster.client.cancel(first[KEPT:])
    await half_is_lost(cluster, first, second)


@runs_on(on_bundling_cluster)
async def test_tasks_between_that_nobody_wants(cluster: Bundling, gate: Gate) -> None:
    kept = cluster.client.submit(sum, [1, 2])
    assert await kept == 3
    (first,) = cluster.client.compute([gate.task("gate-0")])
    last = cluster.client.compute(apart("last", apart("between", gate.task("gate-0"))))
    await comes(lambda: "last" in cluster.scheduler.tasks)
    await cluster.client.cancel(first)
    await comes(lambda: last.status == "cancelled")
    gate.open()
    assert kept.status == "finished"  # the client has kept its connection
    del kept


@runs_on(on_bundling_cluster)
async def test_what_another_client_wants_goes_on(cluster: Bundling, gate: Gate) -> None:
    first, second = await readers_of_some(cluster, gate.task("gate-0"))
    async with Client(cluster.scheduler.address, asynchronous=True) as other:
        theirs = other.compute(task("reader-50", apart("source-50", gate.task("gate-0"), 50)))
        await comes(lambda: len(cluster.scheduler.tasks["reader-50"].who_wants or ()) == 2)
        await cluster.client.cancel(first[KEPT:])
        await comes(lambda: second[-1].status == "cancelled")
        gate.open()
        assert await theirs == 53
        del theirs
    await half_is_lost(cluster, first, second[:KEPT] + second[KEPT:50] + second[51:], start=1)
