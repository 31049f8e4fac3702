"""What changes while tasks run: restrictions, resources, what is known. Nothing is kept of what is gone."""

from __future__ import annotations

from typing import Any

import dask
import pytest
from cluster_tests import runs_on
from dask._task_spec import DataNode
from distributed import SchedulerPlugin, Worker
from distributed.scheduler import DEFAULT_EXTENSIONS
from distributed.stealing import WorkStealing
from one_loop import Cluster, on_cluster
from waiting import comes

from ferroflow_dask import FerroflowPlugin, install, uninstall
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

pytestmark = pytest.mark.cluster


def fails(i: int) -> None:
    raise ValueError(i)


@runs_on(on_cluster)
async def test_a_task_that_is_freed_of_a_restriction_frees_no_other(cluster: Cluster) -> None:
    first = cluster.workers[0]
    futures = cluster.map(12, 0.03, workers=[first.address])
    freed = await cluster.processing(futures[0])
    cluster.scheduler.set_restrictions({freed.key: None})  # as shuffles do with tasks of theirs
    async with Worker(cluster.scheduler.address, nthreads=1) as late:
        futures += cluster.map(4, 0.03, workers=[first.address])
        await cluster.client.gather(futures)
        elsewhere = {*cluster.workers[1].data, *late.data} & {future.key for future in futures}
        assert elsewhere <= {freed.key}


@runs_on(on_cluster, resources=({"GPU": 1}, {}))
async def test_a_worker_that_gains_a_resource_steals_and_is_given_tasks(cluster: Cluster) -> None:
    second = cluster.workers[1]
    futures = cluster.map(10, 0.05, resources={"GPU": 1})
    await cluster.processing(futures[-1])
    await second.set_resources(GPU=1)
    cluster.stealing.balance()  # as it is called by the clock
    await cluster.client.gather(futures)
    n_stolen = len(second.data)
    assert n_stolen >= 2
    more = cluster.map(10, 0.05, resources={"GPU": 1})
    await cluster.client.gather(more)
    assert len(second.data) >= n_stolen + 3


@runs_on(on_cluster)
async def test_after_a_refused_steal_what_waits_may_still_be_stolen(cluster: Cluster) -> None:
    victim, thief = cluster.workers
    busy = cluster.map(1, 0.3, workers=[thief.address])
    await cluster.processing(busy[0])
    futures = cluster.pinned(2, 0.5)
    states = [await cluster.processing(future) for future in futures]
    await comes(lambda: victim.state.executing)
    (running,) = (ts for ts in states if ts.key in {task.key for task in victim.state.executing})
    cluster.ask(running, victim, thief)
    await comes(lambda: not cluster.stealing.in_flight)
    assert cluster.stealing.steals["refused"] == 1
    queue = cluster.stealing.view.workers[victim.address].queue
    assert [task.key for task in queue if task.has_started] == [running.key]
    await cluster.client.gather(futures)
    assert len(thief.data) == 2  # what it had, and what waited


@runs_on(on_cluster)
async def test_nothing_is_kept_of_tasks_that_are_cancelled_or_fail(cluster: Cluster) -> None:
    with dask.annotate(ferroflow_rank=1.0):
        futures = cluster.map(50, 0.1, key="cancelled")
    await cluster.processing(futures[0])
    failing = cluster.client.map(fails, range(10), pure=False)
    await cluster.client.gather(failing, errors="skip")
    await cluster.client.cancel(futures)
    await comes(lambda: not any(ts.key[0] == "c" for ts in cluster.scheduler.tasks.values()))
    assert not any(cluster.stealing.parts.kept().values())


def test_a_restart_forgets_what_was_kept_of_tasks() -> None:
    kept: list[dict[str, Any]] = []

    class RestartsAsAGraphArrives(SchedulerPlugin):
        def update_graph(self, scheduler: Any, **_: Any) -> None:
            kept.append(cluster.stealing.parts.kept())
            cluster.stealing.restart(scheduler)
            kept.append(cluster.stealing.parts.kept())

    known = {"ferroflow_cost": 1.0}
    cluster = VirtualCluster(4)
    cluster.submit({"root": VirtualTask(1.0), "end": VirtualTask(1.0, ("root",))}, "a")
    cluster.submit({"known": VirtualTask(1.0, annotations=known)}, "b")
    cluster.run(until=0.5)
    # No client sends graphs to virtual clusters, where they would be bundled.
    cluster.stealing.graphs.bundles.add({"root": Bundle((DataNode("root", 1),), ("root",), {})})
    # No virtual task raises `Reschedule`.
    cluster.stealing.core.refused["known"] = (cluster.workers[0].state.address,)
    cluster.stealing.graphs.deaths.suspects["known"] = None
    cluster.stealing.graphs.dividing.asked["root"] = ("all", "a test")
    cluster.scheduler.add_plugin(RestartsAsAGraphArrives(), name="restarts")
    cluster.submit({"planned": VirtualTask(1.0, annotations={**known, "ferroflow_rank": 1.0})}, "c")
    before, after = kept
    assert all(before.values())
    assert not any(after.values())


@runs_on(on_cluster, plugin=False, plugins=[FerroflowPlugin()])
async def test_a_plugin_that_is_there_before_the_scheduler_runs_reaches_the_workers(cluster: Cluster) -> None:
    for worker in cluster.workers:
        await comes(lambda worker=worker: any("ferroflow" in name for name in worker.plugins))
        assert type(worker.batched_stream.interval).__name__ == "Interval"


def test_one_task_of_known_duration_lets_no_others_pass_by_the_queue() -> None:
    cluster = VirtualCluster(2, policy="ferroflow")
    cluster.submit({("long", 0): VirtualTask(1.0, annotations={"ferroflow_cost": 1.0})}, "a")
    others = {("load-0a1", i): VirtualTask(0.01) for i in range(100)}
    cluster.at(0.1, cluster.submit, others, "b", priority=1)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, *(len(ws.processing) for ws in cluster.scheduler.workers.values()))
        if cluster.scheduler.queued:
            cluster.at(cluster.time.now + 0.005, look)

    cluster.at(0.101, look)
    cluster.run()
    cluster.check()
    assert 1 <= most <= 3  # Dask's two for a thread, and the long one


def test_what_short_tasks_were_sent_ahead_long_ones_are_not() -> None:
    cluster = VirtualCluster(2, policy="ferroflow", latency_s=0.004, bandwidth=1e12)
    cluster.submit({("short-0a1", i): VirtualTask(0.001, nbytes=8) for i in range(200)}, "a")
    most = {"short-0a1": 0, "long-0b1": 0}

    def look() -> None:
        for ws in cluster.scheduler.workers.values():
            for name, before in most.items():
                most[name] = max(before, sum(ts.key[0] == name for ts in ws.processing))
        if cluster.time.now < 12:
            cluster.at(cluster.time.now + 0.001, look)

    cluster.at(0.0, look)
    long = {("long-0b1", i): VirtualTask(0.5, nbytes=8) for i in range(20)}
    cluster.at(10, cluster.submit, long, "b")
    cluster.run()
    cluster.check()
    assert most["short-0a1"] > 2
    assert most["long-0b1"] == 2  # as with Dask


class StealingOfOthers(WorkStealing):
    pass


def test_what_others_had_put_in_place_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULT_EXTENSIONS, "stealing", StealingOfOthers)

    async def test(cluster: Cluster) -> None:
        scheduler = cluster.scheduler

        def never_queued(ts: Any) -> bool:
            return False

        scheduler.is_rootish = never_queued  # type: ignore[method-assign]
        await install(scheduler)
        await install(scheduler)
        assert scheduler.is_rootish is not never_queued
        await cluster.client.gather(cluster.map(10, 0.001))
        await uninstall(scheduler)
        assert type(cluster.stealing) is StealingOfOthers
        assert vars(scheduler)["is_rootish"] is never_queued
        assert await cluster.client.gather(cluster.map(10, 0.001)) == list(range(10))

    on_cluster(test, plugin=False)


@runs_on(on_cluster)
async def test_what_others_put_in_place_since_stays(cluster: Cluster) -> None:
    scheduler = cluster.scheduler
    ours = scheduler.is_rootish
    asked = []

    def watched(ts: Any) -> bool:
        asked.append(ts.key)
        return ours(ts)

    scheduler.is_rootish = watched  # type: ignore[method-assign]
    await uninstall(scheduler)
    assert vars(scheduler)["is_rootish"] is watched
    assert await cluster.client.gather(cluster.map(10, 0.001)) == list(range(10))
    assert len(asked) == 10
