"""Held parts of graphs: planned when the sizes of their shuffles are known, under all events."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from math import inf
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from bundled import Bundling, gates, on_bundling_cluster, wait_at
from distributed import Client, Worker, fire_and_forget, futures_of, wait
from random_shuffles import cluster, compare_held, limit_shuffles
from waiting import comes

from ferroflow_dask import explain, install, uninstall
from ferroflow_dask.scheduler.graphs import stages

N_PROGRAMS = 24


@pytest.fixture(autouse=True)
def p2p() -> Iterator[None]:
    with dask.config.set({"dataframe.shuffle.method": "p2p", "array.rechunk.method": "p2p"}):
        yield


@pytest.mark.cluster
def test_random_programs_yield_the_same_as_by_p2p() -> None:
    with cluster() as stock, cluster() as held:
        install(held)
        differences, counts = compare_held(range(N_PROGRAMS), stock, held)
        workers: Any = held.cluster
        found = workers.scheduler.extensions["stealing"].graphs.stages.counts
    assert not differences
    assert counts["equal"] > N_PROGRAMS // 2
    assert found["planned"] > N_PROGRAMS // 2
    assert not found["split"]


def rows(seed: int, n: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"k": rng.integers(0, 20, n), f"v{seed}": rng.integers(0, 100, n)})


def frames(seconds: float) -> tuple[Any, pd.DataFrame]:
    """Return two joins, one behind the other, and their result; inputs take so long."""

    def wait(part: pd.DataFrame) -> pd.DataFrame:
        time.sleep(seconds)
        return part

    first, second, third = rows(1, 300), rows(2, 40), rows(3, 30)
    parts = [
        dd.from_pandas(one, npartitions=4).map_partitions(wait, meta=one) for one in (first, second, third)
    ]
    joined = parts[0].merge(parts[1], on="k", broadcast=False).merge(parts[2], on="k", broadcast=False)
    return joined, first.merge(second, on="k").merge(third, on="k")


def ordered(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values([*frame.columns]).reset_index(drop=True)


def held(on: Bundling) -> int:
    return len(on.stealing.core.held)


async def assert_ends(futures: list[Any], expected: pd.DataFrame) -> None:
    parts = await asyncio.wait_for(asyncio.gather(*futures), 30)
    pd.testing.assert_frame_equal(
        ordered(pd.concat(parts)), ordered(expected), check_dtype=False, check_index_type=False
    )


def on_stages(test: Callable[[Bundling], Awaitable[None]], **options: Any) -> None:
    async def run(on: Bundling) -> None:
        await test(on)

    on_bundling_cluster(run, resources=(None, None, None), **options)


@pytest.mark.cluster
def test_a_part_is_held_in_the_first_run_and_planned_at_once_in_the_second() -> None:
    async def test(on: Bundling) -> None:
        for n_held in (1, 0):
            on.forget_seen()
            before = dict(on.stealing.graphs.stages.counts)
            collection, expected = frames(0.0)
            futures = futures_of(on.client.persist(collection))
            await assert_ends(futures, expected)
            now = on.stealing.graphs.stages.counts
            assert now["held"] - before["held"] >= n_held
            assert now["planned"] == now["held"]
            assert not on.seen.barriers
            if not n_held:
                assert now == before
            del futures
            await on.is_empty()

    on_stages(test)


@pytest.mark.cluster
def test_much_data_is_shuffled_by_p2p_before_all_inputs_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_shuffles(monkeypatch, 100)

    async def test(on: Bundling) -> None:
        collection, expected = frames(0.1)
        futures = futures_of(on.client.persist(collection))
        await comes(lambda: any("hash-join-transfer" in str(key) for key in on.scheduler.tasks))
        inputs = [ts for key, ts in on.scheduler.tasks.items() if "wait" in str(key)]
        assert any(not ts.who_has for ts in inputs)
        await assert_ends(futures, expected)

    on_stages(test)


# Events


async def kill(on: Bundling, _: list[Any]) -> None:
    await on.workers[0].close()


async def kill_two(on: Bundling, _: list[Any]) -> None:
    await on.workers[0].close()
    await on.workers[1].close()


async def join(on: Bundling, _: list[Any]) -> None:
    on.workers.append(await Worker(on.scheduler.address, nthreads=1))


async def cancel_all(on: Bundling, futures: list[Any]) -> None:
    await on.client.cancel(futures)
    futures.clear()


async def cancel_some(on: Bundling, futures: list[Any]) -> None:
    await on.client.cancel(futures[::2])
    await asyncio.gather(*futures[1::2])
    futures.clear()


async def remove(on: Bundling, _: list[Any]) -> None:
    await uninstall(on.client)


async def another_client(on: Bundling, futures: list[Any]) -> None:
    async with Client(on.scheduler.address, asynchronous=True) as other:
        collection, _ = frames(0.0)
        for one in futures_of(other.persist(collection)):
            fire_and_forget(one)
    await asyncio.gather(*futures)


async def another_graph(on: Bundling, _: list[Any]) -> None:
    collection, expected = frames(0.0)
    assert await on.client.compute(collection.k.count()) == len(expected)


async def fail_to_plan(on: Bundling, futures: list[Any]) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("on purpose")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "rewrite", fail)
        await asyncio.gather(*futures)
    assert on.stealing.graphs.stages.counts["split"] or on.stealing.graphs.stages.counts["planned"]


EVENTS = (
    *(kill, kill_two, join, cancel_all, cancel_some, remove),
    *(another_client, another_graph, fail_to_plan),
)


@pytest.mark.cluster
@pytest.mark.parametrize("limit", [2**25, inf, 100, 3000], ids=["gathered", "direct", "P2P", "both"])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_events_while_a_part_is_held_leave_its_results_the_same(
    event: Callable[..., Awaitable[None]], limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_shuffles(monkeypatch, limit)

    async def test(on: Bundling) -> None:
        collection, expected = frames(0.03)
        futures = futures_of(on.client.persist(collection))
        await comes(lambda: held(on) > 0)
        await event(on, futures)
        if futures:
            await assert_ends(futures, expected)
        futures.clear()
        for worker in on.workers[3:]:
            await worker.close()

    on_stages(test)


@pytest.mark.cluster
def test_an_input_that_fails_fails_what_depends_on_it() -> None:
    async def test(on: Bundling) -> None:
        def fail(part: pd.DataFrame) -> pd.DataFrame:
            raise ValueError("on purpose")

        whole = rows(1, 40)
        left = dd.from_pandas(whole, npartitions=4).map_partitions(fail, meta=whole)
        right = dd.from_pandas(rows(2, 40), npartitions=4)
        futures = futures_of(on.client.persist(left.merge(right, on="k", broadcast=False)))
        await wait(futures)
        assert {one.status for one in futures} == {"error"}
        errors = {str(await one.exception()) for one in futures}
        assert errors == {"on purpose"}
        futures.clear()

    on_stages(test)


@pytest.mark.cluster
def test_the_log_has_the_number_of_inputs_of_a_held_part() -> None:
    async def test(on: Bundling) -> None:
        collection, _ = frames(0.05)
        futures = futures_of(on.client.persist(collection))
        await comes(lambda: held(on) > 0)
        (name,) = on.stealing.core.held
        (reason,) = {one.reason for one in await explain(on.client, name) if one.what == "held"}
        assert reason == "until 12 inputs are complete"
        await asyncio.gather(*futures)
        futures.clear()

    on_stages(test)


# What a held part keeps in memory, and how long it waits


def add_both(number: int, part: pd.DataFrame) -> int:
    return number + len(part)


def shuffled(seconds: float) -> list[Any]:
    """Return the partitions of a small shuffle as delayed values."""

    def wait(part: pd.DataFrame) -> pd.DataFrame:
        time.sleep(seconds)
        return part

    whole = rows(1, 40)
    frame = dd.from_pandas(whole, npartitions=4).map_partitions(wait, meta=whole)
    return list(frame.shuffle("k").to_delayed())


@pytest.mark.cluster
def test_what_is_read_beside_a_shuffle_is_not_computed_before_the_part_is_planned() -> None:
    async def test(on: Bundling) -> None:
        parts, n = shuffled(0.05), 40
        read = [dask.delayed(len)("four", dask_key_name=f"large-{i}") for i in range(n)]
        sums = [
            dask.delayed(add_both)(one, parts[i % len(parts)], dask_key_name=f"sum-{i}")
            for i, one in enumerate(read)
        ]
        future = on.client.compute(dask.delayed(sum)(sums))
        await comes(lambda: held(on) > 0)
        while held(on):
            large = [ts for key, ts in on.scheduler.tasks.items() if str(key).startswith("large-")]
            assert len(large) < n
            await asyncio.sleep(0.001)
        assert await asyncio.wait_for(future, 30) == 4 * n + 10 * 40

    on_stages(test)


@pytest.mark.cluster
def test_a_part_is_planned_before_its_slow_inputs_that_are_not_shuffled_exist() -> None:
    async def test(on: Bundling) -> None:
        with gates() as make:
            gate, parts = make(), shuffled(0.0)
            slow = gate.task("slow-0")
            future = on.client.compute(dask.delayed(add_both)(slow, parts[0]))
            await comes(lambda: on.stealing.graphs.stages.counts["planned"] > 0)
            assert not on.scheduler.tasks["slow-0"].who_has
            gate.open()
            await asyncio.wait_for(future, 30)

    on_stages(test)


@pytest.mark.cluster
def test_a_part_does_not_wait_for_the_data_of_another_one() -> None:
    def wait_at_gate(part: pd.DataFrame, name: str) -> pd.DataFrame:
        if part.index[0] == 0:  # the others leave threads free
            wait_at("part", name)
        return part

    def joined(seed: int, name: str) -> Any:
        left, right = rows(seed, 200), rows(seed + 1, 100)
        frame = dd.from_pandas(left, npartitions=4).map_partitions(wait_at_gate, name, meta=left)
        return frame.merge(dd.from_pandas(right, npartitions=4), on="k", broadcast=False)

    async def test(on: Bundling) -> None:
        with gates() as make:
            slow_gate, fast_gate = make(), make()
            slow, fast = on.client.compute([joined(1, slow_gate.name), joined(5, fast_gate.name)])
            await comes(lambda: held(on) == 2)
            fast_gate.open()
            found = await asyncio.wait_for(fast, 30)
            assert held(on) == 1
            assert not slow.done()
            slow_gate.open()
            await assert_ends([slow], rows(1, 200).merge(rows(2, 100), on="k"))
            pd.testing.assert_frame_equal(ordered(found), ordered(rows(5, 200).merge(rows(6, 100), on="k")))

    on_stages(test)


# Plans that fail, or come too late


@pytest.mark.cluster
@pytest.mark.parametrize("limit", [2**25, 100], ids=["plain", "P2P"])
def test_a_part_is_planned_again_if_tasks_have_changed_meanwhile(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_shuffles(monkeypatch, limit)
    monkeypatch.setattr(stages, "_FEW_TASKS", 0)

    async def test(on: Bundling) -> None:
        n_plans, stock = 0, stages.rewrite
        changing, has_changed = threading.Event(), threading.Event()

        def slowly(*args: Any) -> Any:
            nonlocal n_plans
            n_plans += 1
            plan = stock(*args)
            if n_plans == 1:
                changing.set()
                has_changed.wait(10)
            return plan

        monkeypatch.setattr(stages, "rewrite", slowly)
        collection, _ = frames(0.0)
        futures = futures_of(on.client.persist(collection))
        await comes(changing.is_set)
        first = futures.pop(0)
        key = first.key
        del first
        await comes(lambda: key not in on.scheduler.tasks)
        has_changed.set()
        await asyncio.wait_for(asyncio.gather(*futures), 30)
        assert n_plans > 1
        assert not on.stealing.graphs.stages.counts["split"]
        futures.clear()

    on_stages(test)


@pytest.mark.cluster
def test_a_failure_to_replace_a_part_ends_the_plugin_and_not_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(stages.Stages, "_is_valid", fail)

    async def test(on: Bundling) -> None:
        stealing = on.stealing
        collection, expected = frames(0.0)
        futures = futures_of(on.client.persist(collection))
        await assert_ends(futures, expected)
        assert str(stealing.error) == "on purpose"
        futures.clear()

    on_stages(test)
