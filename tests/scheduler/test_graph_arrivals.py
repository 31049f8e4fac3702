"""Graphs that arrive on the scheduler: which are bundled, and what stays separate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import dask
import pytest
from bundled import (
    CALLS,
    Bundling,
    Gate,
    add,
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
from distributed import Client, Future, get_worker, span, wait, worker_client
from waiting import comes

from ferroflow_dask import explain
from ferroflow_dask.bundling.snapshot import SentGraph
from ferroflow_dask.scheduler.graphs import arrivals, capable, graphs

pytestmark = pytest.mark.cluster
_LEARNED = graphs.Graphs.learned


@pytest.fixture(autouse=True)
def _all_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_for_short(monkeypatch)


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gates() as make:
        yield make()


def ask(key: str, *values: int) -> int:
    return add(key, *values) if get_worker() else 0


def ask_a_client(key: str, *values: int) -> int:
    with worker_client():
        return add(key, *values)


class Mutable:
    """An actor."""

    def __init__(self, *_: Any) -> None:
        pass


# What is bundled


@runs_on(on_bundling_cluster)
async def test_a_graph_is_bundled_and_gives_the_same_values(cluster: Bundling) -> None:
    inner, outs = fork()
    assert await cluster.values(*outs) == [13, 14, 15]
    bundle = cluster.bundle_of("inc")
    assert cluster.keys == {bundle, "out-0", "out-1", "out-2"}
    assert cluster.seen.tasks[bundle].expected_s == pytest.approx(12e-3)  # of the tasks in it
    assert cluster.counts["created"] == 1
    assert cluster.counts["tasks"] == len(inner)
    assert set(CALLS.values()) == {1}


@runs_on(on_bundling_cluster)
async def test_a_task_and_its_bundle_have_one_explanation(cluster: Bundling, gate: Gate) -> None:
    inner, (out, *_) = fork()
    futures = cluster.client.compute([out, gate.task("last-0", inner[-1])])
    await comes(gate.reached.is_set)
    story = await explain(cluster.client, "inc-5")
    assert story == await explain(cluster.client, cluster.bundle_of("inc"))
    assert [decision.what for decision in story][:2] == ["bundled", "placed"]
    assert story[0].reason == "12 tasks: 12 inc"
    assert story[0].key == cluster.bundle_of("inc")
    gate.open()
    await cluster.client.gather(futures)


# What runs as it came


def total(n: int = 30) -> Any:
    return task("total-0", *leaves("leaf", n))


async def all_annotated(cluster: Bundling) -> Any:
    with dask.annotate(ferroflow_bundle=False):
        return await cluster.values(total())


SUM_OF_30 = sum(range(1, 31)) + 1
AS_THEY_CAME: dict[str, Callable[[Bundling], Any]] = {
    "a graph with retries": lambda cluster: cluster.values(total(), retries=2),
    "a graph for some workers": lambda cluster: cluster.values(total(), workers=[cluster.workers[0].address]),
    "a graph with resources": lambda cluster: cluster.values(total(), resources={"R": 1}),
    "a graph annotated to stay separate": all_annotated,
}


@pytest.mark.parametrize("name", AS_THEY_CAME)
@runs_on(on_bundling_cluster, resources=({"R": 1}, None))
async def test_a_graph_runs_as_it_came_if_it_is(cluster: Bundling, name: str) -> None:
    assert await AS_THEY_CAME[name](cluster) == [SUM_OF_30]
    assert cluster.keys == set(CALLS)
    assert cluster.counts["created"] == 0


@runs_on(on_bundling_cluster)
async def test_graphs_with_actors_run_as_they_came(cluster: Bundling) -> None:
    actors = [task(f"actor-{i}", function=Mutable) for i in range(12)]
    last = task("last-0", *actors, function=Mutable)
    await cluster.client.compute(last, actors=True)
    assert cluster.keys == keys_of(last)
    assert cluster.counts["created"] == 0


@runs_on(on_bundling_cluster, config={"ferroflow.features.bundles": False})
async def test_nothing_is_bundled_if_the_setting_is_off(cluster: Bundling) -> None:
    assert await cluster.values(total()) == [SUM_OF_30]
    assert cluster.keys == keys_of(total())


@pytest.mark.parametrize("can_bundle", [True, False], ids=["this package", "another version of it"])
def test_known_tasks_are_bundled_on_workers_with(can_bundle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.Graphs, "learned", _LEARNED)
    if not can_bundle:
        monkeypatch.setattr(capable, "VERSION", "0.0.1")

    async def test(cluster: Bundling) -> None:
        assert await cluster.values(*fork()[1]) == [13, 14, 15]
        assert cluster.counts["created"] == 0  # nothing is known yet
        await cluster.is_empty()
        assert await cluster.values(*fork()[1]) == [13, 14, 15]
        assert cluster.counts["created"] == can_bundle

    on_bundling_cluster(test)


# Annotations


@pytest.mark.parametrize("is_global", [True, False], ids=["of the graph", "of its tasks"])
@runs_on(on_bundling_cluster)
async def test_bundles_inherit_one_priority(cluster: Bundling, is_global: bool) -> None:
    if is_global:
        await cluster.values(*fork()[1], priority=7)
    else:
        with dask.annotate(priority=7):
            outs = fork()[1]
        await cluster.values(*outs)
    assert cluster.counts["created"] == 1
    assert {created.priority[0] for created in cluster.seen.tasks.values()} == {-7}


@runs_on(on_bundling_cluster)
async def test_bundles_belong_to_the_span_of_their_tasks(cluster: Bundling) -> None:
    with span("work"):
        outs = fork()[1]
    await cluster.values(*outs)
    (found,) = cluster.scheduler.extensions["spans"].spans_search_by_name["work",]
    assert cluster.counts["created"] == 1
    assert {group.name for group in found.groups} == {one.group for one in cluster.seen.tasks.values()}
    assert ("default",) not in cluster.scheduler.extensions["spans"].spans_search_by_name


@pytest.mark.parametrize("function", [ask, ask_a_client])
@runs_on(on_bundling_cluster)
async def test_tasks_that_talk_to_dask_are_separate_from_the_next_graph_on(
    cluster: Bundling, function: Any
) -> None:
    await cluster.values(task("asks-100", function=function))
    await comes(lambda: "asks" in cluster.stealing.graphs._learned.separate)
    cluster.forget_seen()
    last = chain("inc", 0)[-1]
    asking = [task(f"asks-{i}", last, i, function=function) for i in range(10)]
    assert await cluster.values(task("total-0", *asking)) == [10 * 13 + 45 + 1]
    assert {f"asks-{i}" for i in range(10)} < cluster.keys
    assert cluster.counts["tasks"] == 12


@runs_on(on_bundling_cluster)
async def test_a_task_that_talks_to_dask_for_the_first_time_in_a_bundle_is_noted(cluster: Bundling) -> None:
    assert await cluster.values(*fork(at_5=ask)[1]) == [13, 14, 15]
    await comes(lambda: cluster.stealing.graphs._learned.separate)
    assert cluster.stealing.graphs._learned.separate == {"inc"}


@pytest.mark.parametrize("way", ["compute", "submit"])
def test_a_graph_waits_for_the_graph_of_another_client_that_it_reads(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_entered, opened = threading.Event(), threading.Event()
    stock = arrivals.sent_graph

    def wait_once(*args: Any) -> SentGraph:
        if not has_entered.is_set():
            has_entered.set()
            opened.wait(20)
        return stock(*args)

    monkeypatch.setattr(arrivals, "sent_graph", wait_once)

    async def test(cluster: Bundling) -> None:
        address = cluster.scheduler.address
        async with Client(address, asynchronous=True, set_as_default=False) as other:
            first = cluster.client.compute(chain("inc", 0)[-1])
            await comes(has_entered.is_set)
            value = Future(first.key, other)
            if way == "compute":
                reader = other.compute(chain("dec", value)[-1])
            else:
                reader = other.submit(add, "dec-11", value, *[1] * 11, key="dec-11")
            with suppress(TimeoutError):  # else Dask cancels it
                await wait(reader, timeout=0.2)
            opened.set()
            assert await reader == 24
        assert await first == 12

    try:
        on_bundling_cluster(test)
    finally:
        opened.set()
