"""What the shell learns in a run comes to be about what the run was made of, and is shown."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_runs import pinned

from ferroflow_dask import FerroflowStealing
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

N = 100


def learned(cluster: VirtualCluster, name: str) -> float:
    assert isinstance(cluster.stealing, FerroflowStealing)
    return cluster.stealing.gauges()[name][1]


def to_and_fro() -> dict[Any, VirtualTask]:
    """Return tasks each of which needs what the one before has made on the other worker."""
    return {
        ("there", i): VirtualTask(
            0.01, (("there", i - 1),) if i else (), nbytes=100_000, annotations={"workers": [i % 2]}
        )
        for i in range(N)
    }


@pytest.mark.parametrize("slowness", [1, 4])
def test_how_much_slower_transfers_are_than_dask_believes(slowness: int) -> None:
    cluster = VirtualCluster(2, latency_s=0.0, bandwidth=1e6)
    cluster.scheduler.bandwidth *= slowness
    # Each transfer is too small to be among those that Dask measures.
    cluster.submit(to_and_fro())
    assert learned(cluster, "transfer_slowness") == 1
    cluster.run()
    cluster.check()
    assert learned(cluster, "transfer_slowness") == pytest.approx(slowness, rel=0.01)


@pytest.mark.parametrize("latency_s", [0.001, 0.005])
def test_how_long_a_steal_takes_where_answers_come_later_than_was_configured(latency_s: float) -> None:
    cluster = VirtualCluster(2, latency_s=latency_s)
    assert isinstance(cluster.stealing, FerroflowStealing)
    cluster.stealing.view.latency_s = 0.001
    cluster.submit(pinned(N))
    assert learned(cluster, "steal_seconds") == 0.003
    # Before any of them ends: the thief takes what makes both as busy, and the answers have come.
    cluster.run(until=0.1)
    assert cluster.stealing.steals["confirmed"] > N / 4
    assert not cluster.stealing.in_flight
    request_answer_and_task_s = 3 * latency_s
    assert learned(cluster, "steal_seconds") == pytest.approx(request_answer_and_task_s, rel=0.1)
    cluster.run()
    cluster.check()


@pytest.mark.parametrize("latency_s", [0.001, 0.01])
def test_how_long_a_thread_waits_for_the_next_task(latency_s: float) -> None:
    # One task for a thread at a time, so that each ends before the next is sent.
    cluster = VirtualCluster(2, latency_s=latency_s, saturation=1.0)
    cluster.submit({("t-0a1", i): VirtualTask(0.1) for i in range(2 * N)})
    assert learned(cluster, "round_trip_seconds") == 3 * latency_s
    cluster.run()
    cluster.check()
    # There and back, less what a worker takes between two tasks that it has, which here is nothing.
    assert learned(cluster, "round_trip_seconds") == pytest.approx(2 * latency_s - 0.0005, rel=0.01)


def test_what_is_learned_of_tasks_and_network_outlives_the_plugin() -> None:
    cluster = VirtualCluster(2, latency_s=0.001, bandwidth=1e6, saturation=1.0)
    cluster.scheduler.bandwidth *= 4
    cluster.submit({("t-0a1", i): VirtualTask(0.1, nbytes=8) for i in range(N)} | to_and_fro())
    cluster.run()
    cluster.check()
    names = ("round_trip_seconds", "transfer_slowness")
    before = [learned(cluster, name) for name in names]
    assert before[0] != 0.003
    assert before[1] != 1
    assert isinstance(cluster.stealing, FerroflowStealing)
    expected = cluster.stealing.costs.by_prefix()
    cluster.stealing.teardown()
    again = FerroflowStealing(cluster.scheduler, latency_s=0.001)
    assert [again.gauges()[name][1] for name in names] == before
    assert again.costs.by_prefix() == expected
    again.teardown()
