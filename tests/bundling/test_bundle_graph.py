"""Bundled graphs give the same values in fewer tasks, under the same keys, in an order that can run."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Alias, DataNode, Task, TaskRef, convert_legacy_graph
from dask.base import optimize
from dask.order import order
from dask.utils import key_split
from dask_graphs import (
    COLLECTIONS,
    FOUR,
    Graph,
    Known,
    assert_consistent,
    chain,
    combine,
    delivered_keys,
    graph_of,
    inner_keys,
    tree,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ferroflow_dask.annotations import BUNDLE_PREFIX
from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.graphs import BundledGraph, bundle_graph
from ferroflow_dask.bundling.ordering import in_order
from ferroflow_dask.bundling.results import Results
from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.cluster_profile import ClusterProfile

DURATIONS = pytest.mark.parametrize(
    "learned",
    [{}, Known(1e-5), Known(1e-3), Known(1.0), Known(1e-5, except_for={"sum": Averages(1.0), "add": None})],
    ids=["unknown", "10 µs", "1 ms", "1 s", "some 1 s, some unknown"],
)


def bundled(collection: Any, learned: Any, cluster: ClusterProfile = FOUR) -> BundledGraph:
    tasks, keys = graph_of(collection)
    found = bundle_graph(tasks, keys, cluster, learned, "0")
    assert_consistent(tasks, {*keys}, found)
    return found


def assert_same_values(found: BundledGraph, collection: Any) -> None:
    tasks, keys = graph_of(collection)
    for value, expected in zip(dask.get(found.tasks, keys), dask.get(tasks, keys), strict=True):
        np.testing.assert_array_equal(value, expected)


# Values


@DURATIONS
@pytest.mark.parametrize("name", COLLECTIONS)
def test_a_bundled_collection_has_the_same_values_in_no_more_tasks(name: str, learned: Any) -> None:
    collection = COLLECTIONS[name]()
    found = bundled(collection, learned)
    assert_same_values(found, collection)
    tasks, _ = graph_of(collection)
    n_tasks = len(found.tasks.keys() - delivered_keys(found))
    assert n_tasks <= len(tasks)
    if learned.get("sum") == Averages(1e-5):
        assert n_tasks < len(tasks)


#: Computations on a frame with the columns `name` and `value` in ten partitions.
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
def test_bundled_data_frames_have_the_same_values_in_fewer_tasks(name: str) -> None:
    pd = pytest.importorskip("pandas")
    dd = pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame({"name": list("abcd") * 25, "value": range(100)})
    tasks, keys = graph_of(OF_FRAMES[name](dd.from_pandas(frame, npartitions=10)))
    found = bundle_graph(tasks, keys, FOUR, Known(1e-4), "0")
    assert_consistent(tasks, {*keys}, found)
    assert len(found.tasks.keys() - delivered_keys(found)) < len(tasks)
    for part, expected in zip(dask.get(found.tasks, keys), dask.get(tasks, keys), strict=True):
        pd.testing.assert_series_equal(part, expected)


def test_arguments_of_all_kinds_arrive() -> None:
    def collect(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    one, two = dask.delayed(combine)("x", 1), dask.delayed(combine)("y", 2)
    nested = dask.delayed(collect)(1, [one, {"two": two}], None, one, last=two, plain=(3,))
    again = dask.delayed(collect)(nested, nested=[nested], data=dask.delayed(np.arange(3)))
    tasks, keys = graph_of(again)
    for learned in (Known(1e-5), Known(1e-3)):
        found = bundle_graph(tasks, keys, FOUR, learned, "0")
        assert found.bundles
        assert repr(dask.get(found.tasks, keys)) == repr(dask.get(tasks, keys))


# The cut


def test_short_tasks_become_few_and_long_or_unknown_tasks_stay() -> None:
    assert len(bundled(tree(6), Known(1e-5)).bundles) == 2  # one, and its wanted value
    assert 1 < len(bundled(tree(6), Known(2e-3)).tasks) < 64
    assert len(bundled(tree(3), Known(10.0)).tasks) > 8
    tasks, keys = graph_of(tree(3))
    assert bundle_graph(tasks, keys, FOUR, {}, "0") == BundledGraph(tasks, {})
    wanted = mapped(100)
    assert bundle_graph(wanted, wanted.keys(), FOUR, Known(1.0), "0") == BundledGraph(wanted, {})


def test_a_prefix_of_which_nothing_is_known_stays_separate() -> None:
    tasks = chain("short", Task("new", combine, 0), 9)
    tasks |= {"other": Task("other", combine, 0, TaskRef("short-3"), TaskRef("short-8"))}
    found = bundle_graph(tasks, {"other"}, FOUR, Known(1e-5, except_for={"new": None, "other": None}), "0")
    assert_consistent(tasks, {"other"}, found)
    assert found.tasks["new"] is tasks["new"]
    assert len(found.bundles["other"].tasks) == 1  # it reads other tasks than before
    assert len(found.tasks) <= 4


@pytest.mark.parametrize(
    ("memory_nbytes", "threads", "largest"),
    [
        pytest.param(3200, 1, 127, id="eight values fit in a quarter of a worker's memory"),
        pytest.param(12_800, 4, 127, id="each of four threads has its part"),
        pytest.param(12_800, 1, 127, id="much memory"),
        pytest.param(1200, 1, 1, id="three values are too few for each of the cuts"),
        pytest.param(4800, 4, 1, id="three values for each of four threads, too"),
    ],
)
def test_a_bundle_holds_no_more_than_the_part_of_memory_of_its_thread(
    memory_nbytes: int, threads: int, largest: int
) -> None:
    # A tree of 127 tasks whose depth-first order needs eight values at once.
    collection, cluster = tree(6), ClusterProfile((threads,) * 4, memory_nbytes=memory_nbytes)
    found = bundled(collection, Known(1e-5, nbytes=100.0), cluster)
    assert max(map(len, inner_keys(found)), default=1) == largest
    assert_same_values(found, collection)


def test_a_bundle_does_not_read_more_from_outside_than_memory_allows() -> None:
    # Each task reads a result that exists already.
    tasks = {f"n-{i}": Task(f"n-{i}", combine, i, TaskRef(f"x-{i}")) for i in range(40)}
    tasks["sum"] = Task("sum", combine, 40, *map(TaskRef, [*tasks]))
    few, many = (
        bundle_graph(
            tasks,
            {"sum"},
            replace(FOUR, memory_nbytes=2000),
            Known(1e-5, nbytes=1.0),
            "0",
            outside_nbytes={f"x-{i}": nbytes for i in range(40)},
        )
        for nbytes in (1.0, 50.0)
    )
    assert len(few.tasks) == 2  # the bundle, and its value
    assert len(many.tasks) > 2


def test_bundles_do_not_hold_far_more_results_than_single_tasks_in_the_order_of_dask() -> None:
    # Two arrays whose chunks are cut by slices: a bundle of neighbours would return the pieces of all.
    left, right = (da.random.default_rng(seed).random((96, 96), chunks=8) for seed in range(2))
    tasks, keys = graph_of((left[1:, 1:] - right[:-1, :-1]).sum())
    cluster = replace(FOUR, memory_nbytes=1_600_000)
    found = bundle_graph(tasks, keys, cluster, Known(3e-4, nbytes=1000.0), "0")
    roomy = bundle_graph(tasks, keys, replace(FOUR, memory_nbytes=2**34), Known(3e-4, nbytes=1000.0), "0")
    assert found.bundles
    # The memory of all workers is for 6400 values, a tenth of it for 640.
    n_returned = [sum(len(bundle.exports) for bundle in each.bundles.values()) for each in (found, roomy)]
    assert n_returned[0] < 10 < n_returned[1]


@pytest.mark.parametrize(
    ("n", "nbytes", "largest"),
    [(120, 1e3, 8), (120, 4e6, 1), (2000, 1e5, 107)],
    ids=["small ones", "large ones", "those of which a hundredth of all memory for eight bundles has many"],
)
def test_bundles_share_few_values_with_other_graphs(n: int, nbytes: float, largest: int) -> None:
    tasks = {f"n-{i}": Task(f"n-{i}", combine, i) for i in range(n)}
    found = bundle_graph(
        tasks, tasks.keys(), replace(FOUR, memory_nbytes=2**31), Known(1e-3, nbytes=nbytes), "0"
    )
    assert 0.9 * largest <= max(map(len, inner_keys(found)), default=1) <= largest


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_bundle_does_not_wait_for_many_large_results(is_awaited: bool) -> None:
    nbytes = {f"x-{i}": 4e6 for i in range(120)}
    tasks = {f"n-{i}": Task(f"n-{i}", combine, i, TaskRef(key)) for i, key in enumerate(nbytes)}
    found = bundle_graph(
        tasks,
        tasks.keys(),
        replace(FOUR, memory_nbytes=2**31),
        Known(1e-3, nbytes=1.0),
        "0",
        outside_nbytes=nbytes,
        holders={} if is_awaited else {key: ["a"] for key in nbytes},
    )
    assert bool(found.bundles) is not is_awaited


def most_homes(tasks: Graph, home: Mapping[str, str], nbytes: float, learned: Known) -> int:
    """Bundle tasks that read results on some workers; return from how many workers a bundle reads at most."""
    found = bundle_graph(
        tasks,
        {"sum"},
        replace(FOUR, memory_nbytes=2**34),
        learned,
        "0",
        outside_nbytes=dict.fromkeys(home, nbytes),
        holders={key: [worker] for key, worker in home.items()},
    )
    assert len(found.tasks) < 40
    return max(len({home[key] for key in bundle.places if key in home}) for bundle in found.bundles.values())


@pytest.mark.parametrize("nbytes", [1.0, 4e6], ids=["little", "much"])
def test_tasks_that_read_much_share_a_bundle_if_one_worker_has_it(nbytes: float) -> None:
    home = {f"x-{i}": f"worker-{i % 4}" for i in range(160)}
    tasks = {f"n-{i}": Task(f"n-{i}", combine, i, TaskRef(key)) for i, key in enumerate(home)}
    tasks["sum"] = Task("sum", combine, 160, *map(TaskRef, [*tasks]))
    assert most_homes(tasks, home, nbytes, Known(1e-3, nbytes=1.0)) == (1 if nbytes > 1 else 4)


def test_a_tree_over_scattered_data_reads_them_where_they_are() -> None:
    rng = random.Random(0)
    home = {f"x-{i}": f"worker-{rng.randrange(4)}" for i in range(256)}
    tasks = {f"n-{i}": Task(f"n-{i}", combine, i, TaskRef(key)) for i, key in enumerate(home)}
    partial = [f"p-{i}" for i in range(16)]
    tasks |= {
        key: Task(key, combine, i, *(TaskRef(f"n-{16 * i + j}") for j in range(16)))
        for i, key in enumerate(partial)
    }
    tasks["sum"] = Task("sum", combine, 0, *map(TaskRef, partial))
    assert most_homes(tasks, home, 2e6, Known(1e-4, nbytes=8.0)) == 1


def test_a_result_larger_than_a_workers_share_stays_separate() -> None:
    tasks = chain("n", Task("big", combine, 0), 9)
    learned = Known(1e-5, except_for={"big": Averages(1e-5, 5000.0)})
    found = bundle_graph(tasks, {"n-8"}, replace(FOUR, memory_nbytes=4000), learned, "0")
    assert found.tasks["big"] is tasks["big"]


@pytest.mark.parametrize("name", COLLECTIONS)
def test_equal_graphs_are_cut_alike_and_their_bundles_have_different_keys(name: str) -> None:
    tasks, keys = graph_of(COLLECTIONS[name]())
    first = bundle_graph(tasks, keys, FOUR, Known(1e-5), "1")
    second = bundle_graph(tasks, keys, FOUR, Known(1.1e-5), "2")
    assert inner_keys(first) == inner_keys(second)
    # The scheduler may still have the first one. A task that has its bundle to itself keeps its key.
    several = [{key for key, one in each.bundles.items() if len(one.tasks) > 1} for each in (first, second)]
    assert several[0] & several[1] <= {*keys}


# Keys


def test_a_bundle_has_another_prefix_than_its_tasks_named_for_those_that_take_longest() -> None:
    tasks = chain("light", Task("heavy-0", combine, 0), 5)
    tasks["end"] = Task("end", combine, None, TaskRef("light-4"))
    learned = Known(1e-5, except_for={"heavy": Averages(1e-3), "end": None})
    found = bundle_graph(tasks, {"end"}, FOUR, learned, "0")
    (key,) = found.tasks.keys() - {"end"}
    assert key_split(key) == f"{BUNDLE_PREFIX}-heavy"


def test_a_bundle_has_the_number_of_its_tasks_by_prefix_and_their_duration() -> None:
    tasks, keys = graph_of(tree(6))
    found = bundle_graph(tasks, keys, FOUR, Known(2e-3), "0")
    bundles = [bundle for bundle in map(bundle_in, found.tasks.values()) if bundle is not None]
    stood_for = [dict(bundle.stands_for) for bundle in bundles]
    assert {name for each in stood_for for name, _ in each} == {"combine"}
    n_single = len(found.tasks.keys() - delivered_keys(found)) - len(bundles)
    assert sum(sum(each.values()) for each in stood_for) == 127 - n_single
    for bundle, each in zip(bundles, stood_for, strict=True):
        assert bundle.cost_s == pytest.approx(2e-3 * sum(each.values()))


def mapped(n_tasks: int) -> Graph:
    """Return the graph of `client.map`: a client wants each of the tasks."""
    return {f"n-{i}": Task(f"n-{i}", combine, i) for i in range(n_tasks)}


@pytest.mark.parametrize("cost_s", [1e-5, 1e-3])
def test_bundles_deliver_the_values_that_a_client_wants(cost_s: float) -> None:
    tasks = mapped(1_000)
    found = bundle_graph(tasks, tasks.keys(), FOUR, Known(cost_s), "0")
    assert_consistent(tasks, {*tasks}, found)
    assert delivered_keys(found) == tasks.keys()
    bundles = found.tasks.keys() - tasks.keys()
    assert 1 <= len(bundles) <= 30
    for key in bundles:  # neighbours
        numbers = sorted(int(one.key.removeprefix("n-")) for one in found.bundles[key].tasks)
        assert numbers == list(range(numbers[0], numbers[-1] + 1))


@pytest.mark.parametrize(("nbytes", "is_apart"), [(8.0, True), (1e9, False)])
def test_long_neighbours_are_in_different_bundles_if_their_results_move_cheaply(
    nbytes: float, is_apart: bool
) -> None:
    # So many workers that the scheduler cannot feed them with single tasks.
    cluster = ClusterProfile((1,) * 256, task_s=1e-3, bandwidth=1e9)
    tasks = mapped(2_560)
    found = bundle_graph(tasks, tasks.keys(), cluster, Known(0.1, nbytes), "0")
    assert_consistent(tasks, {*tasks}, found)
    bundles = found.tasks.keys() - tasks.keys()
    assert 256 <= len(bundles) < 1_280
    for key in bundles:
        numbers = sorted(int(one.key.removeprefix("n-")) for one in found.bundles[key].tasks)
        gaps = {later - earlier for earlier, later in itertools.pairwise(numbers)}
        assert (min(gaps) > 100) if is_apart else (gaps == {1})


def test_a_bundle_returns_either_wanted_values_or_others() -> None:
    tasks = mapped(400)
    tasks |= {f"m-{i}": Task(f"m-{i}", combine, i) for i in range(400)}
    tasks["all"] = Task("all", combine, 0, *map(TaskRef, [*tasks]))
    wanted = {key for key in tasks if key[0] == "n"} | {"all"}
    found = bundle_graph(tasks, wanted, FOUR, Known(1e-3), "0")
    assert_consistent(tasks, wanted, found)
    for bundle in found.bundles.values():
        assert not bundle.delivered or set(bundle.exports) <= wanted


def test_a_bundle_is_small_to_send() -> None:
    tasks, keys = graph_of(tree(7))
    (bundle, _) = bundle_graph(tasks, keys, FOUR, Known(1e-6), "0").tasks.values()
    alone = sum(len(pickle.dumps(task)) for task in tasks.values())
    assert len(pickle.dumps(bundle)) < alone / 2


# Any graph


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph of calls, aliases and data, some of which read values that are not in it."""
    tasks: Graph = {}
    for i in range(draw(st.integers(1, 25))):
        key = f"n-{i}" if draw(st.booleans()) else f"long-{i}"
        earlier = st.sampled_from([*tasks, "outside"])
        needed = draw(st.lists(earlier, max_size=3, unique=True))
        kinds = [Task(key, combine, i, *map(TaskRef, needed))]
        if len(needed) == 1:
            kinds.append(Alias(key, needed[0]))
        elif not needed:
            kinds.append(DataNode(key, i))
        tasks[key] = draw(st.sampled_from(kinds))
    return tasks


@settings(max_examples=100)
@given(graphs(), st.data(), st.integers(1, 6))
def test_any_graph_has_the_same_values(tasks: Graph, data: st.DataObject, workers: int) -> None:
    keys = st.sampled_from(sorted(tasks))
    wanted, alone = data.draw(st.sets(keys, min_size=1)), data.draw(st.sets(keys))
    kinds = [{}, Known(1e-5), Known(1e-3), Known(1.0), Known(1e-5, except_for={"long": Averages(1.0)})]
    learned = data.draw(st.sampled_from(kinds))
    places = data.draw(st.sampled_from([{}, {"outside": ("holder", 1)}]))
    cluster = ClusterProfile((1,) * workers)
    found = bundle_graph(tasks, wanted, cluster, learned, "0", alone=alone, places=places)
    assert_consistent(tasks, wanted, found, places)
    assert not any(inner & alone for inner in inner_keys(found) if len(inner) > 1)
    outside = {"outside": DataNode("outside", 100), "holder": DataNode("holder", Results((0, 100)))}
    expected = {**tasks, **outside}
    for key in wanted:
        assert dask.get({**found.tasks, **outside}, key) == dask.get(expected, key)
    for key in found.bundles.keys() - tasks.keys():
        value = dask.get({**found.tasks, **outside}, key)
        exports = found.bundles[key].exports
        values = value.values if isinstance(value, Results) else (value,)
        assert values == tuple(dask.get(expected, export) for export in exports)


# The order of tasks in a bundle


@given(graphs(), st.data())
def test_each_task_comes_once_and_after_what_it_reads(tasks: Graph, data: st.DataObject) -> None:
    tasks = dict(data.draw(st.permutations([*tasks.items()])))
    keys = in_order(tasks)
    position = {key: i for i, key in enumerate(keys)}
    assert position.keys() == tasks.keys()
    assert len(keys) == len(tasks)
    for key, task in tasks.items():
        assert all(position[needed] < position[key] for needed in task.dependencies if needed in position)


def calls(**needed: str) -> Graph:
    """Return tasks by what they read, as in `a="b c"`."""
    return {key: Task(key, combine, key, *map(TaskRef, read.split())) for key, read in needed.items()}


def test_chains_stay_together_and_what_is_loose_comes_last() -> None:
    keys = in_order(calls(loose="", a0="", b0="", a1="a0", b1="b0", a2="a1", b2="b1", end="a2 b2"))
    a, b = ([f"{name}{i}" for i in range(3)] for name in "ab")
    assert keys in ([*a, *b, "end", "loose"], [*b, *a, "end", "loose"])


def test_tasks_that_need_each_other_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="Cycle detected"):
        in_order(calls(a="c", b="a", c="b", d="", e="d"))


def test_where_there_are_few_chains_it_is_dasks_order_of_numbers() -> None:
    numbers = da.ones((8, 8), chunks=(1, 1))
    (collection,) = optimize((numbers + numbers.T - numbers.mean(axis=0)).sum())
    tasks = convert_legacy_graph(dict(collection.__dask_graph__()))
    # Dask breaks ties by the order of sets, which is the same for the same numbers.
    number: dict[Any, Any] = {key: 1000 + n for n, key in enumerate(sorted(tasks, key=str))}
    turn = order({number[key]: task.substitute(number, key=number[key]) for key, task in tasks.items()})
    assert in_order(tasks) == sorted(tasks, key=lambda key: turn[number[key]])


@pytest.mark.parametrize("n_read", [1, 2, 3])
def test_another_key_of_a_large_value_counts_as_much_as_the_value(n_read: int) -> None:
    learned = {"root": Averages(0.001, 2e6, 2e6), "read": Averages(0.002, 10, 10)}
    cluster = replace(FOUR, memory_nbytes=2**31, bandwidth=1e8)
    plain: Graph = {("root", i): Task(("root", i), combine, i) for i in range(80)}
    named = plain | {("name", i): Alias(("name", i), ("root", i)) for i in range(80)}

    def n_tasks(graph: Graph, read: str) -> int:
        readers: Graph = {
            ("read", i): Task(
                ("read", i), combine, *(TaskRef((read, (7 * i + j) % 80)) for j in range(n_read))
            )
            for i in range(80)
        }
        found = bundle_graph(graph | readers, readers, cluster, learned, "0")
        return len(found.tasks.keys() - delivered_keys(found))

    assert n_tasks(named, "name") == n_tasks(plain, "root")
