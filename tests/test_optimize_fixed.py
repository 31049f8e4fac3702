"""What stays as it is in optimized collections: P2P shuffles, and each key that other graphs have, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef, convert_legacy_graph
from dask.core import flatten
from dask.utils import key_split
from distributed import Client, get_worker, wait
from test_optimize import COLLECTIONS, FOUR, All, combine, n_tasks, tree

from ferroflow_dask.bundling.dask_graphs import Learned, bundle_tasks, optimize_for, pack_graph
from ferroflow_dask.bundling.fixed import is_alone
from ferroflow_dask.bundling.sequence import BundleTask


class BarrierTask(Task):
    """A task that somebody else looks up on the scheduler."""

    __slots__ = ()


def chain(name: str, first: Task, n: int) -> dict[str, Task]:
    tasks = {first.key: first}
    for i in range(n):
        key = f"{name}-{i}"
        tasks[key] = Task(key, combine, i, TaskRef([*tasks][-1]))
    return tasks


def test_what_feeds_or_reads_a_task_of_an_unknown_class_stays_as_it_is() -> None:
    before = chain("before", Task("first", combine, 1), 3)
    barrier: Any = BarrierTask("barrier", combine, 2, TaskRef("before-2"))
    other = chain("other", Task("second", combine, 4), 3)
    reader = Task("reader", combine, 3, TaskRef("barrier"), TaskRef("other-2"))
    after = chain("after", reader, 3)
    tasks = {**before, "barrier": barrier, **other, **after}
    found = dict(bundle_tasks(tasks, {"after-2"}, FOUR, All(1e-5)))
    fixed = {**before, "barrier": barrier, **other, "reader": reader}
    assert {key: task for key, task in found.items() if key in fixed} == fixed
    assert all(found[key] is task for key, task in fixed.items())
    assert type(found["after-2"]) is BundleTask
    assert len(found) == len(fixed) + 1
    assert dask.get(found, "after-2") == dask.get(tasks, "after-2")


#: Tasks of functions that ask which task they run in.
AWARE = {
    "as it is": Task("aware", get_worker),
    "fused by Dask to another": Task.fuse(
        Task("ready", combine, 1), Task("aware", get_worker, TaskRef("ready"))
    ),
}


@pytest.mark.parametrize("aware", AWARE.values(), ids=AWARE)
def test_what_looks_at_the_task_it_runs_in_runs_alone(aware: Task) -> None:
    before = chain("before", Task("first", combine, 1), 3)
    after = chain("after", Task("reader", combine, 3, TaskRef("aware"), TaskRef("before-2")), 3)
    assert is_alone(aware)
    assert not any(map(is_alone, (*before.values(), *after.values())))
    found = dict(bundle_tasks({**before, "aware": aware, **after}, {"after-2"}, FOUR, All(1e-5)))
    assert found["aware"] is aware
    assert type(found["after-2"]) is BundleTask
    assert len(found) <= 3


@pytest.mark.cluster
def test_what_looks_at_the_task_it_runs_in_finds_it(
    thread_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_key, "__module__", "distributed.somewhere")
    there = dask.delayed(combine)(None, 1)
    for _ in range(5):
        there = dask.delayed(combine)(None, there)
    both = dask.delayed(pair)(dask.delayed(own_key)(dask_key_name="its-key"), there)
    optimized = optimize_for(both, FOUR, All(1e-5))
    assert n_tasks(optimized) < n_tasks(both)
    assert thread_client.compute(optimized, sync=True) == ("its-key", 7)


def own_key() -> Any:
    return get_worker().get_current_task()


def pair(*values: Any) -> tuple[Any, ...]:
    return values


class Medium(All):
    """Tasks that are short but for one in two names, by their first letter."""

    def get(self, name: Any, default: Any = None) -> Learned:
        return Learned(1.0) if name and name[0] < "n" else self.learned


def dependencies(collection: Any) -> dict[Any, frozenset[Any]]:
    """Return what tasks read, of those that Dask sends when a collection is computed."""
    (optimized,) = dask.optimize(collection)
    return {
        key: frozenset(task.dependencies)
        for key, task in convert_legacy_graph(dict(optimized.__dask_graph__())).items()
    }


@pytest.mark.parametrize(
    "learned",
    [{}, All(1e-5), All(1e-3), All(1.0), Medium(1e-5)],
    ids=["unknown", "10 µs", "1 ms", "1 s", "some 1 s"],
)
@pytest.mark.parametrize("name", COLLECTIONS)
def test_what_reads_other_tasks_has_another_key(name: str, learned: dict[str, Learned]) -> None:
    collection = COLLECTIONS[name]()
    plain, found = dependencies(collection), dependencies(optimize_for(collection, FOUR, learned))
    requested = set(flatten(collection.__dask_keys__()))
    shared = found.keys() & plain.keys() - requested
    assert {key: found[key] for key in shared} == {key: plain[key] for key in shared}
    if type(learned) is dict and name != "chunks":  # all of whose keys are asked for
        assert shared


def test_one_task_that_reads_bundles_is_called_as_it_was() -> None:
    tasks = chain("short", Task("first", combine, 1), 3)
    tasks |= {
        "long-1": Task("long-1", combine, 1, TaskRef("short-2")),
        "last": Task("last", combine, 1, TaskRef("long-1"), TaskRef("short-2")),
    }

    class Some(All):
        def get(self, name: Any, default: Any = None) -> Learned:
            return Learned(10.0) if name == "long" else self.learned

    packed = pack_graph(tasks, ["long-1", "last"], FOUR, Some(1e-5))
    assert not {"long-1", "last"} & set(packed.keys)
    assert "long" in {key_split(key) for key in packed.keys}
    assert packed.values(dask.get(dict(packed.dsk), packed.keys)) == {
        key: dask.get(tasks, key) for key in ("long-1", "last")
    }


def frame(n: int) -> Any:
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    data = pd.DataFrame({"name": list("abcd") * 25, "value": np.arange(100.0)})
    return dd.from_pandas(data, npartitions=n)


#: Collections with P2P shuffles, on clusters.
SHUFFLED: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: frame(4).shuffle("value"),
    "sum of shuffled": lambda: frame(4).shuffle("value").map_partitions(abs_sum, meta=(None, float)).sum(),
    "groupby": lambda: frame(20).groupby("name").value.agg("mean"),
    "nunique": lambda: frame(4).name.nunique() + 1,
    "split out": lambda: frame(4).groupby("value").agg({"value": "sum"}, split_out=4),
    "join": lambda: frame(4).merge(frame(5), on="value", shuffle_method="p2p", broadcast=False),
    "rechunk": lambda: da.arange(400, chunks=20).reshape(20, 20).rechunk((20, 1), method="p2p").sum(axis=0),
}


def abs_sum(part: Any) -> Any:
    return part.value.abs().sum()


def in_order(result: Any) -> Any:
    """Return rows in an order that no partitions change."""
    if isinstance(result, (int, float, np.ndarray, np.generic)):
        return result
    table = result.to_frame("value") if result.ndim == 1 else result
    return sorted(map(tuple, table.add_prefix("of_").reset_index().values.tolist()))


def n_collisions(client: Client) -> int:
    """Return how many tasks were sent to the scheduler that read others than what it had under their keys."""
    events = [event for _, event in client.get_events("scheduler")]
    return sum(event["metrics"]["key_collisions"] for event in events if event.get("metrics"))


@pytest.mark.cluster
@pytest.mark.parametrize("name", SHUFFLED)
def test_p2p_shuffles_give_the_same(name: str, thread_client: Client) -> None:
    collection = SHUFFLED[name]()
    expected = in_order(collection.compute())
    optimized = optimize_for(collection, FOUR, All(1e-5))
    for each in (optimized, collection, optimized):
        np.testing.assert_array_equal(in_order(each.compute()), expected)
    assert n_collisions(thread_client) == 0


@pytest.mark.cluster
@pytest.mark.parametrize("seconds", [1e-5, 1e-3, 1.0])
@pytest.mark.parametrize("name", ["array", "bag"])
def test_the_same_plain_and_optimized_in_turn(name: str, seconds: float, thread_client: Client) -> None:
    collection = COLLECTIONS[name]()
    optimized = optimize_for(collection, FOUR, All(seconds))
    assert n_tasks(optimized) < n_tasks(collection)
    for held in (collection, optimized):
        future = thread_client.compute(held)
        wait(future)
        # One after another, and at once.
        for each in (optimized, collection):
            np.testing.assert_array_equal(thread_client.compute(each, sync=True), future.result())
        at_once = [thread_client.compute(each) for each in (collection, optimized) * 2]
        for found in thread_client.gather(at_once):
            np.testing.assert_array_equal(found, future.result())
        del future, at_once
    assert n_collisions(thread_client) == 0


@pytest.mark.cluster
def test_intermediate_results_that_are_held_are_no_others(thread_client: Client) -> None:
    whole = tree(4)
    held = thread_client.compute(whole)
    wait(held)
    for learned in ({}, All(1e-5), All(1e-3), Medium(1e-5)):
        part = dask.delayed(combine)(None, whole, 1)
        found = thread_client.compute(optimize_for(part, FOUR, learned), sync=True)
        assert found == part.compute(scheduler="sync")
    assert n_collisions(thread_client) == 0
