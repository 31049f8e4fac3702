"""A worker's answer to a steal request finds who asked, and changes only what was asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cluster_tests import runs_on
from distributed import Event, Worker
from one_loop import Cluster, on_cluster
from waiting import comes, wait_for

from ferroflow_dask import install, uninstall
from ferroflow_dask.scheduler import _distributed

pytestmark = pytest.mark.cluster


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
