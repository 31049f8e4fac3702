"""Dask's own switches of stealing mean the same with the plugin installed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from cluster_tests import runs_on
from distributed import Event
from distributed.stealing import fast_tasks
from one_loop import Cluster, on_cluster
from waiting import comes, wait_for

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
