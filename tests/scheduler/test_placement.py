"""Placement: while tasks are queued, the tasks that read results wait where these are."""

from __future__ import annotations

import random
from typing import Any

import dask
import dask.array as da
import pytest
from dask._task_spec import convert_legacy_graph
from virtual_runs import L, finished

from ferroflow_dask.scheduler.queue_time import TOKEN, QueueTime
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

MB = 10**6


def difference_of_shifted() -> dict[Any, VirtualTask]:
    """Return the graph of an array, shifted along each axis, and the mean of the difference.

    After it is shifted, each chunk has several readers of one input.
    """
    array = da.random.default_rng(1).random((600, 600), chunks=(50, 50))
    shifted = da.roll(array, 1, axis=0) - da.roll(array, 1, axis=1)
    (optimized,) = dask.optimize(shifted.mean())
    tasks = convert_legacy_graph(dict(optimized.__dask_graph__()))
    rng = random.Random(0)
    return {
        key: VirtualTask(rng.uniform(0.4, 0.6), tuple(task.dependencies), nbytes=8 * MB)
        for key, task in tasks.items()
    }


def run(policy: str, nthreads: int) -> tuple[int, int, float]:
    """Return the bytes that move, the most that all workers hold [B], and the makespan [s]."""
    cluster, held = VirtualCluster(4, policy=policy, latency_s=L, bandwidth=1e9, nthreads=nthreads), [0]
    follow = cluster.record.transition

    def transition(*args: Any, **more: Any) -> None:
        follow(*args, **more)
        held.append(sum(ws.nbytes for ws in cluster.scheduler.workers.values()))

    cluster.record.transition = transition  # type: ignore[method-assign]
    cluster.submit(difference_of_shifted())
    finished(cluster)
    moved = sum(transfer.nbytes for transfer in cluster.record.transfers)
    return moved, max(held), cluster.record.makespan_s


@pytest.mark.parametrize("nthreads", [1, 2])
def test_readers_stay_with_their_inputs_while_tasks_are_queued(
    nthreads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stock_held, stock_s = run("dask", nthreads)
    moved, held, taken_s = run("ferroflow", nthreads)
    monkeypatch.setattr(QueueTime, "__call__", lambda *_: 0.0)
    moved_without, *_ = run("ferroflow", nthreads)
    assert moved <= 0.85 * moved_without  # about as much as stock Dask
    assert held <= 1.05 * stock_held
    assert taken_s <= 1.01 * stock_s


def readers(token: str, n: int) -> dict[Any, VirtualTask]:
    """Return a value and its readers, which have a token in their names as collections have."""
    value = (f"value-{token:0>{TOKEN}}", 0)
    graph = {(f"reader-{token:0>{TOKEN}}", i): VirtualTask(1.0, (value,)) for i in range(n)}
    return {value: VirtualTask(0.1, nbytes=16 * MB), **graph}


def test_readers_do_not_wait_for_the_queue_of_another_graph() -> None:
    cluster = VirtualCluster(4, latency_s=L, bandwidth=1e9)
    cluster.submit(readers("a", 1))  # their durations are known from now on
    cluster.run()
    cluster.submit({(f"long-{'b':0>{TOKEN}}", i): VirtualTask(1.0) for i in range(200)})
    cluster.run(until=2.0)
    cluster.submit(graph := readers("c", 8))
    finished(cluster)
    ran = {one.worker for one in cluster.record.executions if one.key in graph}
    assert len(ran) == 4


@pytest.mark.parametrize("first", [0, ("part", 0)], ids=str)
def test_keys_may_begin_with_anything(first: Any) -> None:
    cluster = VirtualCluster(4, latency_s=L, bandwidth=1e9)
    graph = {(first, "root", i): VirtualTask(0.1, nbytes=MB) for i in range(80)}
    cluster.submit(graph | {(first, "read", i): VirtualTask(0.1, (key,)) for i, key in enumerate(graph)})
    finished(cluster)
    assert cluster.stealing.error is None
