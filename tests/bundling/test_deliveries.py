"""Deliveries: values that a client wants leave a bundle while it runs, under their own keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from bundled import (
    CALLS,
    Bundling,
    Gate,
    PlannedError,
    add,
    fail,
    leaves,
    on_bundling_cluster,
    take_all_for_short,
    task,
    wait_at,
)
from cluster_tests import runs_on
from distributed import wait
from distributed.diagnostics.plugin import SchedulerPlugin
from waiting import comes

from ferroflow_dask import uninstall
from ferroflow_dask.bundling import deliveries

N = 60
NAMES = [f"map-{i}" for i in range(N)]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_for_short(monkeypatch)
    monkeypatch.setattr(deliveries, "_INTERVAL_S", 0.0)  # each value at once


def mapped(cluster: Bundling, n: int = N, **functions: Callable[..., Any]) -> list[Any]:
    """Map functions over numbers; `at_3=fail` lets the task 3 call another function than `add`."""
    names = NAMES[:n]
    calls = [functions.get(f"at_{i}", add) for i in range(n)]
    futures: list[Any] = cluster.client.map(call, calls, names, range(n), key=names)
    return futures


def call(function: Callable[..., Any], key: str, number: int) -> Any:
    return function(key, number)


def at_gate(gate: Gate) -> Callable[..., Any]:
    return partial(wait_at_gate, gate.name)


def wait_at_gate(gate: str, key: str, number: int) -> int:
    return wait_at(key, gate, number)


def on_delivering_cluster(test: Callable[[Bundling], Coroutine[Any, Any, None]]) -> None:
    """Run a test on a fresh cluster once its workers deliver."""

    async def run(cluster: Bundling) -> None:
        await cluster.stealing.changes.settled()
        await test(cluster)

    on_bundling_cluster(run)


async def leaves_cluster(cluster: Bundling, number: int) -> None:
    """Close a worker, and wait until the scheduler knows: Dask would ask it for results until a timeout."""
    await cluster.workers[number].close()
    await comes(lambda: cluster.workers[number].address not in cluster.scheduler.workers)


def stored(cluster: Bundling) -> set[Any]:
    """Return the keys whose values workers hold."""
    return {key for worker in cluster.workers for key in worker.data}


def is_empty(cluster: Bundling) -> bool:
    return not any(worker.data or worker.state.tasks for worker in cluster.workers)


class Finished(SchedulerPlugin):
    """Notes the spans of tasks that ended, as tools of Dask's do."""

    name = "finished"
    ferroflow_bundles = True

    def __init__(self) -> None:
        self.spans: dict[Any, Any] = {}

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if (start, finish) == ("processing", "memory"):
            self.spans[key] = kwargs["startstops"]


@runs_on(on_delivering_cluster)
async def test_a_mapped_function_has_the_same_values_priorities_and_spans_in_few_tasks(
    cluster: Bundling,
) -> None:
    plugin = Finished()
    cluster.scheduler.add_plugin(plugin)
    futures = mapped(cluster)
    assert await cluster.client.gather(futures) == [i + 1 for i in range(N)]
    assert set(CALLS.values()) == {1}
    assert cluster.counts["tasks"] == N
    assert cluster.counts["created"] < N / 4
    assert cluster.stealing.graphs.deliveries.count == N
    priorities = {key: cluster.seen.tasks[key].priority[-1] for key in cluster.keys}
    # Graphs of equal priorities differ by less.
    assert [priorities[name] for name in NAMES] == pytest.approx(list(range(N)), abs=1e-4)
    bundles = cluster.keys - {*NAMES}
    assert 0 <= min(priorities[key] for key in bundles) < 1e-4
    assert len({priorities[key] for key in bundles}) == len(bundles)
    spans = [plugin.spans[name][0] for name in NAMES]
    assert {span["action"] for span in spans} == {"compute"}
    assert all(span["start"] <= span["stop"] for span in spans)
    await comes(lambda: stored(cluster) == {*NAMES})  # and no bundle
    del futures
    await cluster.is_empty()
    await comes(lambda: is_empty(cluster))


@runs_on(on_delivering_cluster)
async def test_only_the_failed_task_has_the_error_and_the_others_run_once(cluster: Bundling) -> None:
    cluster.stealing.core.learned.pause_s = 0.0  # so that there are several bundles for each thread
    futures = mapped(cluster, at_5=fail)
    await wait(futures)
    assert [future.status for future in futures] == ["finished"] * 5 + ["error"] + ["finished"] * (N - 6)
    assert isinstance(await futures[5].exception(), PlannedError)
    assert await cluster.client.gather([*futures[:5], *futures[6:]]) == [i + 1 for i in range(N) if i != 5]
    assert set(CALLS.values()) == {1}
    assert cluster.counts["divided"] == 1
    assert cluster.counts["split"] == 0


@runs_on(on_delivering_cluster)
async def test_a_cancelled_task_leaves_no_value(cluster: Bundling, gate: Gate) -> None:
    futures = mapped(cluster, 12, at_0=at_gate(gate))
    await comes(gate.reached.is_set)
    await cluster.client.cancel([futures[11]])
    await comes(lambda: "map-11" not in cluster.scheduler.tasks)
    gate.open()
    assert await cluster.client.gather(futures[:11]) == [i + 1 for i in range(11)]
    await comes(lambda: stored(cluster) == {*NAMES[:11]})
    assert futures[11].cancelled()


@runs_on(on_delivering_cluster)
async def test_cancelled_tasks_leave_no_bundle(cluster: Bundling, gate: Gate) -> None:
    futures = mapped(cluster, at_0=at_gate(gate))
    await comes(gate.reached.is_set)
    await cluster.client.cancel(futures)
    await cluster.is_empty()
    gate.open()
    await comes(lambda: is_empty(cluster))


@runs_on(on_delivering_cluster)
async def test_values_of_a_lost_worker_are_computed_again(cluster: Bundling) -> None:
    futures = mapped(cluster)
    await wait(futures)
    await leaves_cluster(cluster, 0)
    assert await cluster.client.gather(futures) == [i + 1 for i in range(N)]
    assert set(CALLS.values()) <= {1, 2}


@runs_on(on_delivering_cluster)
async def test_a_running_bundle_delivers_values_and_dask_takes_it_over(cluster: Bundling, gate: Gate) -> None:
    futures = mapped(cluster, 12, at_5=at_gate(gate))
    assert await cluster.client.gather(futures[:5]) == [1, 2, 3, 4, 5]
    cluster.scheduler.validate_state()
    await uninstall(cluster.scheduler)
    gate.open()
    assert await cluster.client.gather(futures) == [i + 1 for i in range(12)]
    await comes(lambda: stored(cluster) == {*NAMES[:12]})
    del futures
    await cluster.is_empty()
    await comes(lambda: is_empty(cluster))


@runs_on(on_delivering_cluster)
async def test_values_that_are_not_delivered_are_read_from_the_bundle(cluster: Bundling) -> None:
    for worker in cluster.workers:
        del worker.extensions[deliveries.EXTENSION]
    assert await cluster.client.gather(mapped(cluster)) == [i + 1 for i in range(N)]
    assert set(CALLS.values()) == {1}
    assert cluster.stealing.graphs.deliveries.count == 0


@runs_on(on_delivering_cluster)
async def test_a_later_graph_reads_delivered_values(cluster: Bundling) -> None:
    kept = cluster.client.persist(leaves("leaf", N))
    assert await cluster.values(task("total-0", *kept)) == [sum(range(1, N + 1)) + 1]
    assert set(CALLS.values()) == {1}
    assert cluster.stealing.graphs.deliveries.count == N


@runs_on(on_delivering_cluster)
async def test_a_value_that_was_released_is_computed_again_by_itself(cluster: Bundling) -> None:
    futures = mapped(cluster, 12)
    await wait(futures)
    del futures[3]
    await comes(lambda: "map-3" not in cluster.scheduler.tasks)
    again = cluster.client.map(call, [add] * 12, NAMES[:12], range(12), key=NAMES[:12])
    assert await cluster.client.gather(again) == [i + 1 for i in range(12)]
    assert {key for key, n in CALLS.items() if n > 1} == {"map-3"}


@pytest.mark.parametrize("seed", range(6))
@runs_on(on_delivering_cluster)
async def test_values_come_whatever_is_cancelled_and_whichever_worker_leaves(
    cluster: Bundling, seed: int
) -> None:
    futures = mapped(cluster)
    for _ in range(seed):
        await asyncio.sleep(0.001)
    await cluster.client.cancel(futures[seed::7])
    if seed % 2:
        await leaves_cluster(cluster, int(seed % 3 == 0))
    left = [(i, future) for i, future in enumerate(futures) if not future.cancelled()]
    assert await cluster.client.gather([future for _, future in left]) == [i + 1 for i, _ in left]
