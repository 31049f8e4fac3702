"""Whatever goes wrong, no task is lost, the view stays true, and Dask's own stealing comes back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import dask
import distributed
import numpy as np
import pytest
from cluster_tests import runs_on
from distributed.scheduler import DEFAULT_EXTENSIONS
from distributed.stealing import WorkStealing
from one_loop import Cluster, on_cluster
from waiting import comes, pause, wait_for

from ferroflow_dask import FerroflowPlugin, generate
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.policy import ClusterView, StealingPolicy
from ferroflow_dask.policy.events import (
    Event,
    GraphArrived,
    StealConfirmed,
    StealRefused,
    TaskFinished,
    TaskReady,
    WorkerIdle,
)
from ferroflow_dask.policy.instructions import Instruction
from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.scheduler.lifecycle import PLUGIN_NAME
from ferroflow_dask.scheduler.plugin import uninstall_from

pytestmark = [
    pytest.mark.cluster,
    # Clients are told of a failure by a warning; here it is expected, not an error.
    pytest.mark.filterwarnings("default:ferroflow:UserWarning"),
]


# Leaving


def test_after_leaving_nothing_is_stolen_and_nothing_lost() -> None:
    async def test(cluster: Cluster) -> None:
        old = cluster.stealing
        long = cluster.pinned(1, 1.0)
        await cluster.processing(long[0])
        short = cluster.pinned(5, 0.01)
        await cluster.processing(short[-1])
        await asyncio.sleep(0.05)  # a look at the overrunning task is due
        asked = old.steals["asked"]
        await uninstall_from(cluster.scheduler)
        cluster.assert_stock()
        assert await cluster.client.gather(long + short) == [0, *range(5)]
        assert old.steals["asked"] == asked

    patient = {
        "ferroflow.latency": "200ms",
        "distributed.scheduler.default-task-durations": {"pause": "10ms"},
    }
    on_cluster(test, config=patient)


@runs_on(on_cluster)
async def test_installing_twice_at_once_leaves_one(cluster: Cluster) -> None:
    futures = cluster.pinned(60, 0.005)
    await cluster.processing(futures[0])
    await asyncio.gather(*(cluster.client.register_plugin(FerroflowPlugin()) for _ in range(3)))
    extensions = [p for p in cluster.scheduler.plugins.values() if isinstance(p, WorkStealing)]
    assert extensions == [cluster.stealing]
    assert await cluster.client.gather(futures) == list(range(60))


@runs_on(on_cluster)
async def test_what_is_on_workers_can_be_stolen_by_dask_afterwards(cluster: Cluster) -> None:
    await cluster.stealing.stop()
    futures = cluster.pinned(40)
    for future in futures:
        await cluster.processing(future)
    await uninstall_from(cluster.scheduler)
    cluster.assert_stock()
    cluster.stealing.balance()
    assert cluster.stealing.in_flight
    assert await cluster.client.gather(futures) == list(range(40))


@runs_on(on_cluster, config={"distributed.scheduler.work-stealing": False})
async def test_where_there_was_no_stealing_tasks_stay_and_none_is_put_back(cluster: Cluster) -> None:
    assert type(cluster.stealing) is FerroflowStealing
    futures = cluster.pinned(20)
    cluster.stealing.balance()
    assert await cluster.client.gather(futures) == list(range(20))
    assert cluster.stealing.steals["asked"] == 0
    await uninstall_from(cluster.scheduler)
    assert "stealing" not in cluster.scheduler.extensions
    assert await cluster.client.submit(pause, 3) == 3


@pytest.mark.parametrize("setting", [{"ferroflow.policy": "greedy"}, {"ferroflow.latency": "soon"}], ids=str)
@runs_on(on_cluster, plugin=False)
async def test_a_scheduler_that_is_configured_wrong_keeps_its_stealing(
    cluster: Cluster, setting: dict[str, str]
) -> None:
    plugin = FerroflowPlugin()
    with dask.config.set(setting), pytest.raises(UsageError, match=r"greedy|soon"):
        await cluster.client.register_plugin(plugin)
    cluster.assert_stock()


# The view


def held(cluster: Cluster, event: distributed.Event) -> Any:
    """Submit a task that prefers the first worker and lasts until an event is set."""
    first = cluster.workers[0].address
    return cluster.client.submit(wait_for, 0, event, workers=[first], allow_other_workers=True, pure=False)


@runs_on(on_cluster, resources=({"GPU": 1}, None))
async def test_resources_bind_tasks_that_only_prefer_a_worker(cluster: Cluster) -> None:
    futures = cluster.pinned(10, 0.02, resources={"GPU": 1})
    assert await cluster.client.gather(futures) == list(range(10))
    assert len(cluster.workers[0].data) == 10
    assert cluster.stealing.error is None


@runs_on(on_cluster, resources=({"GPU": 1}, {"GPU": 1}))
async def test_a_thief_that_lost_its_resources_is_not_handed_the_task(cluster: Cluster) -> None:
    first, second = cluster.workers
    futures = cluster.map(3, 0.3, workers=[first.address, second.address], resources={"GPU": 1})
    ts = await cluster.processing(futures[2])
    victim = next(w for w in cluster.workers if w.address == ts.processing_on.address)
    thief = second if victim is first else first
    cluster.ask(ts, victim, thief)
    cluster.scheduler.workers[thief.address].resources["GPU"] = 0
    cluster.scheduler.resources["GPU"][thief.address] = 0
    assert await cluster.client.gather(futures) == [0, 1, 2]
    assert cluster.stealing.steals["aborted"] == 1


@runs_on(on_cluster)
async def test_a_task_whose_thief_left_and_whose_victim_keeps_it_is_in_the_view(cluster: Cluster) -> None:
    victim, thief = cluster.workers
    is_seen = await distributed.Event()
    future = held(cluster, is_seen)
    ts = await cluster.processing(future)
    await comes(lambda: victim.state.executing)
    assert cluster.seen() == [1, 0]  # though Dask has placed it
    cluster.ask(ts, victim, thief)
    await cluster.scheduler.remove_worker(thief.address, stimulus_id="test")
    cluster.workers.remove(thief)
    await comes(lambda: not cluster.stealing.in_flight)
    assert cluster.stealing.steals["refused"] == 1
    assert cluster.seen() == [1]
    await is_seen.set()
    assert await future == 0
    assert cluster.seen() == [0]


@runs_on(on_cluster, resources=(None, None, None))
async def test_tasks_of_a_worker_that_dies_are_placed_by_the_policy(cluster: Cluster) -> None:
    dying, *_ = cluster.workers
    futures = cluster.pinned(1, 0.2) + cluster.pinned(40, 0.001)
    await cluster.processing(futures[-1])
    chosen: list[str | None] = []
    place = cluster.stealing.placement.worker_of
    cluster.stealing.placement.worker_of = lambda ts: chosen.append(place(ts)) or chosen[-1]
    everywhere = {worker.address for worker in cluster.workers}
    # Dask would place tasks with a preference, and queue those without restrictions.
    for future in futures:
        if (ts := cluster.scheduler.tasks.get(future.key)) is not None:
            ts.worker_restrictions, ts.loose_restrictions = everywhere, False
    await cluster.scheduler.remove_worker(dying.address, stimulus_id="test")
    assert len(chosen) >= 10
    assert None not in chosen
    assert dying.address not in chosen


@runs_on(on_cluster)
async def test_inputs_held_by_all_workers_make_no_worker_nearer(cluster: Cluster) -> None:
    everywhere = (await cluster.client.scatter([np.zeros(1000)], broadcast=True))[0]
    somewhere = await cluster.client.scatter(np.ones(1000), workers=[cluster.workers[0].address])
    future = cluster.client.submit(lambda *_: time.sleep(0.2), everywhere, somewhere)
    task = cluster.stealing.parts.task_views(await cluster.processing(future))
    assert task.held == {cluster.workers[0].address: task.input_bytes}
    assert task.input_bytes < 9000
    await future


# Failure


class Failing(StealingPolicy):
    """Raises at the n-th event of one kind."""

    def __init__(self, kind: type[Event], n: int = 1) -> None:
        super().__init__()
        self.kind, self.n = kind, n

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        if isinstance(event, self.kind):
            self.n -= 1
            if self.n <= 0:
                raise ZeroDivisionError("the policy is broken")
        yield from super().handle(event, view, now)


@pytest.mark.parametrize(
    "kind",
    [GraphArrived, TaskReady, TaskFinished, WorkerIdle, StealConfirmed],
    ids=lambda kind: kind.__name__,
)
def test_when_the_policy_fails_dask_takes_over(kind: type[Event], caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(kind, 3)
    graph = generate("wide", width=20, depth=2, skew=0.2)

    async def test(cluster: Cluster) -> None:
        cluster.stealing.placement.policy = failing
        assert await cluster.client.gather(cluster.pinned(60, 0.005)) == list(range(60))
        for _ in range(3):
            for value in (await cluster.client.compute(graph.bind())).values():
                np.testing.assert_array_equal(value, graph.graph.constants["root"])
        assert failing.n <= 0
        assert len(cluster.scheduler.workers) == 3
        cluster.scheduler.validate_state()
        cluster.assert_stock()

    told = "ferroflow: ZeroDivisionError('the policy is broken'); Dask's own scheduling takes over"
    with (
        caplog.at_level(logging.WARNING, logger="ferroflow_dask"),
        pytest.warns(UserWarning, match="ferroflow") as warned,
    ):
        on_cluster(test, resources=(None, None, None))
    assert [record.message for record in caplog.records if record.name == "ferroflow_dask"] == [told]
    messages = [str(warning.message) for warning in warned]
    # Dask warns of its own where the machine is slow.
    assert [message for message in messages if "scratch directories" not in message] == [told]


@runs_on(on_cluster)
async def test_a_failure_with_a_steal_in_flight_whose_task_goes_away_ends_with_dask_in_charge(
    cluster: Cluster,
) -> None:
    victim, thief = cluster.workers
    running, waiting = cluster.map(2, 0.3, workers=[victim.address])
    ts = await cluster.processing(waiting)
    extension = cluster.stealing
    cluster.scheduler.set_restrictions({ts.key: None})  # till now nobody else could ask for it
    extension.view.assigned[ts.key][0].allowed = None
    cluster.ask(ts, victim, thief)
    extension.guard.fail(ZeroDivisionError("the policy is broken"))
    cluster.scheduler.client_releases_keys([waiting.key], client=cluster.client.id, stimulus_id="test")
    assert await running == 0
    await comes(lambda: cluster.stealing is not extension)
    cluster.assert_stock()


@runs_on(on_cluster)
async def test_a_late_recovery_keeps_the_plugin_that_was_installed_since(cluster: Cluster) -> None:
    old = cluster.stealing
    await cluster.client.register_plugin(FerroflowPlugin("ring"))
    old.lifecycle.leave()
    assert cluster.stealing is not old
    assert cluster.scheduler.plugins[PLUGIN_NAME] is cluster.stealing.installed_by
    await uninstall_from(cluster.scheduler)
    cluster.assert_stock()


def test_an_answer_that_cannot_be_handled_loses_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("handing over is broken")

    async def test(cluster: Cluster) -> None:
        extension = cluster.stealing
        futures = cluster.pinned(20)
        assert await cluster.client.gather(futures) == list(range(20))
        assert isinstance(extension.error, ZeroDivisionError)
        assert len(cluster.scheduler.workers) == 2
        cluster.assert_stock()

    monkeypatch.setattr(_distributed, "hand_over", broken)
    on_cluster(test)


def test_failing_where_no_plugin_put_us_leaves_dask_in_charge() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.stealing.placement.policy = Failing(TaskReady)
        root = cluster.client.submit(pause, 1, 0.0)
        assert await cluster.client.submit(pause, root) == 1
        cluster.assert_stock()

    extensions = {**DEFAULT_EXTENSIONS, "stealing": FerroflowStealing}
    on_cluster(test, plugin=False, extensions=extensions)


@runs_on(on_cluster)
async def test_an_answer_to_a_steal_nobody_asked_for_costs_no_worker(cluster: Cluster) -> None:
    (future,) = cluster.map(1, 0.1)
    ts = await cluster.processing(future)
    for key in (ts.key, "unknown"):
        handler = cluster.scheduler.stream_handlers["steal-response"]
        handler(key=key, state="ready", stimulus_id="steal-never", worker="tcp://nobody:1")
    assert await future == 0
    assert len(cluster.scheduler.workers) == 2
    assert cluster.stealing.error is None


def test_every_steal_that_was_asked_for_ends_in_one_way() -> None:
    events: list[Event] = []

    async def test(cluster: Cluster) -> None:
        handle = cluster.stealing.placement.policy.handle

        def listening(event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
            events.append(event)
            return handle(event, view, now)

        cluster.stealing.placement.policy.handle = listening
        await cluster.client.gather(cluster.pinned(100, 0.003))
        steals = dict(cluster.stealing.steals)
        assert steals.pop("asked") == sum(steals.values()) > 0

    on_cluster(test)
    refused = [event.key for event in events if isinstance(event, StealRefused)]
    assert len(refused) == len(set(refused)), "a task that has started was asked for again"
