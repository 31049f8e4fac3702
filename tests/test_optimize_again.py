"""Collections in fewer tasks that Dask optimizes once more when it computes them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import sleep
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from distributed import Client, wait
from test_optimize import COLLECTIONS, FOUR, All

from ferroflow_dask.bundling.dask_graphs import Learned, optimize_for, pack_graph
from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.scheduler import learned
from ferroflow_dask.scheduler.task_view import declared_cost


class Except(All):
    """What all tasks are like but those of a name, of which nothing is known."""

    def __init__(self, seconds: float, new: str) -> None:
        super().__init__(seconds)
        self.new = new

    def get(self, name: Any, default: Any = None) -> Learned:
        return default if self.new in name else self.learned


def double(x: int) -> int:
    return 2 * x


def triple(x: int) -> int:
    return 3 * x


def parse_anew(x: int) -> int:
    return x + 1


def power(x: int, by: int) -> int:
    return int(x**by)


def test_what_a_bundle_reads_twice_is_no_iterator() -> None:
    # Dask's bags would fuse what is new with the only bundle that reads it, and drop its `reify`.
    read = db.from_sequence(range(20), npartitions=4).map(parse_anew)
    pairs = db.zip(read.map(double), read.map(triple))
    expected = [(2 * (x + 1), 3 * (x + 1)) for x in range(20)]
    optimized = optimize_for(pairs, FOUR, Except(1e-5, "parse_anew"))
    tasks = dict(optimized.__dask_graph__())
    assert len(tasks) == 3 * 4  # data, what is new, and a bundle
    assert optimized.compute(scheduler="sync") == expected


def on_cluster(client: Client) -> Any:
    return client.persist(da.arange(100, chunks=10))


def as_delayed(client: Client) -> Any:
    return dask.delayed(client.submit(np.arange, 100, key="as-delayed"))


#: What is computed of data on a cluster, given a function that returns it.
OF_FUTURES: dict[str, Callable[[Client], Any]] = {
    "an array": lambda client: (on_cluster(client) + 1).sum(),
    "all of it": on_cluster,
    "blocks": lambda client: on_cluster(client)[5:25],
    "a bag": lambda client: client.persist(db.from_sequence(range(20), npartitions=4)).map(double).sum(),
    "delayed": lambda client: dask.delayed(np.sum)(as_delayed(client)),
    "an argument": lambda client: dask.delayed(power)(client.submit(double, 4, key="arg"), by=2),
    "an array of one": lambda client: da.from_delayed(as_delayed(client), (100,), int) * 2,
}


@pytest.mark.cluster
@pytest.mark.parametrize("learned", [{}, All(1e-5)], ids=["unknown", "short"])
@pytest.mark.parametrize("name", OF_FUTURES)
def test_data_on_the_cluster_stays_there(name: str, learned: Any, thread_client: Client) -> None:
    collection = OF_FUTURES[name](thread_client)
    expected = collection.compute()
    optimized = optimize_for(collection, FOUR, learned)
    del collection
    gc.collect()
    # What is to be released has been when the scheduler has answered.
    assert thread_client.submit(double, 1, key="after").result() == 2
    np.testing.assert_array_equal(optimized.compute(), expected)


@pytest.mark.cluster
def test_data_of_a_packed_graph_stays_on_the_cluster(thread_client: Client) -> None:
    future = thread_client.submit(double, 4)
    packed = pack_graph({"a": (double, future), "b": (triple, "a")}, ["a", "b"], FOUR, All(1e-5))
    del future
    gc.collect()
    assert thread_client.submit(double, 1).result() == 2
    found = packed.values(thread_client.get(packed.dsk, packed.keys))
    assert found == {"a": 16, "b": 48}


@pytest.mark.cluster
def test_data_frames_on_the_cluster_stay_there(thread_client: Client) -> None:
    pd = pytest.importorskip("pandas")
    dd = pytest.importorskip("dask.dataframe")
    data = pd.DataFrame({"name": list("abcd") * 25, "value": range(100)})
    frame = thread_client.persist(dd.from_pandas(data, npartitions=10))
    optimized = optimize_for(frame.groupby("name").value.mean(), FOUR, All(1e-5))
    del frame
    gc.collect()
    assert thread_client.submit(double, 1).result() == 2
    found = optimized.compute().sort_index()
    pd.testing.assert_series_equal(found, data.groupby("name").value.mean(), check_index_type=False)


@pytest.mark.cluster
@pytest.mark.parametrize("learned", [{}, All(1e-5)], ids=["unknown", "short"])
def test_a_collection_of_several_gives_the_same(learned: Any, thread_client: Client) -> None:
    xarray = pytest.importorskip("xarray")
    numbers = da.arange(40, chunks=10)
    variables = {"a": numbers + 1, "b": (numbers + 1) * 2, "c": np.ones(40)}
    dataset = xarray.Dataset({name: ("x", values) for name, values in variables.items()})
    optimized = optimize_for(dataset, FOUR, learned)
    assert type(optimized) is type(dataset)
    expected = dataset.compute(scheduler="sync")
    xarray.testing.assert_identical(optimized.compute(), expected)
    xarray.testing.assert_identical(thread_client.persist(optimized).compute(), expected)
    # A part of it, and both at once.
    np.testing.assert_array_equal(optimized.b[3:15].compute(), expected.b[3:15])
    for both in (dask.compute(optimized, dataset.b), dask.compute(dataset.b, optimized)[::-1]):
        xarray.testing.assert_identical(both[0], expected)
        xarray.testing.assert_identical(both[1], expected.b)


def bundles_on(dask_scheduler: Any) -> list[tuple[str, float | None]]:
    """Return the names that Dask gives bundles, and how long each should take [s]."""
    tasks = dask_scheduler.tasks.values()
    return [(ts.prefix.name, declared_cost(ts)) for ts in tasks if bundle_in(ts.run_spec) is not None]


@pytest.mark.cluster
@pytest.mark.parametrize("name", COLLECTIONS)
def test_what_bundles_stand_for_and_cost_outlives_dasks_optimization(
    name: str, ferroflow_client: Client
) -> None:
    collection = optimize_for(COLLECTIONS[name](), FOUR, All(1e-5))
    future = ferroflow_client.compute(collection)
    wait(future)
    found = ferroflow_client.run_on_scheduler(bundles_on)
    assert sum(cost_s for _, cost_s in found) > 0
    assert {name for name, _ in found}.isdisjoint(learned(ferroflow_client))


def nap(x: int) -> int:
    sleep(1e-3)
    return x


@pytest.mark.cluster
def test_a_bundle_of_many_does_not_make_its_name_long(ferroflow_client: Client) -> None:
    def chain() -> Any:
        last = dask.delayed(nap)(1)
        for _ in range(99):
            last = dask.delayed(nap)(last)
        return last

    def learned_s(collection: Any) -> float:
        ferroflow_client.compute(collection, sync=True)
        return float(learned(ferroflow_client)["nap"][0])

    before_s = learned_s(chain())
    bundled = optimize_for(chain(), FOUR, All(1e-5))  # all in one, under the key of the last
    assert len(dict(bundled.__dask_graph__())) == 1
    assert before_s != learned_s(bundled) < 10 * before_s
