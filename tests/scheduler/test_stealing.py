"""Stealing: Dask's own switches mean the same, and an answer of a worker changes only what was asked for."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cluster_tests import runs_on
from distributed import Event, Worker
from distributed.stealing import fast_tasks
from one_loop import Cluster, on_cluster
from waiting import comes, wait_for

from ferroflow_dask import install, uninstall
from ferroflow_dask.scheduler import _distributed

pytestmark = pytest.mark.cluster


async def crowd(cluster: Cluster, n: int, key: str = "blocked") -> tuple[Event, Any]:
    """Give the first worker tasks that last until an event is set, and wait until they are sent."""
    event = await Event()
    futures = cluster.client.map(
        wait_for,
        range(n),
        event=event,
        key=key,
        workers=[cluster.workers[0].address],
        allow_other_workers=True,
    )
    await comes(lambda: sum(processing(cluster)) >= n)
    return event, futures


def processing(cluster: Cluster) -> list[int]:
    states = cluster.scheduler.workers
    return [len(states[worker.address].processing) for worker in cluster.workers]


@runs_on(on_cluster)
async def test_after_stop_only_an_explicit_balance_moves_tasks(cluster: Cluster) -> None:
    await cluster.stealing.stop()
    event, futures = await crowd(cluster, 9)
    assert cluster.stealing.steals["asked"] == 0
    assert processing(cluster) == [9, 0]
    cluster.stealing.balance()
    under_way = [cluster.stealing.view.assigned[ts.key] for ts in cluster.stealing.in_flight]
    assert {worker.key for _, worker in under_way} == {cluster.workers[1].address}
    assert not any(task.is_movable for task, _ in under_way)  # until it arrives
    await cluster.stealing.stop()  # also waits for the steals under way
    assert all(task.is_movable for task, _ in under_way)
    assert min(processing(cluster)) >= 3
    await event.set()
    assert await cluster.client.gather(futures) == list(range(9))


@pytest.mark.parametrize(
    ("interval", "is_stealing"),
    [("5m", True), ("1h", False), (1_000_000, False)],
    ids=["minutes: events move tasks", "an hour: stealing is off", "a million ms: stealing is off"],
)
def test_an_interval_beyond_reason_turns_stealing_off(interval: str | int, is_stealing: bool) -> None:
    async def test(cluster: Cluster) -> None:
        event, futures = await crowd(cluster, 9)
        if is_stealing:
            await comes(lambda: processing(cluster) != [9, 0])
        else:
            assert processing(cluster) == [9, 0]
        await event.set()
        assert await cluster.client.gather(futures) == list(range(9))
        assert (cluster.stealing.steals["asked"] > 0) == is_stealing

    on_cluster(test, config={"distributed.scheduler.work-stealing-interval": interval})


@runs_on(on_cluster)
async def test_what_dask_never_steals_stays(cluster: Cluster) -> None:
    event, futures = await crowd(cluster, 9, key=min(fast_tasks))
    cluster.stealing.balance()
    assert cluster.stealing.steals["asked"] == 0
    await event.set()
    assert await cluster.client.gather(futures) == list(range(9))


@runs_on(on_cluster)
async def test_answers_about_released_tasks_are_told_where_dask_tells(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("distributed"), "propagate", True)
    with caplog.at_level(logging.DEBUG, logger="distributed.stealing"):
        handler = cluster.scheduler.stream_handlers["steal-response"]
        handler(key="gone", state="released", stimulus_id="steal-1", worker=cluster.workers[0].address)
    assert "Key released between request and confirm: gone" in caplog.messages


# Answers of workers


@asynccontextmanager
async def all_busy(cluster: Cluster) -> AsyncIterator[None]:
    """Give each worker a task that lasts until the end of the block, so that none steals of itself."""
    gate = await Event()
    futures = [
        cluster.client.submit(wait_for, 0, gate, workers=[worker.address], pure=False)
        for worker in cluster.workers
    ]
    try:
        for future in futures:
            await cluster.processing(future)
        await comes(lambda: all(worker.state.executing for worker in cluster.workers))
        yield
    finally:
        await gate.set()
    assert await cluster.client.gather(futures) == [0] * len(futures)


def asked(cluster: Cluster, ts: Any) -> str:
    """Ask for a task that waits on the first worker, for the second; return the number of the request."""
    victim, thief = (cluster.scheduler.workers[worker.address] for worker in cluster.workers)
    if hasattr(cluster.stealing, "placement"):
        cluster.ask(ts, *cluster.workers)
    else:
        cluster.stealing.move_task_request(ts, victim, thief)
    return str(cluster.stealing.in_flight[ts]["stimulus_id"])


def answer(cluster: Cluster, ts: Any, state: str, stimulus_id: str, worker: Worker) -> None:
    """Let an answer come to the scheduler, as from a worker's stream."""
    handler = cluster.scheduler.stream_handlers["steal-response"]
    handler(key=ts.key, state=state, stimulus_id=stimulus_id, worker=worker.address)


@pytest.mark.parametrize(
    ("leave", "is_ours"),
    [(install, False), (install, True), (uninstall, True)],
    ids=["dask's, ours comes", "ours, another of ours comes", "ours, dask's comes"],
)
def test_who_asked_stays_until_the_answers_are_there(
    leave: Any, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed_anew: list[Any] = []
    reschedule = _distributed.reschedule

    def noted(scheduler: Any, ts: Any, stimulus_id: str) -> None:
        placed_anew.append(ts.key)
        reschedule(scheduler, ts, stimulus_id)

    monkeypatch.setattr(_distributed, "reschedule", noted)

    async def test(cluster: Cluster) -> None:
        async with all_busy(cluster):
            futures = cluster.pinned(5, 0.0)
            states = [await cluster.processing(future) for future in futures]
            old = cluster.stealing
            for ts in states:
                asked(cluster, ts)
            assert len(old.in_flight) == 5
            await leave(cluster.scheduler)
            assert cluster.stealing is not old
            assert not old.in_flight
            assert {ts.processing_on.address for ts in states} == {cluster.workers[1].address}
            assert placed_anew == []
        assert await cluster.client.gather(futures) == list(range(5))
        cluster.scheduler.validate_state()

    on_cluster(test, plugin=is_ours)


@asynccontextmanager
async def steal_in_flight(cluster: Cluster) -> AsyncIterator[tuple[Any, Any, str]]:
    """Ask for a task of the first worker's, while all are busy; yield its future, it, and the number."""
    async with all_busy(cluster):
        (future,) = cluster.pinned(1, 0.0)
        ts = await cluster.processing(future)
        yield future, ts, asked(cluster, ts)


@runs_on(on_cluster)
async def test_a_stale_or_foreign_answer_ends_no_steal(cluster: Cluster) -> None:
    victim, thief = cluster.workers
    async with steal_in_flight(cluster) as (future, ts, stimulus_id):
        answer(cluster, ts, "ready", "steal-of-before", victim)
        answer(cluster, ts, "ready", stimulus_id, thief)
        assert list(cluster.stealing.in_flight) == [ts]
        assert ts.processing_on.address == victim.address
        told = [message[0] for _, message in cluster.scheduler.get_events("stealing")]
        assert told[-2:] == ["stale-response"] * 2
        await comes(lambda: not cluster.stealing.in_flight)
        assert ts.processing_on.address == thief.address
        ends = {"asked": 1, "confirmed": 1, "refused": 0, "aborted": 0}
        assert cluster.stealing.steals == ends
    assert await future == 0


@runs_on(on_cluster)
async def test_a_task_that_was_placed_anew_meanwhile_is_not_moved_again(cluster: Cluster) -> None:
    victim, thief = cluster.workers
    async with steal_in_flight(cluster) as (future, ts, stimulus_id):
        # By somebody else, who tells nobody of it.
        states = (cluster.scheduler.workers[worker.address] for worker in cluster.workers)
        _distributed.hand_over(cluster.scheduler, ts, *states)
        answer(cluster, ts, "ready", stimulus_id, victim)
        assert cluster.stealing.error is None
        assert not cluster.stealing.in_flight
        assert ts.processing_on.address == thief.address
        assert cluster.stealing.steals["aborted"] == 1
    assert await future == 0
    cluster.scheduler.validate_state()


@runs_on(on_cluster)
async def test_a_slot_that_a_steal_opens_is_filled_from_the_queue(cluster: Cluster) -> None:
    victim, thief = cluster.workers
    async with all_busy(cluster):
        (stolen,) = cluster.pinned(1, 0.0)
        (other,) = cluster.map(1, 0.0, workers=[thief.address])
        ts = await cluster.processing(stolen)
        await cluster.processing(other)  # now all slots are taken: Dask gives a thread two
        queued = cluster.map(10, 0.0, key="queued")
        await comes(lambda: len(cluster.scheduler.queued) == 10)
        asked(cluster, ts)
        await comes(lambda: not cluster.stealing.in_flight)
        there = cluster.scheduler.workers[victim.address].processing
        assert any(ts.key[0] == "q" for ts in there)
    assert await cluster.client.gather([*queued, stolen, other]) == [*range(10), 0, 0]
