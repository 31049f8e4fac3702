"""Tasks that bundling does not change: P2P shuffles with their inputs, coroutines, and users of workers."""

from __future__ import annotations

from time import sleep
from typing import Any

import dask
import numpy as np
import pytest
from bundled import take_all_for_short
from dask._task_spec import Task, TaskRef
from dask.utils import key_split
from dask_graphs import (
    COLLECTIONS,
    FOUR,
    Graph,
    Known,
    assert_consistent,
    chain,
    combine,
)
from distributed import Client, get_worker, wait

from ferroflow_dask import install
from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.fixed import lone_tasks
from ferroflow_dask.bundling.graphs import bundle_graph
from ferroflow_dask.scheduler import extension_on, learned


class BarrierTask(Task):
    """A task that distributed looks up on the scheduler."""

    __slots__ = ()


def test_a_task_of_an_unknown_class_and_all_that_it_reads_or_that_reads_it_do_not_change() -> None:
    before = chain("before", Task("first", combine, 1), 3)
    barrier: Any = BarrierTask("barrier", combine, 2, TaskRef("before-2"))
    other = chain("other", Task("second", combine, 4), 3)
    reader = Task("reader", combine, 3, TaskRef("barrier"), TaskRef("other-2"))
    tasks = {**before, "barrier": barrier, **other, **chain("after", reader, 3)}
    found = bundle_graph(tasks, {"after-2"}, FOUR, Known(1e-5), "0")
    assert_consistent(tasks, {"after-2"}, found)
    fixed = {*before, "barrier", *other, "reader"}
    assert found.tasks.keys() == {*fixed, "after-2"}
    assert found.bundles.keys() == {"after-2"}
    assert dask.get(found.tasks, "after-2") == dask.get(tasks, "after-2")


async def later() -> int:
    return 1


#: Tasks that need the event loop, or the task that they run in.
ALONE = {
    "a task that asks for its worker": Task("aware", get_worker),
    "one that Dask has fused with another": Task.fuse(
        Task("ready", combine, 1), Task("aware", get_worker, TaskRef("ready"))
    ),
    "a coroutine": Task("aware", later),
    "a coroutine that Dask has fused with another": Task.fuse(
        Task("ready", combine, 1), Task("aware", later, TaskRef("ready"))
    ),
}


@pytest.mark.parametrize("aware", ALONE.values(), ids=ALONE)
def test_some_tasks_run_alone_while_others_are_bundled(aware: Task) -> None:
    before = chain("before", Task("first", combine, 1), 3)
    after = chain("after", Task("reader", combine, 3, TaskRef("aware"), TaskRef("before-2")), 3)
    tasks: Graph = {**before, "aware": aware, **after}
    assert lone_tasks(tasks) == {"aware"}
    found = bundle_graph(tasks, {"after-2"}, FOUR, Known(1e-5), "0")
    assert_consistent(tasks, {"after-2"}, found)
    assert found.tasks["aware"] is aware
    assert len(found.bundles["after-2"].tasks) > 1
    assert len(found.tasks) <= 3


def test_a_task_that_shares_no_bundle_but_reads_from_one_keeps_its_key_and_prefix() -> None:
    tasks = chain("short", Task("first", combine, 1), 3)
    tasks |= {
        "long-1": Task("long-1", combine, 1, TaskRef("short-1")),
        "last": Task("last", combine, 1, TaskRef("long-1"), TaskRef("short-2")),
    }
    found = bundle_graph(tasks, {"last"}, FOUR, Known(1e-5, except_for={"long": Averages(10.0)}), "0")
    assert_consistent(tasks, {"last"}, found)
    (key,) = (key for key in found.tasks if key_split(key) == "long")
    assert key == "long-1"
    assert dask.get(found.tasks, "last") == dask.get(tasks, "last")


# On clusters


@pytest.fixture
def _all_short(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_for_short(monkeypatch)


def bundle_counts(client: Client) -> dict[str, int]:
    """Return the numbers of bundles that the scheduler has created and split, and of the tasks in them."""

    def counts(dask_scheduler: Any) -> dict[str, int]:
        extension = extension_on(dask_scheduler)
        return {} if extension is None else dict(extension.graphs.bundles.counts)

    found: dict[str, int] = client.run_on_scheduler(counts)
    return found


def n_collisions(client: Client) -> int:
    """Return how many arriving tasks had other dependencies than the scheduler's task of the same key."""
    events = [event for _, event in client.get_events("scheduler")]
    return sum(event["metrics"]["key_collisions"] for event in events if event.get("metrics"))


@pytest.mark.cluster
@pytest.mark.usefixtures("_all_short")
@pytest.mark.parametrize("name", ["array", "bag", "groups of a bag"])
def test_the_same_graph_with_and_without_bundles_in_turn(name: str, thread_client: Client) -> None:
    collection = COLLECTIONS[name]()
    for first, second in ((("bundles",), ()), ((), ()), ((), ("bundles",))):
        install(thread_client, without=first)
        held = thread_client.persist(collection)
        wait(held)
        assert (bundle_counts(thread_client)["created"] > 0) == (not first)
        expected = held.compute()
        if second != first:
            install(thread_client, without=second)
        # One after another, and at once.
        np.testing.assert_array_equal(thread_client.compute(collection, sync=True), expected)
        for found in thread_client.gather([thread_client.compute(collection) for _ in range(4)]):
            np.testing.assert_array_equal(found, expected)
        # Only the extension that has rewritten a task can hide that its dependencies are others.
        assert second or n_collisions(thread_client) == 0
        del held


def nap(x: int) -> int:
    sleep(1e-3)
    return x


@pytest.mark.cluster
def test_a_bundle_of_many_tasks_does_not_make_their_average_duration_long(ferroflow_client: Client) -> None:
    def nap_s() -> float:
        last = dask.delayed(nap)(1)
        for _ in range(99):
            last = dask.delayed(nap)(last)  # all in one bundle, under the key of the last
        ferroflow_client.compute(last, sync=True)
        return float(learned(ferroflow_client)["nap"][0])

    before_s = nap_s()
    n_first = bundle_counts(ferroflow_client)["tasks"]
    assert n_first < 100  # nothing was known of them: some ran first
    assert before_s != nap_s() < 10 * before_s
    assert bundle_counts(ferroflow_client)["tasks"] == n_first + 100
