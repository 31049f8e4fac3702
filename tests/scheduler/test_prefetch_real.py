"""Tasks that are sent ahead of their inputs, on real schedulers and workers."""

from __future__ import annotations

import asyncio
import os
from operator import add
from types import SimpleNamespace
from typing import Any

import dask
import dask.array as da
import distributed
import numpy as np
import pytest
from cluster_tests import runs_on
from dask._task_spec import Task
from distributed import Client, Event, KilledWorker, LocalCluster, Worker
from in_charge import feature
from one_loop import Cluster, on_cluster
from packaging.version import Version
from waiting import comes, soon, wait_for

from ferroflow_dask import explain, install, uninstall


@runs_on(on_cluster, config={"distributed.scheduler.work-stealing": False})
async def test_a_leading_task_is_stolen(cluster: Cluster) -> None:
    event = await Event(name="go", client=cluster.client)
    address = cluster.workers[0].address
    blocking = cluster.client.submit(wait_for, 0, event, workers=[address])
    await cluster.processing(blocking)
    leading = cluster.client.submit(wait_for, 1, event, workers=[address], allow_other_workers=True)
    ts = await cluster.processing(leading)
    following = cluster.client.submit(lambda i: i + 1, leading)
    await comes(lambda: cluster.scheduler.tasks.get(following.key) is not None)
    # Nothing follows a task that waits; here it is sent all the same, as if there had been time.
    prefetch = feature(cluster.stealing, "prefetch")
    prefetch._send(cluster.scheduler.tasks[following.key], ts.processing_on)
    cluster.ask(ts, cluster.workers[0], cluster.workers[1])
    there = cluster.workers[0].state.tasks
    await comes(lambda: not prefetch.ahead and following.key not in there)  # it was withdrawn
    await event.set()
    assert await cluster.client.gather([blocking, leading, following]) == [0, 1, 2]
    assert cluster.stealing.steals["confirmed"] == 1
    assert leading.key in cluster.workers[1].state.tasks
    # The result of the leading task comes with it to any worker: the policy decides anew.
    (placed,) = (one for one in cluster.stealing.decisions.about(following.key) if one.what == "placed")
    assert "prefetched" not in placed.reason
    assert following.key in next(w for w in cluster.workers if w.address == placed.worker).data


class OtherTask(Task):
    """A task that does more than call a function, as a barrier of distributed's shuffles does."""


@runs_on(on_cluster)
async def test_only_plain_calls_lead_and_follow_and_are_led_to(cluster: Cluster) -> None:
    prefetch = feature(cluster.stealing, "prefetch")
    event = await Event(name="go", client=cluster.client)
    for cls in (Task, OtherTask):
        graph = {}
        for one, classes in {
            "leads": (cls, Task, Task),
            "follows": (Task, cls, Task),
            "comes": (Task, Task, cls),
        }.items():
            first = classes[0](f"{one}-{cls.__name__}-0", wait_for, 1, event)
            second = classes[1](f"{one}-{cls.__name__}-1", abs, first.ref())
            third = classes[2](f"{one}-{cls.__name__}-2", abs, second.ref())
            graph |= {task.key: task for task in (first, second, third)}
            future = cluster.client.get(graph, third.key, sync=False)
            await cluster.processing(SimpleNamespace(key=first.key))
            if cls is Task:
                await comes(lambda: len(prefetch.ahead) >= 2)
            else:
                await asyncio.sleep(0.02)  # it would come with the pass that follows, within a millisecond
                assert not prefetch.ahead
            await event.set()
            assert await future == 1
            await event.clear()


@pytest.mark.cluster
def test_shuffles_find_their_tasks_where_they_look_for_them() -> None:
    # Functions of a test travel by value: the processes of workers cannot import its module.
    def a_block(block_info: Any = None) -> Any:
        return np.ones((20, 20))

    settings: dict[str, Any] = {
        "ferroflow.features.low_latency_messages": False,  # so that what goes another way comes first
        "array.rechunk.method": "p2p",
        "distributed.p2p.storage.disk": False,
        "optimization.fuse.active": False,
    }
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as local,
        Client(local) as client,
    ):
        install(client)
        assert client.gather(client.map(abs, range(4))) == [0, 1, 2, 3]
        for n in range(8):
            x = da.map_blocks(a_block, chunks=((20,) * 2, (20,)), dtype=float, name=f"block-{n}")
            total = x.rechunk((40, 10), method="p2p").sum()
            assert client.compute(total, optimize_graph=False).result(timeout=30) == 800


@runs_on(on_cluster)
async def test_workers_are_told_as_they_join_and_until_it_is_uninstalled(cluster: Cluster) -> None:
    def listening() -> list[bool]:
        return [any("ferroflow-prefetch" in name for name in worker.plugins) for worker in cluster.workers]

    async with Worker(cluster.scheduler.address, nthreads=1) as late:
        cluster.workers.append(late)
        await comes(
            lambda: len(feature(cluster.stealing, "prefetch").remote.supporting) >= 3 and all(listening())
        )
        event = await Event(name="go", client=cluster.client)
        first = cluster.client.submit(wait_for, 1, event, workers=[late.address])
        last = cluster.client.submit(lambda i: i + 1, first)
        await comes(lambda: feature(cluster.stealing, "prefetch").ahead)
        prefetch = feature(cluster.stealing, "prefetch")
        await uninstall(cluster.scheduler)
        assert not prefetch.ahead
        assert "_task_to_msg" not in vars(cluster.scheduler)
        await event.set()
        assert await last == 2
        await comes(lambda: not any(listening()))
        cluster.workers.remove(late)


@pytest.mark.cluster
def test_chains_and_trees_on_processes_and_the_task_that_ends_them_is_named() -> None:
    def increment(i: int) -> int:
        return i + 1

    def end_the_process(i: int) -> None:
        os._exit(i)

    def counted(dask_scheduler: Any) -> tuple[int, dict[str, int]]:
        found = {one.name: one.counts() for one in dask_scheduler.extensions["stealing"].features}
        return found["prefetch"]["confirmed"], found["inlined_results"]

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as local,
        Client(local) as client,
    ):
        install(client)
        for _ in range(3):
            future = client.submit(increment, 0, pure=False)
            for _ in range(100):
                future = client.submit(increment, future, pure=False)
            assert future.result(timeout=30) == 101
        graph: dict[str, Any] = {"k0": (increment, 0)}
        graph |= {f"k{i}": (increment, f"k{i - 1}") for i in range(1, 200)}
        assert client.get(graph, "k199") == 200
        level = client.map(float, range(256), pure=False)
        while len(level) > 1:
            level = [client.submit(add, *level[i : i + 2], pure=False) for i in range(0, len(level), 2)]
        assert level[0].result(timeout=60) == 256 * 255 / 2
        confirmed, counts = client.run_on_scheduler(counted)
        assert confirmed > 100
        assert counts["received"] > 100
        assert counts["sent"] > 0
        kept = client.get({"first": (increment, 0), "second": (increment, "first")}, "second", sync=False)
        assert kept.result(timeout=30) == 2
        assert "prefetched" in str(explain(client, "second"))
        if Version(distributed.__version__) < Version("2026.8"):
            return  # its nannies may hang as they start a worker anew, and closing the cluster with them
        # The worker may end before it has told that the first task has ended: for once, that is suspected.
        killing = client.get({"good": (increment, 0), "bad": (end_the_process, "good")}, "bad", sync=False)
        with pytest.raises(KilledWorker, match="'bad'"):
            killing.result(timeout=60)
        # To close a cluster while a nanny starts a worker anew may take forever.
        assert soon(lambda: len(client.nthreads()) == 2, 60)
