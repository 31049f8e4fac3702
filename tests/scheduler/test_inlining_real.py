"""Small results on real workers: they come with tasks and to clients, and all is as it was without us."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from cluster_tests import runs_on
from in_charge import feature
from one_loop import Cluster, on_cluster
from waiting import comes

from ferroflow_dask import uninstall
from ferroflow_dask.scheduler.features.inlined_results import InlinedResults
from ferroflow_dask.scheduler.features.inlined_results_worker import TASK

OFF = {
    f"ferroflow.features.{name}": False
    for name in ("inlined_results", "prefetch", "low_latency_messages", "working_sets")
}


def total(*numbers: float) -> float:
    return sum(numbers)


async def listen(cluster: Cluster) -> Any:
    inlining = feature(cluster.stealing, "inlined_results")
    await comes(lambda: len(inlining._supporting) == len(cluster.workers))
    return inlining


def n_sent(cluster: Cluster) -> int:
    """Return how often workers have been asked for results."""
    return sum(worker.transfer_outgoing_count_total for worker in cluster.workers)


def placed(cluster: Cluster, function: Any, *args: Any, worker: int) -> Any:
    address = cluster.workers[worker].address
    return cluster.client.submit(function, *args, workers=[address], pure=False)


@runs_on(on_cluster)
async def test_inputs_come_with_tasks_and_results_to_clients(cluster: Cluster) -> None:
    inlining = await listen(cluster)
    first, second = (placed(cluster, total, i, worker=i) for i in (0, 1))
    both = placed(cluster, total, first, second, worker=0)
    assert await cluster.client.gather([first, second, both]) == [0, 1, 1]
    assert n_sent(cluster) == 0
    assert inlining.counts() == {"received": 3, "sent": 1}
    states = cluster.scheduler.tasks
    assert [len(states[future.key].who_has) for future in (first, second)] == [1, 1]
    assert [len(worker.data) for worker in cluster.workers] == [2, 1]  # the copy went with its task
    assert [state.metadata for state in states.values()] == [None, None, None]
    on_workers = [ts for worker in cluster.workers for ts in worker.state.tasks.values()]
    assert [ts.metadata for ts in on_workers] == [{}, {}, {}]
    for future in (first, second, both):
        future.release()
    await comes(lambda: not any(worker.data for worker in cluster.workers))
    assert not inlining.known


@runs_on(on_cluster)
async def test_large_and_other_results_come_from_workers(cluster: Cluster) -> None:
    await listen(cluster)
    array = placed(cluster, np.ones, 10_000, worker=0)
    lists = placed(cluster, lambda: [[[[1]]]], worker=0)
    number = placed(cluster, total, 1, worker=1)
    found = await cluster.client.gather([array, lists, number])
    assert (found[0].sum(), *found[1:]) == (10_000, [[[[1]]]], 1)
    assert [worker.transfer_outgoing_count_total for worker in cluster.workers] == [1, 0]
    read = placed(cluster, np.sum, array, worker=1)
    assert await read == 10_000
    assert [worker.transfer_outgoing_count_total for worker in cluster.workers] == [2, 0]


@runs_on(on_cluster)
async def test_a_result_that_is_lost_is_still_said_to_be(cluster: Cluster) -> None:
    await listen(cluster)
    number = placed(cluster, total, 1, worker=0)
    array = placed(cluster, np.ones, 10_000, worker=1)
    await cluster.client.gather([number, array])
    ts = cluster.scheduler.tasks[array.key]
    cluster.scheduler.remove_replica(ts, cluster.scheduler.workers[cluster.workers[1].address])
    answer = await cluster.scheduler.handlers["gather"](keys=[number.key, array.key])
    assert answer["status"] == "error"
    assert array.key in answer["keys"]


@runs_on(on_cluster, config=OFF)
async def test_settings_turn_all_changes_of_messages_off(cluster: Cluster) -> None:
    first, second = (placed(cluster, total, i, worker=i) for i in (0, 1))
    assert await placed(cluster, total, first, second, worker=0) == 1
    assert n_sent(cluster) == 2
    for worker in cluster.workers:
        ours = sorted(name.rstrip("-0123456789") for name in worker.plugins if "ferroflow" in name)
        assert ours == ["ferroflow-bundles", "ferroflow-capable"]
        assert worker.batched_stream.interval == 0.002  # as Dask's
        assert TASK not in worker.stream_handlers
    assert "_task_to_msg" not in vars(cluster.scheduler)
    assert cluster.scheduler.handlers["gather"] == cluster.scheduler.gather


@runs_on(on_cluster)
async def test_once_uninstalled_all_is_as_before_and_late_messages_harm_nobody(cluster: Cluster) -> None:
    inlining = await listen(cluster)
    slow = cluster.map(2, 0.3)
    await asyncio.gather(*(cluster.processing(future) for future in slow))
    await uninstall(cluster.scheduler)
    assert "_task_to_msg" not in vars(cluster.scheduler)
    assert cluster.scheduler.handlers["gather"] == cluster.scheduler.gather
    n = n_sent(cluster)
    # Workers tell what they were asked for.
    assert await cluster.client.gather(slow) == [0, 1]
    assert n_sent(cluster) > n
    assert len(cluster.scheduler.workers) == 2
    assert (inlining.counts()["received"], inlining.known) == (0, {})
    await comes(lambda: not any("ferroflow" in name for worker in cluster.workers for name in worker.plugins))


@runs_on(on_cluster, limit_s=20)
async def test_a_task_with_its_inputs_runs_though_the_plugin_leaves(cluster: Cluster) -> None:
    inlining = await listen(cluster)
    first, second = (placed(cluster, total, i, worker=i) for i in (0, 1))
    await cluster.client.gather([first, second])
    both = [placed(cluster, total, first, second, worker=i) for i in (0, 1)]
    await asyncio.gather(*(comes(lambda f=one: f.key in cluster.scheduler.tasks) for one in both))
    assert inlining.counts()["sent"] == 2
    await uninstall(cluster.scheduler)
    assert await cluster.client.gather(both) == [1, 1]
    await comes(
        lambda: not any(TASK in worker.stream_handlers for worker in cluster.workers),
    )


@runs_on(on_cluster, limit_s=20)
async def test_a_result_that_is_reported_after_uninstall_harms_no_task(cluster: Cluster) -> None:
    await listen(cluster)
    leaving = asyncio.create_task(uninstall(cluster.scheduler))
    number = placed(cluster, total, 1, worker=0)
    await leaving
    assert await number == 1
    assert len(cluster.scheduler.workers) == 2


@pytest.mark.parametrize("name", ["message", "task_reported"])
def test_what_fails_leaves_dask_in_charge(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError(f"{name} is broken")

    async def test(cluster: Cluster) -> None:
        await listen(cluster)
        first, second = (placed(cluster, total, i, worker=i) for i in (0, 1))
        assert await placed(cluster, total, first, second, worker=0) == 1
        await comes(lambda: type(cluster.stealing).__name__ == "WorkStealing")
        assert "_task_to_msg" not in vars(cluster.scheduler)
        assert len(cluster.scheduler.workers) == 2

    monkeypatch.setattr(InlinedResults, name, broken)
    with pytest.warns(UserWarning, match=f"{name} is broken"):
        on_cluster(test)
