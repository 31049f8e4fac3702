"""Failures, departures and swaps at random moments, many times over: results stay right, accounts balance."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from distributed import Worker, wait
from distributed.stealing import WorkStealing
from one_loop import Cluster, on_cluster
from waiting import comes

from ferroflow_dask import generate, install, uninstall
from ferroflow_dask.policy import ClusterView, StealingPolicy
from ferroflow_dask.policy.events import Event
from ferroflow_dask.policy.instructions import Instruction
from ferroflow_dask.scheduler.extension import FerroflowStealing

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("default:ferroflow:UserWarning"),  # clients are told of each failure
]

#: All of them take three minutes.
FAILURES, SWAPS, DEPARTURES = (200, 100, 200) if os.environ.get("FERROFLOW_FAULTS") == "all" else (60, 30, 60)

GRAPH = generate("wide", width=6, depth=2, skew=0.0)


class FailingOnce(StealingPolicy):
    """Raises at the n-th event, or in the middle of the answer to it."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.countdown = int(rng.integers(1, 80))
        self.is_late = bool(rng.integers(2))

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        self.countdown -= 1
        if self.countdown == 0 and not self.is_late:
            raise ZeroDivisionError("at the event")
        for instruction in super().handle(event, view, now):
            yield instruction
            if self.countdown <= 0:
                raise ZeroDivisionError("after an instruction")


def assert_balanced(cluster: Cluster) -> None:
    """Expect that no account of the scheduler or of ours has anything left in it."""
    scheduler, stealing = cluster.scheduler, cluster.stealing
    assert not any(ws.processing for ws in scheduler.workers.values())
    assert all(set(ws.used_resources.values()) <= {0} for ws in scheduler.workers.values())
    assert not stealing.in_flight
    assert not any(stealing.in_flight_occupancy.values())
    if isinstance(stealing, FerroflowStealing):
        assert stealing.error is None
        assert not stealing.view.assigned
        assert stealing.view.workers.keys() == scheduler.workers.keys()
        assert {worker.backlog_s for worker in stealing.view.workers.values()} <= {0.0}
    scheduler.validate_state()


async def settled(futures: list[Any]) -> list[Any]:
    """Return the results once the scheduler has also heard of the last one."""
    await wait(futures)
    return list(await futures[0].client.gather(futures))


def test_a_policy_that_fails_at_a_random_event_changes_no_result_and_costs_no_worker() -> None:
    async def test(cluster: Cluster) -> None:
        failed = 0
        for seed in range(FAILURES):
            await install(cluster.client)
            extension = cluster.stealing
            extension.placement.policy = FailingOnce(np.random.default_rng(seed))
            graph = cluster.client.compute(GRAPH.bind())
            assert await settled(cluster.pinned(20, 0.001)) == list(range(20))
            for value in (await graph).values():
                np.testing.assert_array_equal(value, GRAPH.graph.constants["root"])
            if extension.error is None:
                await uninstall(cluster.client)
            failed += extension.error is not None
            await comes(lambda extension=extension: cluster.stealing is not extension)
            cluster.assert_stock()
            assert len(cluster.scheduler.workers) == 3
            assert_balanced(cluster)
        assert failed > FAILURES / 2

    on_cluster(test, resources=(None, None, None), limit_s=280)


def test_installing_and_leaving_over_and_over_leaves_nothing_behind() -> None:
    async def test(cluster: Cluster) -> None:
        scheduler = cluster.scheduler

        def traces() -> tuple[object, ...]:
            stock = {name for name, p in scheduler.plugins.items() if not isinstance(p, WorkStealing)}
            return (
                stock,
                len(scheduler.plugins),
                set(scheduler.stream_handlers),
                set(scheduler.periodic_callbacks),
            )

        before = traces()
        extensions: list[weakref.ref[Any]] = []
        for _ in range(SWAPS):
            running = cluster.pinned(12, 0.001)
            await install(cluster.client)
            extensions.append(weakref.ref(cluster.stealing))
            more = cluster.pinned(12, 0.001)
            await uninstall(cluster.client)
            assert await settled(running + more) == [*range(12), *range(12)]
        cluster.assert_stock()
        assert traces() == before
        assert_balanced(cluster)
        del running, more
        gc.collect()
        assert sum(extension() is not None for extension in extensions) <= 1

    on_cluster(test, plugin=False, limit_s=200)


async def leave(cluster: Cluster, rng: np.random.Generator) -> None:
    """Let the victim or the thief of a steal in flight go; the first worker if there is none."""
    steals = list(cluster.stealing.in_flight.values())
    address = steals[0]["victim" if rng.integers(2) else "thief"].address if steals else None
    leaving = next((w for w in cluster.workers if w.address == address), cluster.workers[0])
    cluster.workers.remove(leaving)
    going = [leaving.close(executor_wait=False, nanny=False)]
    if rng.integers(2):  # the scheduler gives it up at once, or hears of it when the link breaks
        going.append(cluster.scheduler.remove_worker(leaving.address, stimulus_id="test"))
    await asyncio.gather(*going)


def test_workers_that_leave_in_the_middle_of_a_steal_lose_no_task() -> None:
    in_flight = 0

    async def test(cluster: Cluster) -> None:
        nonlocal in_flight
        extension = cluster.stealing
        async with AsyncExitStack() as newcomers:
            for seed in range(DEPARTURES):
                rng = np.random.default_rng(seed)
                futures = cluster.pinned(24, 0.002)
                await cluster.processing(futures[0])
                while not extension.in_flight and any(future.status == "pending" for future in futures):
                    await asyncio.sleep(0)
                for _ in range(int(rng.integers(0, 3))):
                    await asyncio.sleep(0)
                in_flight += bool(extension.in_flight)
                await leave(cluster, rng)
                newcomer = await newcomers.enter_async_context(Worker(cluster.scheduler.address, nthreads=1))
                cluster.workers.append(newcomer)
                assert await settled(futures) == list(range(24))
                assert cluster.stealing is extension
                assert_balanced(cluster)

    on_cluster(test, resources=(None, None, None), limit_s=280)
    assert in_flight > DEPARTURES / 4
