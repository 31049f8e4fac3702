"""Bundles with errors, and bundles that are split: when their worker dies, and if they give up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from bundled import (
    CALLS,
    Bundling,
    Gate,
    PlannedError,
    add,
    apart,
    chain,
    end_worker_once,
    fail,
    fail_once,
    fork,
    gates,
    keys_of,
    leaves,
    on_bundling_cluster,
    take_all_for_short,
    task,
)
from cluster_tests import runs_on
from conftest import checked_client
from distributed import Reschedule, wait
from in_charge import scheduler_of, stealing_of
from waiting import comes, until

from ferroflow_dask import install
from ferroflow_dask.bundling import sequence

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _all_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_for_short(monkeypatch)
    monkeypatch.setattr(sequence, "_given_up", {})


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gates() as make:
        yield make()


async def outcomes(cluster: Bundling, futures: list[Any]) -> dict[str, Any]:
    """Return the value of each future, or the failed task that is blamed, by key."""
    await wait(futures)
    found: dict[str, Any] = {}
    for future in futures:
        if future.status != "error":
            found[future.key] = await future
            continue
        error, ts = await future.exception(), cluster.scheduler.tasks[future.key]
        assert isinstance(error, PlannedError)
        assert error.args == (ts.exception_blame.key,)
        found[future.key] = ts.exception_blame.key
    return found


# Errors


def two_totals(*more: Any, **functions: Any) -> list[Any]:
    """Return two outputs, of which only the first depends on the first ten leaves."""
    inner = leaves("leaf", **functions)
    return [task("total-0", *inner, *more), task("total-1", *inner[10:])]


def mixed(failing: Any) -> list[Any]:
    """Return two outputs that read from the same bundle, in which only the first half depends on a task."""
    halves = [task(f"half-{i}", failing if i < 15 else i) for i in range(30)]
    return [task("total-0", *halves), task("total-1", *halves[15:])]


FAILING: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "in a bundle with the key of an output": (
        lambda: [chain("inc", 0, at_5=fail)[-1], chain("dec", 0)[-1]],
        {"inc-11": "inc-5", "dec-11": 12},
    ),
    "in a bundle that three outputs read": (
        lambda: [*fork(at_5=fail)[1], chain("dec", 0)[-1]],
        {"out-0": "inc-5", "out-1": "inc-5", "out-2": "inc-5", "dec-11": 12},
    ),
    "in one of several bundles of leaves": (
        lambda: two_totals(at_3=fail),
        {"total-0": "leaf-3", "total-1": 431 - 20},
    ),
    "before all bundles": (
        lambda: mixed(apart("first-0", function=fail)),
        {"total-0": "first-0", "total-1": sum(range(16, 31)) + 1},
    ),
    "after all bundles": (
        lambda: [*two_totals(), task("last-0", *leaves("leaf"), function=fail)],
        {"total-0": 466, "total-1": 411, "last-0": "last-0"},
    ),
}


@pytest.mark.parametrize("name", FAILING)
@runs_on(on_bundling_cluster)
async def test_only_the_dependents_fail_if_a_task_fails(cluster: Bundling, name: str) -> None:
    make, expected = FAILING[name]
    assert await outcomes(cluster, cluster.client.compute(make())) == expected
    assert cluster.counts["created"] > 0
    cluster.scheduler.validate_state()


@runs_on(on_bundling_cluster)
async def test_a_failed_task_and_those_around_it_have_their_keys_and_none_runs_twice(
    cluster: Bundling,
) -> None:
    outs = fork(at_5=fail)[1]
    futures = cluster.client.compute(outs)
    await outcomes(cluster, futures)
    assert (cluster.counts["divided"], cluster.counts["split"]) == (1, 0)
    assert set(cluster.scheduler.tasks) == keys_of(*outs)
    assert {f"inc-{i}": 1 for i in range(6)} == CALLS
    assert cluster.scheduler.tasks["inc-5"].state == "erred"


@pytest.mark.parametrize(("at", "expected"), [("at_8", 19), ("at_3", "inc-3")], ids=["before it", "after it"])
@runs_on(on_bundling_cluster)
async def test_a_bundle_fails_while_another_graph_reads_a_task(
    cluster: Bundling, at: str, expected: Any, gate: Gate
) -> None:
    inner, outs = fork(gate.future(cluster.client), **{at: fail})
    futures = cluster.client.compute(outs)
    more = cluster.client.compute(chain("dec", inner[5])[-1])
    await comes(lambda: "dec-11" in cluster.keys)
    assert cluster.counts["shared"] == 1
    gate.open()
    found = await outcomes(cluster, [*futures, more])
    assert found.pop("dec-11") == expected
    assert set(found.values()) == {at.replace("at_", "inc-")}
    cluster.scheduler.validate_state()


@runs_on(on_bundling_cluster)
async def test_a_bundle_fails_that_was_sent_before_another_graph_came(cluster: Bundling, gate: Gate) -> None:
    held = gate.task("inc-3", chain("inc", 0, 3)[-1])
    middle = chain("next", held, 8, at_5=fail)
    futures = cluster.client.compute([task(f"out-{i}", middle[-1], i) for i in range(3)])
    await comes(gate.reached.is_set)
    more = cluster.client.compute([chain("dec", middle[4])[-1], chain("double", middle[6])[-1]])
    await comes(lambda: "dec-11" in cluster.keys)
    gate.open()
    found = await outcomes(cluster, [*futures, *more])
    assert found.pop("dec-11") == 21
    assert set(found.values()) == {"next-5"}
    cluster.scheduler.validate_state()


@runs_on(on_bundling_cluster)
async def test_a_retried_output_runs_again(cluster: Bundling) -> None:
    future = cluster.client.compute(chain("inc", 0, at_11=fail_once)[-1])
    assert await outcomes(cluster, [future]) == {"inc-11": "inc-11"}
    await cluster.client.retry([future])
    assert await future == 12


@runs_on(on_bundling_cluster)
async def test_a_retried_task_of_a_bundle_runs_again(cluster: Bundling) -> None:
    futures = cluster.client.compute(fork(at_5=fail_once)[1])
    assert set((await outcomes(cluster, futures)).values()) == {"inc-5"}
    # `Client.retry` raises a KeyError for tasks between the failed one and an output, in Dask, too.
    cluster.scheduler.stimulus_retry([future.key for future in futures])
    await comes(lambda: all(future.status == "finished" for future in futures))
    assert await cluster.client.gather(futures) == [13, 14, 15]


@runs_on(on_bundling_cluster)
async def test_a_cancelled_output_does_not_change_the_others(cluster: Bundling, gate: Gate) -> None:
    start = gate.future(cluster.client)
    out, *others = cluster.client.compute([*fork(start)[1], chain("dec", start)[-1]])
    await comes(lambda: "dec-11" in cluster.keys)
    await cluster.client.cancel([out, others[-1]])
    await comes(lambda: "dec-11" not in cluster.scheduler.tasks)
    gate.open()
    assert out.cancelled()
    assert await cluster.client.gather(others[:-1]) == [15, 16]
    assert "dec-0" not in CALLS


@runs_on(on_bundling_cluster)
async def test_all_outputs_are_cancelled_while_their_bundle_runs(cluster: Bundling, gate: Gate) -> None:
    inner = chain("next", gate.task("inc-3", chain("inc", 0, 3)[-1]))
    futures = cluster.client.compute([task(f"out-{i}", inner[-1], i) for i in range(3)])
    await comes(gate.reached.is_set)
    await cluster.client.cancel(futures)
    await cluster.is_empty()
    gate.open()


# Other reasons


def reschedule_once(key: str, *values: int) -> int:
    if not CALLS[f"{key} asked"]:
        CALLS[f"{key} asked"] += 1
        raise Reschedule
    return add(key, *values)


@runs_on(on_bundling_cluster)
async def test_a_task_that_asks_for_another_worker_leaves_its_bundle(cluster: Bundling) -> None:
    assert await cluster.values(*fork(at_5=reschedule_once)[1]) == [13, 14, 15]
    assert (cluster.counts["divided"], cluster.counts["split"]) == (1, 0)
    assert {n for key, n in CALLS.items() if key.startswith("inc-")} == {1}


def test_a_bundle_is_split_if_its_worker_dies(tmp_path: Path) -> None:
    path = str(tmp_path / "ended")
    # Two workers: a cluster gives up one that takes more than 15 s to restart.
    with checked_client(2, processes=True, set_as_default=False) as client:
        install(client)
        inner = chain("inc", 0, 6)
        ending = dask.delayed(end_worker_once)("end-0", path, inner[-1], dask_key_name="end-0")
        last = chain("next", ending, 6)[-1]
        futures = client.compute([task(f"out-{i}", last, i) for i in range(3)])
        assert client.gather(futures) == [14, 15, 16]
        scheduler, graphs = scheduler_of(client), stealing_of(client).graphs
        bundles = graphs.bundles
        assert Path(path).exists()
        assert not graphs.deaths.suspects
        assert bundles.counts["split"] == 1
        assert keys_of(last) <= set(scheduler.tasks)
        del futures
        until(lambda: not scheduler.tasks)
        assert not len(bundles)
        client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.validate_state())


@runs_on(on_bundling_cluster)
async def test_a_task_of_a_split_bundle_exists_for_a_graph_that_reads_from_it(
    cluster: Bundling, gate: Gate
) -> None:
    inner = chain("inc", gate.task("first-0"), at_10=fail)
    futures = cluster.client.compute([task(f"out-{i}", inner[8], inner[11], i) for i in range(3)])
    await comes(gate.reached.is_set)
    # A bundle of the second graph reads a value of the first one, and runs another of its tasks again.
    last = chain("dec", task("both-0", inner[8], inner[3]))[-1]
    futures += cluster.client.compute([task(f"more-{i}", last, inner[3], i) for i in range(3)])
    await comes(lambda: "more-2" in cluster.keys)
    # The third graph gives that task its own key, under which it reads from the second graph.
    futures += cluster.client.compute([inner[3], task("same-0", inner[3])])
    await comes(lambda: "same-0" in cluster.keys)
    gate.open()
    found = await asyncio.wait_for(outcomes(cluster, futures), 10)
    assert [found[f"out-{i}"] for i in range(3)] == ["inc-10"] * 3
    assert (found["inc-3"], found["same-0"]) == (5, 6)
    assert [found[f"more-{i}"] for i in range(3)] == [34 + i for i in range(3)]


# Bundles that give up


def iterate(key: str, *values: int) -> Any:
    CALLS[key] += 1
    return iter([*values])


def drain(key: str, values: Any) -> int:
    return add(key, *values)


@runs_on(on_bundling_cluster, resources=(None,))
async def test_a_bundle_that_would_read_an_iterator_is_split_and_its_reader_stays_separate(
    cluster: Bundling,
) -> None:
    def made() -> Any:
        lazy = apart("lazy-0", 1, 2, function=iterate)
        return chain("inc", task("drained-0", lazy, function=drain))[-1]

    assert await cluster.values(made()) == [16]
    assert cluster.counts["split"] == 1
    assert CALLS["drained-0"] == 1
    await comes(lambda: "drained" in cluster.stealing.graphs._learned.separate)
    await cluster.is_empty()
    cluster.forget_seen()
    assert await cluster.values(made()) == [16]
    assert cluster.keys == {"lazy-0", "drained-0", "inc-11"}
    assert cluster.counts["split"] == 1


@runs_on(on_bundling_cluster, resources=(None,))
async def test_a_bundle_that_would_return_an_iterator_is_split_and_its_maker_stays_separate(
    cluster: Bundling,
) -> None:
    def made() -> Any:
        lazy = task("lazy-0", chain("inc", 0)[-1], function=iterate)
        return apart("drained-0", lazy, function=drain)

    assert await cluster.values(made()) == [13]
    assert cluster.counts["split"] == 1
    await comes(lambda: "lazy" in cluster.stealing.graphs._learned.separate)
    await cluster.is_empty()
    cluster.forget_seen()
    assert await cluster.values(made()) == [13]
    assert cluster.keys == {cluster.bundle_of("inc"), "lazy-0", "drained-0"}
    assert cluster.counts["split"] == 1
