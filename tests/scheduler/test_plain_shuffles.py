"""P2P shuffles that become plain tasks: the same results, and the cases in which P2P stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from bundled import Bundling, on_bundling_cluster, take_all_for_short
from dask._task_spec import Task, TaskRef, cull, execute_graph
from distributed import wait
from distributed.shuffle._core import P2PBarrierTask
from random_shuffles import (
    DIRECT,
    GATHERED,
    assert_same,
    cluster,
    compare,
    graph_of,
    limit_shuffles,
    n_barriers,
)
from waiting import comes

from ferroflow_dask import FerroflowPlugin, explain
from ferroflow_dask.bundling import shuffle_tasks, shuffles
from ferroflow_dask.bundling.plain_shuffles import Choice, with_plain_tasks
from ferroflow_dask.bundling.shuffles import Shuffle, has_p2p, unfused
from ferroflow_dask.scheduler.graphs import samples

N_PROGRAMS = 32


@pytest.fixture(autouse=True)
def p2p(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shuffle by P2P, and wait for the measured parts of a shuffle however busy the machine is."""
    monkeypatch.setattr(samples, "_FIRST_S", 100.0)
    monkeypatch.setattr(samples, "_LEAST_S", 100.0)
    with dask.config.set({"dataframe.shuffle.method": "p2p", "array.rechunk.method": "p2p"}):
        yield


def frame(n: int = 4, **columns: Any) -> Any:
    data = {"name": [*"abcd"] * 25, "value": np.arange(100.0), **columns}
    rows = pd.DataFrame(data).rename_axis(columns="field")  # P2P loses this name
    return dd.from_pandas(rows, npartitions=n, sort=False)


def shuffled(**columns: Any) -> Any:
    return frame(**columns).shuffle("name")


def joined(**columns: Any) -> Any:
    other = frame(3).rename(columns={"value": "other"})
    return frame(**columns).merge(other, on="name", shuffle_method="p2p", broadcast=False)


def rechunked() -> Any:
    return da.arange(400, chunks=20).reshape(20, 20).rechunk((20, 4)) + 1


def wide() -> Any:
    return da.arange(8000, chunks=800).reshape(20, 400).rechunk((20, 40))


def always(_: list[Shuffle]) -> Choice:
    return GATHERED


def barrier_in(graph: dict[Any, Any]) -> P2PBarrierTask:
    return next(task for task in graph.values() if isinstance(task, P2PBarrierTask))


@pytest.mark.cluster
def test_random_programs_yield_the_same_as_by_p2p() -> None:
    with cluster() as client:
        differences, counts = compare(range(N_PROGRAMS), client)
    assert not differences
    assert counts["equal"] > N_PROGRAMS // 2


# Graphs


def test_fused_tasks_with_parts_of_a_shuffle_are_taken_apart() -> None:
    graph, keys = graph_of(rechunked())
    barrier = barrier_in(graph)
    unpacks = [key for key, task in graph.items() if barrier.key in task.dependencies]
    assert all(graph[key].has_subgraph() for key in unpacks)
    found = unfused(graph)
    assert not any(task.has_subgraph() for key, task in found.items() if barrier.key in task.dependencies)
    plain = with_plain_tasks(found, always)
    assert not has_p2p(plain.tasks)
    assert {key for task in plain.tasks.values() for key in task.dependencies} <= plain.tasks.keys()
    assert len(plain.outputs) == len(unpacks)
    assert not plain.outputs.keys() & keys  # what reads them has been fused with them
    values = execute_graph(cull(plain.tasks, keys), keys=keys)
    assert np.hstack([values[key] for key in keys]).ravel().tolist() == [*range(1, 401)]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_both_sides_of_a_join_are_replaced_or_none(is_replaced: bool) -> None:
    graph, _ = graph_of(joined())
    groups: list[list[Shuffle]] = []

    def decide(group: list[Shuffle]) -> Choice:
        groups.append(group)
        return GATHERED if is_replaced else Choice()

    found = with_plain_tasks(unfused(graph), decide)
    assert [len(group) for group in groups] == [2]
    assert sorted(len(shuffle.transfers) for shuffle in groups[0]) == [3, 4]
    assert n_barriers(found.tasks) == (0 if is_replaced else 2)
    assert len(found.outputs) == (4 if is_replaced else 0)


@pytest.mark.parametrize(("make", "n_pieces"), [(shuffled, 16), (joined, 28), (rechunked, 5)])
def test_each_output_of_a_direct_shuffle_has_a_piece_of_each_input(
    make: Callable[[], Any], n_pieces: int
) -> None:
    graph, keys = graph_of(make())
    tasks, groups = unfused(graph), list[list[Shuffle]]()

    def directly(group: list[Shuffle]) -> Choice:
        groups.append(group)
        return DIRECT

    found = with_plain_tasks(tasks, directly)
    assert not has_p2p(found.tasks)
    assert sum(shuffle.n_pieces for group in groups for shuffle in group) == len(found.pieces) == n_pieces
    read = [found.tasks[key].dependencies & found.pieces.keys() for key in found.outputs]
    assert sum(map(len, read)) == n_pieces
    assert set().union(*read) == found.pieces.keys()
    gathered = execute_graph(cull(with_plain_tasks(tasks, always).tasks, keys), keys=keys)
    for key, value in execute_graph(cull(found.tasks, keys), keys=keys).items():
        assert_same(value, gathered[key])


@pytest.mark.parametrize("choice", [GATHERED, DIRECT], ids=["gathered", "direct"])
def test_graphs_with_some_chunks_of_a_rechunk_have_the_same_tasks_under_the_same_keys(choice: Choice) -> None:
    whole = with_plain_tasks(unfused(graph_of(wide())[0]), lambda _: choice).tasks
    for part in (wide()[:, 200:], wide()[5:, ::-1]):
        graph, keys = graph_of(part)
        tasks = cull(with_plain_tasks(unfused(cull(graph, keys)), lambda _: choice).tasks, keys)
        own = {key for key in tasks.keys() & whole.keys() if "shuffle-" in str(key)}
        assert own
        for key in own:
            assert tasks[key].func is whole[key].func  # type: ignore[attr-defined]
            assert _without_limits(tasks[key]) == _without_limits(whole[key])


def _without_limits(task: Any) -> list[Any]:
    """Return the arguments of a task without the size above which it reports."""
    return [one for one in task.args if not isinstance(one, float)]


@pytest.mark.parametrize("choice", [GATHERED, DIRECT], ids=["gathered", "direct"])
def test_a_join_of_a_frame_with_itself_is_replaced(choice: Choice) -> None:
    graph, keys = graph_of(frame().merge(frame(), on="name", shuffle_method="p2p", broadcast=False))
    assert n_barriers(graph) == 1
    found = with_plain_tasks(unfused(graph), lambda _: choice)
    assert not has_p2p(found.tasks)
    values = execute_graph(found.tasks, keys=keys)
    assert sum(len(values[key]) for key in keys) == 4 * 25 * 25


@pytest.mark.parametrize("make", [shuffled, joined])
def test_a_shuffle_with_an_unknown_reader_stays_and_others_become_plain(make: Callable[[], Any]) -> None:
    graph, other = graph_of(make())[0], graph_of(rechunked())[0]
    barrier = barrier_in(graph)
    for read in (barrier.key, *barrier.dependencies):
        graph["reader"] = Task("reader", abs, TaskRef(read))
        found = with_plain_tasks(unfused({**graph, **other}), always)
        assert n_barriers(found.tasks) == n_barriers(graph)
        assert graph.items() <= found.tasks.items()
        assert len(found.outputs) == 5


@pytest.mark.parametrize("refused", ["complex numbers", "two columns of one name"])
def test_data_that_p2p_refuses_stays_so_that_its_error_is_raised(refused: str) -> None:
    if refused == "complex numbers":
        graph, _ = graph_of(joined(waves=np.full(100, 1j)))
    else:
        twice = frame(other=1).rename(columns={"value": "other"})
        graph, _ = graph_of(twice.merge(frame(3), on="name", shuffle_method="p2p", broadcast=False))
    assert with_plain_tasks(unfused(graph), always).tasks == graph


def test_outputs_and_origins_name_tasks_of_the_graph() -> None:
    graph, _ = graph_of(shuffled())
    found = with_plain_tasks(unfused(graph), always)
    barrier = barrier_in(graph)
    assert found.outputs.keys() == {key for key, task in graph.items() if barrier.key in task.dependencies}
    assert found.origins.keys() == found.tasks.keys() - graph.keys()
    assert {*found.origins.values()} == {barrier.key, *barrier.dependencies}
    parts = shuffles.parts_before_outputs(graph)
    assert parts == {barrier.key, *barrier.dependencies} == graph.keys() - found.tasks.keys()


# Functions


@pytest.mark.parametrize("drop_column", [True, False])
def test_an_output_without_rows_is_like_the_empty_input(drop_column: bool) -> None:
    rows = pd.DataFrame({"value": [1.5, 2.5, 3.5], "_partitions": [2, 0, 2]}, index=[7, 8, 9])
    parts = [
        shuffle_tasks.split_frame(part, "_partitions", i, drop_column)
        for i, part in enumerate((rows, rows[:0]))
    ]
    assert [sorted(places) for _, places in parts] == [[0, 2], []]
    shards = [shuffle_tasks.gathered_shards(parts, i) for i in range(3)]
    found = [shuffle_tasks.unpack_frame(one, rows[:0], "_partitions", drop_column) for one in shards]
    whole = rows.drop(columns="_partitions") if drop_column else rows
    for one, expected in zip(found, (whole[1:2], whole[:0], whole[::2]), strict=True):
        assert_same(one, expected)


# Clusters


def barriers(on: Bundling) -> set[str]:
    """Return the keys of the P2P shuffles of all graphs since the last `forget_seen`."""
    return set(on.seen.barriers)


async def assert_yield(on: Bundling, collections: list[Any], expected: list[Any]) -> None:
    for one, other in zip(collections, expected, strict=True):
        assert_same((await on.values(one))[0], other)


def on_cluster_with_stock_first(
    collections: list[Any], test: Callable[[Bundling, list[Any]], Any], without: tuple[str, ...] = ()
) -> None:
    """Run a test with what collections are without the plugin, which is then registered."""

    async def run(on: Bundling) -> None:
        expected = [(await on.values(one))[0] for one in collections]
        assert barriers(on)
        await on.is_empty()
        await on.client.register_plugin(FerroflowPlugin(without=without))
        on.forget_seen()
        await test(on, expected)

    on_bundling_cluster(run, plugin=False)


@pytest.mark.cluster
@pytest.mark.parametrize("most", [2**25, inf, 0], ids=["gathered", "direct", "P2P"])
def test_the_second_run_of_little_data_has_no_p2p(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_shuffles(monkeypatch, most)
    collections = [shuffled(), joined(), rechunked()]

    async def test(on: Bundling, expected: list[Any]) -> None:
        for _ in range(2):
            on.forget_seen()
            for one, other in zip(collections, expected, strict=True):
                await assert_yield(on, [one], [other])
                await on.is_empty()  # the next one reads data that bundles hold
        assert len(barriers(on)) == (0 if most else 4)

    on_cluster_with_stock_first(collections, test)


def joined_twice() -> Any:
    """Return a join whose result is joined again: the data of the second shuffle do not exist at arrival."""
    other = frame(3).rename(columns={"value": "another"})
    return joined().merge(other, on="name", shuffle_method="p2p", broadcast=False)


@pytest.mark.cluster
def test_the_sizes_of_shuffles_behind_others_are_known_to_the_next_run() -> None:
    async def test(on: Bundling, expected: list[Any]) -> None:
        learned, (feature,) = (
            on.stealing.core.learned,
            [one for one in on.stealing.features if one.name == "plain_shuffles"],
        )
        for n_left in (None, 0):
            on.forget_seen()
            await assert_yield(on, [joined_twice()], expected)
            await on.is_empty()
            assert not feature.pending()
            if n_left is None:
                assert barriers(on)
                # Also those of the shuffles that became plain tasks, since their data were measured.
                assert learned.shuffled.keys() >= {
                    key.removeprefix("shuffle-barrier-") for key in barriers(on)
                }
                assert all(100 < nbytes < 2**25 for nbytes in learned.shuffled.values())
            else:
                assert not barriers(on)

    on_cluster_with_stock_first([joined_twice()], test, without=("stages",))


@pytest.mark.cluster
@pytest.mark.parametrize("features_off", [(), ("stages",)], ids=["all features", "without stages"])
def test_the_sizes_of_rechunks_behind_others_are_declared(features_off: tuple[str, ...]) -> None:
    async def test(on: Bundling, expected: list[Any]) -> None:
        on.forget_seen()
        await assert_yield(on, [rechunked().rechunk((4, 20))], expected)
        assert not barriers(on)
        assert not on.stealing.graphs.stages.counts["held"]

    on_cluster_with_stock_first([rechunked().rechunk((4, 20))], test, without=features_off)


def rows(n: int) -> Any:
    return pd.DataFrame({"name": [*"abcd"] * n, "value": np.arange(4.0 * n)})


@pytest.mark.cluster
def test_sizes_of_data_that_a_function_of_the_user_makes_are_not_trusted_to_stay() -> None:
    collection = dd.from_map(rows, [5, 6, 7], meta=rows(1)).shuffle("name").shuffle("value")
    graph, _ = graph_of(collection)
    both = [key.removeprefix("shuffle-barrier-") for key in graph if str(key).startswith("shuffle-barrier")]

    async def test(on: Bundling, expected: list[Any]) -> None:
        on.stealing.core.learned.shuffled.update(dict.fromkeys(both, 1000.0))
        for _ in range(2):
            on.forget_seen()
            await assert_yield(on, [collection], expected)
            await on.is_empty()
        assert len(barriers(on)) == 2

    on_cluster_with_stock_first([collection], test, without=("stages",))


@pytest.mark.cluster
def test_a_shuffle_that_has_ended_is_not_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_shuffles(monkeypatch, 0)

    async def test(on: Bundling, expected: list[Any]) -> None:
        (feature,) = (one for one in on.stealing.features if one.name == "plain_shuffles")
        held = []
        for _ in range(2):
            held.append(on.client.persist(shuffled()))
            assert_same(await on.client.compute(held[-1]), expected[0])
            assert not feature.pending()
        held.clear()

    on_cluster_with_stock_first([shuffled()], test)


@pytest.mark.cluster
def test_data_of_far_more_than_the_known_size_are_reported_and_shuffled_by_p2p_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collection = joined_twice()

    async def test(on: Bundling, expected: list[Any]) -> None:
        learned = on.stealing.core.learned
        await assert_yield(on, [collection], expected)
        await on.is_empty()
        real = dict(learned.shuffled)
        assert real
        limit_shuffles(monkeypatch, 100)
        learned.shuffled.update(dict.fromkeys(real, 1.0))
        on.forget_seen()
        await assert_yield(on, [collection], expected)
        await comes(lambda: all(learned.shuffled[one] > 100 for one in real))
        await on.is_empty()
        on.forget_seen()
        await assert_yield(on, [collection], expected)
        assert {f"shuffle-barrier-{one}" for one in real} <= barriers(on)

    on_cluster_with_stock_first([collection], test)


@pytest.mark.cluster
@pytest.mark.parametrize("limit", [2**25, inf], ids=["gathered", "direct"])
def test_two_graphs_with_other_outputs_of_one_rechunk(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_shuffles(monkeypatch, limit)

    async def test(on: Bundling) -> None:
        source = on.client.persist(da.arange(8000, chunks=2000).reshape(20, 400).rechunk((5, 400)))
        await wait(source)
        both = source.rechunk((20, 40))
        halves = [both[:, :200], both[:, 200:]]
        values = await on.client.gather([on.client.compute(half) for half in halves])
        assert np.array_equal(np.hstack(values), np.arange(8000).reshape(20, 400))

    on_bundling_cluster(test)


@pytest.mark.cluster
@pytest.mark.parametrize("make", [shuffled, joined])
@pytest.mark.parametrize("first", ["p2p", "plain", "direct"])
def test_what_is_on_the_scheduler_stays_as_it_is_for_other_graphs(
    first: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_all_for_short(monkeypatch)
    limits = {"p2p": 0, "plain": 2**30, "direct": inf}
    collection = make()
    lengths = collection.map_partitions(len, meta=(None, "i8"))

    async def test(on: Bundling, expected: list[Any]) -> None:
        limit_shuffles(monkeypatch, limits[first])
        held = on.client.persist(collection)
        assert_same(await on.client.compute(held), expected[0])
        created = barriers(on)
        assert bool(created) == (first == "p2p")
        for limit in limits.values():
            limit_shuffles(monkeypatch, limit)
            on.forget_seen()
            # The graph of the shuffle, not what is held of it.
            await assert_yield(on, [lengths], expected[1:])
            assert barriers(on) <= created
            assert first != "p2p" or not any("shuffle-gather" in str(key) for key in on.keys)
        events = [event for _, event in on.scheduler.get_events("scheduler")]
        assert not sum(event["metrics"]["key_collisions"] for event in events if event.get("metrics"))
        del held

    on_cluster_with_stock_first([collection, lengths], test)


@pytest.mark.cluster
@pytest.mark.parametrize(("limit", "what"), [(2**25, "plain tasks"), (inf, "direct shuffle")])
def test_the_log_of_an_output_says_that_plain_tasks_return_it(
    limit: float, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_all_for_short(monkeypatch)
    limit_shuffles(monkeypatch, limit)

    async def test(on: Bundling) -> None:
        held = on.client.persist(shuffled())
        await on.client.compute(held)
        assert not barriers(on)
        decisions = await explain(on.client, next(key for key in on.keys if "p2pshuffle" in str(key)))
        (reason,) = {one.reason for one in decisions if one.what == what}
        assert reason.startswith("a P2P shuffle of ")
        del held

    on_bundling_cluster(test)


def test_the_plugin_can_be_imported_if_distributed_lacks_the_names_of_p2p() -> None:
    program = (
        "import distributed.shuffle._core as core; del core.P2PBarrierTask; "
        "from ferroflow_dask.bundling.rewrite import shuffles; "
        "print(shuffles.has_p2p({}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
