"""Other people's collections in fewer tasks: the same results, the same keys, each task once."""

from __future__ import annotations

import operator
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef, convert_legacy_graph
from dask.core import flatten
from distributed import Client, Future
from hypothesis import given, settings
from hypothesis import strategies as st

from ferroflow_dask import optimizations, optimize
from ferroflow_dask.bundling.dask_graphs import Learned, bundle_tasks, optimize_for, pack_graph
from ferroflow_dask.bundling.sequence import BundleTask
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.deploy import profile_of
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.scheduler import learned

FOUR = ClusterProfile((1,) * 4)
CALLS: Counter[Any] = Counter()


def combine(key: Any, *values: int) -> int:
    CALLS[key] += 1
    return sum(values) + 1


def tree(height: int) -> Any:
    level = [dask.delayed(combine)(i, i) for i in range(2**height)]
    while len(level) > 1:
        level = [dask.delayed(combine)(None, *level[i : i + 2]) for i in range(0, len(level), 2)]
    return level[0]


def n_tasks(collection: Any) -> int:
    return sum(not isinstance(task, Future) for task in dict(collection.__dask_graph__()).values())


COLLECTIONS: dict[str, Any] = {
    "array": (da.ones((60, 60), chunks=10) + 1).sum,
    "chunks": lambda: da.arange(100, chunks=10) * 2,
    "two axes": lambda: da.random.default_rng(1).random((40, 40), chunks=8).T.dot(da.ones((40, 8), chunks=8)),
    "bag": lambda: db.from_sequence(range(100), npartitions=20).map(lambda x: x + 1).filter(bool).sum(),
    "delayed": lambda: tree(6),
    "overlaps": lambda: da.arange(400, chunks=20).map_overlap(np.cumsum, depth=3, boundary="periodic"),
    "slices": lambda: da.stack([da.arange(60, chunks=7)[i::2] for i in range(2)]).rechunk(4).cumsum(axis=1),
    "lines of delayed": lambda: (
        db.from_delayed([dask.delayed(range)(i) for i in range(20)]).repartition(7).fold(operator.add)
    ),
    "groups of a bag": lambda: (
        db.from_sequence(range(60), npartitions=12).groupby(lambda x: x % 5, shuffle="tasks").starmap(total)
    ),
}


def total(key: int, values: list[int]) -> tuple[int, int]:
    return key, sum(values)


class All(dict[str, Learned]):
    """What all tasks are like, whatever their names."""

    def __init__(self, seconds: float, nbytes: float = 0.0) -> None:
        super().__init__()
        self.learned = Learned(seconds, nbytes)

    def get(self, name: Any, default: Any = None) -> Learned:
        return self.learned


@pytest.mark.parametrize(
    "learned", [{}, All(1e-5), All(1e-3), All(1.0)], ids=["unknown", "10 µs", "1 ms", "1 s"]
)
@pytest.mark.parametrize("name", COLLECTIONS)
def test_a_collection_gives_the_same(name: str, learned: dict[str, Learned]) -> None:
    collection = COLLECTIONS[name]()
    optimized = optimize_for(collection, FOUR, learned)
    assert type(optimized) is type(collection)
    expected = collection.compute(scheduler="sync")
    np.testing.assert_array_equal(optimized.compute(scheduler="sync"), expected)
    assert n_tasks(optimized) <= n_tasks(collection)


#: What is computed of a frame with the columns `name` and `value` in ten partitions.
OF_FRAMES: dict[str, Callable[[Any], Any]] = {
    "groups": lambda frame: frame.groupby("name").value.mean(),
    "rolling": lambda frame: frame.value.rolling(7).sum(),
    "of delayed": lambda frame: pytest.importorskip("dask.dataframe").from_delayed(frame.to_delayed()).sum(),
    "shuffled by tasks": lambda frame: frame.shuffle("name", shuffle_method="tasks").map_partitions(
        lambda part: part.value.cumsum()
    ),
    "sorted": lambda frame: frame.set_index("value", divisions=[0, 30, 99], shuffle_method="tasks").name,
}


@pytest.mark.parametrize("name", OF_FRAMES)
def test_frames_give_the_same(name: str) -> None:
    pd = pytest.importorskip("pandas")
    dd = pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame({"name": list("abcd") * 25, "value": range(100)})
    collection = OF_FRAMES[name](dd.from_pandas(frame, npartitions=10))
    optimized = optimize_for(collection, FOUR, All(1e-4))
    assert n_tasks(optimized) < n_tasks(collection.optimize())
    found, expected = (each.compute(scheduler="sync").sort_index() for each in (optimized, collection))
    pd.testing.assert_series_equal(found, expected)


def test_files_are_written_once(tmp_path: Path) -> None:
    written = db.from_sequence(map(str, range(40)), npartitions=8).map(str.upper)
    parts = dask.delayed(list)(written.to_textfiles(str(tmp_path / "*.txt"), compute=False))
    optimized = optimize_for(parts, FOUR, All(1e-5))
    assert n_tasks(optimized) < n_tasks(parts)
    optimized.compute(scheduler="sync")
    lines = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
    assert lines == [[str(i) for i in range(start, start + 5)] for start in range(0, 40, 5)]


def test_frames_that_would_not_have_fewer_tasks_stay_as_they_are() -> None:
    pd = pytest.importorskip("pandas")
    dd = pytest.importorskip("dask.dataframe")
    frame = dd.from_pandas(pd.DataFrame({"value": range(100)}), npartitions=10)
    mapped = frame.map_partitions(len)
    # One task for each key: with its other name, a bundle of each would be two.
    assert optimize_for(mapped, FOUR, All(1e-5)) is mapped
    assert optimize_for(mapped, FOUR, {}) is mapped


@pytest.mark.parametrize("name", COLLECTIONS)
def test_the_same_collection_is_cut_alike(name: str) -> None:
    collection = COLLECTIONS[name]()
    # It is the same whatever it should take.
    first, second = (optimize_for(collection, FOUR, All(seconds)) for seconds in (1e-5, 1.1e-5))
    graphs = [dict(optimized.__dask_graph__()) for optimized in (first, second)]
    assert {key: (task, task.dependencies) for key, task in graphs[0].items()} == {
        key: (task, task.dependencies) for key, task in graphs[1].items()
    }
    assert any(type(task) is BundleTask for task in graphs[0].values())


def test_bundles_of_different_tasks_have_different_names() -> None:
    names = set()
    for salt in ("a", "b"):
        chain = {f"{salt}-{i}": Task(f"{salt}-{i}", combine, i) for i in range(3)}
        for keys in ([*chain], [*chain][:2]):
            names.update(pack_graph(chain, keys, FOUR, All(1e-5)).keys)
    assert len(names) == 4


def test_short_tasks_become_few_and_long_ones_stay() -> None:
    assert n_tasks(optimize_for(tree(6), FOUR, All(1e-5))) == 1
    some = n_tasks(optimize_for(tree(6), FOUR, All(2e-3)))
    assert 1 < some < 64
    assert n_tasks(optimize_for(tree(3), FOUR, All(10.0))) > 8
    assert n_tasks(optimize_for(tree(3), FOUR, {})) == n_tasks(tree(3))


def test_no_bundle_needs_more_memory_than_a_worker_has() -> None:
    tight = replace(FOUR, memory_nbytes=4000)
    optimized = optimize_for(tree(6), tight, All(1e-5, nbytes=100.0))
    assert n_tasks(optimized) > 10
    assert optimized.compute(scheduler="sync") == tree(6).compute(scheduler="sync")


def test_each_task_runs_once() -> None:
    CALLS.clear()
    optimize_for(tree(6), FOUR, All(2e-3)).compute(scheduler="sync")
    assert CALLS.pop(None) == 63
    assert dict.fromkeys(range(64), 1) == CALLS


def test_keys_that_are_asked_for_stay() -> None:
    array = da.arange(100, chunks=10) * 2
    optimized = optimize_for(array, FOUR, All(1e-5))
    (plain,) = dask.optimize(array)
    assert list(flatten(optimized.__dask_keys__())) == list(flatten(plain.__dask_keys__()))
    assert set(flatten(optimized.__dask_keys__())) <= set(dict(optimized.__dask_graph__()))


def test_annotated_collections_stay_as_they_are() -> None:
    with dask.annotate(workers=["there"]):
        array = da.ones(10, chunks=1).sum()
    assert optimize_for(array, FOUR, All(1e-5)) is array


def test_an_error_names_the_task_in_its_bundle() -> None:
    broken = dask.delayed(operator.truediv)(dask.delayed(combine)("x", 1), 0, dask_key_name="the-bad-one")
    optimized = optimize_for(dask.delayed(combine)("y", broken), FOUR, All(1e-5))
    with pytest.raises(ZeroDivisionError) as raised:
        optimized.compute(scheduler="sync")
    assert any("'the-bad-one'" in note for note in raised.value.__notes__)


def test_arguments_of_all_kinds_arrive() -> None:
    def collect(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    one, two = dask.delayed(combine)("x", 1), dask.delayed(combine)("y", 2)
    nested = dask.delayed(collect)(1, [one, {"two": two}], None, one, last=two, plain=(3,))
    again = dask.delayed(collect)(nested, nested=[nested], data=dask.delayed(np.arange(3)))
    for learned_of in (All(1e-5), All(1e-3)):
        found = optimize_for(again, FOUR, learned_of).compute(scheduler="sync")
        assert repr(found) == repr(again.compute(scheduler="sync"))


def test_a_bundle_is_small_to_send() -> None:
    collection = tree(7)
    (bundle,) = dict(optimize_for(collection, FOUR, All(1e-6)).__dask_graph__()).values()
    alone = sum(len(pickle.dumps(task)) for task in dict(collection.__dask_graph__()).values())
    assert len(pickle.dumps(bundle)) < alone / 2


def test_graphs_with_coroutines_stay_as_they_are() -> None:
    async def later() -> int:
        return 1

    dsk = {"a": Task("a", later), "b": Task("b", combine, 1, TaskRef("a"))}
    assert dict(bundle_tasks(dsk, {"b"}, FOUR, All(1e-5))) == dsk


@pytest.mark.parametrize(
    ("keys", "asked"),
    [(("n", 0), {("n", 0)}), ([("n", 0)], {("n", 0)}), ([[("n", 0)], "other"], {("n", 0), "other"})],
    ids=["one", "list", "nested"],
)
def test_a_key_may_be_a_tuple(keys: Any, asked: set[Any]) -> None:
    dsk = {("n", 0): (operator.neg, 1), "other": (operator.neg, ("n", 0))}
    packed = pack_graph(dsk, keys, FOUR, All(1e-5))
    found = packed.values(dask.get(dict(packed.dsk), packed.keys))
    assert found == {key: {("n", 0): -1, "other": 1}[key] for key in asked}


@settings(max_examples=80)
@given(st.data(), st.integers(1, 6))
def test_any_graph_gives_the_same(data: st.DataObject, workers: int) -> None:
    n = data.draw(st.integers(1, 25))
    dsk: dict[Any, Any] = {}
    for i in range(n):
        needed = data.draw(st.lists(st.sampled_from(range(i)), max_size=3, unique=True)) if i else []
        dsk[f"n-{i}"] = Task(f"n-{i}", combine, i, *(TaskRef(f"n-{j}") for j in needed))
    wanted = data.draw(st.sets(st.sampled_from(sorted(dsk)), min_size=1))
    known = data.draw(st.sampled_from([{}, All(1e-5), All(1e-3), All(1.0)]))
    layer = bundle_tasks(convert_legacy_graph(dsk), wanted, ClusterProfile((1,) * workers), known)
    keys = sorted(wanted)
    assert dask.get(dict(layer), keys) == dask.get(dsk, keys)
    packed = pack_graph(dsk, keys, ClusterProfile((1,) * workers), known)
    assert packed.values(dask.get(dict(packed.dsk), packed.keys)) == dict(
        zip(keys, dask.get(dsk, keys), strict=True)
    )


@pytest.mark.cluster
def test_a_cluster_gives_the_same_in_fewer_tasks(ferroflow_client: Client) -> None:
    collection = tree(7)
    assert n_tasks(optimize(collection, ferroflow_client)) == n_tasks(collection)  # nothing is known yet
    expected = ferroflow_client.compute(collection, sync=True)
    run_until_short(ferroflow_client, lambda: tree(7))
    optimized = optimize(tree(7), ferroflow_client)
    assert n_tasks(optimized) < n_tasks(collection) / 4
    assert ferroflow_client.compute(optimized, sync=True) == expected
    on_cluster = ferroflow_client.persist(da.arange(1000, chunks=10))
    assert (on_cluster + 1).sum().compute() == sum(range(1000)) + 1000
    run_until_short(ferroflow_client, (on_cluster + 1).sum)
    again = optimize((on_cluster + 1).sum(), ferroflow_client)  # whose inputs are on the cluster
    assert n_tasks(again) < 30
    assert again.compute() == sum(range(1000)) + 1000


@pytest.mark.cluster
def test_without_the_plugin_nothing_is_known(thread_client: Client) -> None:
    with pytest.raises(ClusterError, match=r"call install\(client\) first"):
        optimize(tree(2), thread_client)


def run_until_short(client: Client, make: Any) -> None:
    """Compute a collection until its tasks are known to be short: at first some may wait for a core.

    Short next to what each costs the cluster, so that it pays to have fewer of them.
    """
    short_s = profile_of(client)[0].task_s
    for _ in range(20):
        before = learned(client)
        client.compute(make(), sync=True)
        took_s = [known[0] for name, known in learned(client).items() if known != before.get(name)]
        if max(took_s) < short_s:
            return
    pytest.fail(f"tasks that do next to nothing take {took_s} s, and not less than {short_s} s")


def n_sent(client: Client, collection: Any) -> int:
    """Return how many tasks the scheduler has when a collection is computed."""

    def count(dask_scheduler: Any) -> int:
        return len(dask_scheduler.tasks)

    future = client.compute(collection)
    future.result()
    return int(client.run_on_scheduler(count))


@pytest.mark.cluster
def test_settings_of_dask_optimize_whatever_is_computed(ferroflow_client: Client) -> None:
    makers: dict[str, Any] = {**COLLECTIONS, "delayed": lambda: tree(7)}
    plain = {name: n_sent(ferroflow_client, make()) for name, make in makers.items()}
    optimized = optimizations(ferroflow_client)
    for name, make in makers.items():
        run_until_short(ferroflow_client, make)
        with dask.config.set(optimized):
            assert n_sent(ferroflow_client, make()) < 0.8 * plain[name], name
            found = ferroflow_client.compute(make(), sync=True)
            np.testing.assert_array_equal(found, make().compute(scheduler="sync"))
            # Elsewhere nobody knows what has run on the cluster.
            assert n_tasks(dask.optimize(make())[0]) <= n_tasks(make())
    with dask.config.set(optimized):
        with dask.annotate(workers=list(ferroflow_client.nthreads())):
            array = da.ones(10, chunks=1).sum()
        assert n_sent(ferroflow_client, array) > 10
        persisted = ferroflow_client.persist(da.arange(1000, chunks=10))
        assert (persisted + 1).sum().compute() == sum(range(1000)) + 1000
        # Several at once, and one that fails.
        sums = dask.compute(persisted.sum(), db.from_sequence(range(10), npartitions=5).sum())
        assert sums == (sum(range(1000)), 45)
        with pytest.raises(ZeroDivisionError):
            dask.delayed(operator.truediv)(1, 0).compute()


@pytest.mark.cluster
def test_settings_need_the_plugin(thread_client: Client) -> None:
    with pytest.raises(ClusterError, match=r"call install\(client\) first"):
        optimizations(thread_client)


@pytest.mark.cluster
def test_bundles_tell_how_long_their_tasks_take(ferroflow_client: Client) -> None:
    for _ in range(5):  # a task may wait for a core now and then; what bundles tell is always the same
        run_until_short(ferroflow_client, lambda: tree(7))
        before_s, _ = learned(ferroflow_client)["combine"]
        sent = []
        for _ in range(6):
            optimized = optimize(tree(7), ferroflow_client)
            sent.append(n_tasks(optimized))
            ferroflow_client.compute(optimized, sync=True)
        # A bundle under the name of its last task would make that seem long, and the next cut finer.
        mean_s, _ = learned(ferroflow_client)["combine"]
        if max(sent) < 40 and mean_s < 10 * before_s:
            return
    pytest.fail(f"a task that took {before_s} s takes {mean_s} s in bundles, of which there are {sent}")
