"""Workers are fed from Dask's queue as far ahead as a message takes, where that costs no memory."""

from __future__ import annotations

from typing import Any

import pytest

from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

N = 200
ROOT, END = ("root-0a1", 0), ("end-0b1", 0)
LINK_S = 0.004
#: Tasks that a thread of Dask's default has at once.
STOCK = 2


def short(*dependencies: Any, nbytes: int = 8, duration_s: float = 0.001) -> VirtualTask:
    return VirtualTask(duration_s, dependencies, nbytes=nbytes)


def results(**more: Any) -> dict[Any, VirtualTask]:
    return {("short-0a1", i): short(**more) for i in range(N)}


def pairs() -> dict[Any, VirtualTask]:
    tasks = results()
    return tasks | {("pair-0c1", i): short(("short-0a1", i), ("short-0a1", i + 1)) for i in range(0, N, 2)}


def into_one() -> dict[Any, VirtualTask]:
    tasks = results()
    return tasks | {END: short(*tasks)}


def most_at_once(tasks: dict[Any, VirtualTask], saturation: float | None = None) -> int:
    """Return the most tasks of the queued group that a worker had at once."""
    cluster = VirtualCluster(2, policy="ferroflow", latency_s=LINK_S, bandwidth=1e12, saturation=saturation)
    most = 0

    def look() -> None:
        nonlocal most
        workers = cluster.scheduler.workers.values()
        most = max(most, *(sum(ts.key[0] == "short-0a1" for ts in ws.processing) for ws in workers))
        if cluster.scheduler.queued:
            cluster.at(cluster.time.now + LINK_S / 4, look)

    needed = {key for task in tasks.values() for key in task.dependencies}
    cluster.submit(tasks, keep=[key for key in tasks if key not in needed])
    cluster.at(LINK_S, look)
    cluster.run()
    cluster.check()
    return most


@pytest.mark.parametrize(
    ("tasks", "is_ahead"),
    [
        (results(), True),
        (into_one(), True),
        (pairs(), False),
        (results(duration_s=0.1), False),
        (results(nbytes=2**24), False),
    ],
    ids=[
        "short results: ahead",
        "short tasks of which one needs all: ahead",
        "short tasks that are used in pairs: as Dask",
        "long results: as Dask",
        "large results: as Dask",
    ],
)
def test_how_far_ahead_workers_are_fed(tasks: dict[Any, VirtualTask], is_ahead: bool) -> None:
    assert (most_at_once(tasks) > STOCK) is is_ahead


@pytest.mark.parametrize(
    "tasks", [pairs(), into_one(), results()], ids=["used in pairs", "one needs all", "kept by a client"]
)
def test_results_of_known_costs_do_not_pile_up(tasks: dict[Any, VirtualTask]) -> None:
    large = {
        key: VirtualTask(0.1, task.dependencies, nbytes=2**24, annotations={"ferroflow_cost": 0.1})
        for key, task in tasks.items()
    }
    assert most_at_once(large) <= STOCK


@pytest.mark.parametrize("saturation", [1.0, 3.0])
def test_what_the_user_configured_holds(saturation: float) -> None:
    assert most_at_once(results(), saturation) == saturation


def fed_ahead() -> tuple[VirtualCluster, float]:
    """Return a cluster amid a run, in which workers are sent more than was configured, and that."""
    cluster = VirtualCluster(2, policy="ferroflow", latency_s=LINK_S, bandwidth=1e12)
    configured = cluster.scheduler.WORKER_SATURATION
    cluster.submit(results())
    while configured == cluster.scheduler.WORKER_SATURATION:
        assert cluster.scheduler.queued or not cluster.time.now
        cluster.run(until=cluster.time.now + LINK_S / 4)
    assert configured < cluster.scheduler.WORKER_SATURATION
    return cluster, configured


def test_leaving_restores_what_was_there() -> None:
    cluster, before = fed_ahead()
    assert isinstance(cluster.stealing, FerroflowStealing)
    cluster.stealing.teardown()
    assert before == cluster.scheduler.WORKER_SATURATION
    cluster.run()
    assert all(ts.state == "memory" for ts in cluster.scheduler.tasks.values())


def test_what_somebody_sets_at_run_time_holds() -> None:
    cluster, _ = fed_ahead()
    cluster.scheduler.WORKER_SATURATION = 1.5
    cluster.run()
    cluster.check()
    assert cluster.scheduler.WORKER_SATURATION == 1.5
    assert isinstance(cluster.stealing, FerroflowStealing)
    cluster.stealing.teardown()
    assert cluster.scheduler.WORKER_SATURATION == 1.5


@pytest.mark.parametrize("nthreads", [1, 4])
@pytest.mark.parametrize("latency_s", [0.001, 0.004, 0.01])
def test_threads_need_not_wait_however_late_messages_come(latency_s: float, nthreads: int) -> None:
    cluster = VirtualCluster(2, nthreads, latency_s=latency_s, bandwidth=1e12)
    # Of long ones nobody waits: that tells next to nothing of messages.
    for name, n, seconds in (("long", 20, 0.1), ("short", 1000, 0.001)):
        cluster.submit(
            {(f"{name}-0a1", i): VirtualTask(seconds, nbytes=8) for i in range(n * nthreads)}, name
        )
        start_s = cluster.time.now
        cluster.run()
    _, learned_s = cluster.stealing.parts.gauges()["round_trip_seconds"]
    assert 1.4 * latency_s <= learned_s <= 4 * latency_s
    assert cluster.record.makespan_s - start_s <= 1.15 * 0.5  # all threads run all the time
