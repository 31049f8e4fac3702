"""Cancelled tasks whose readers are in bundles: readers are cancelled, all else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bundled import Bundling, Gate, apart, gates, on_bundling_cluster, take_all_for_short, task
from cluster_tests import runs_on
from distributed import Client
from waiting import comes

pytestmark = pytest.mark.cluster
N, KEPT = 60, 20


@pytest.fixture(autouse=True)
def _all_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_for_short(monkeypatch)


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gates() as make:
        yield make()


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
