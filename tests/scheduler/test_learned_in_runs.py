"""What the shell learns in a run comes to be about what the run was made of, and is shown."""

from __future__ import annotations

import pytest

from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

N = 100


def learned(cluster: VirtualCluster, name: str) -> float:
    assert isinstance(cluster.stealing, FerroflowStealing)
    return cluster.stealing.gauges()[name][1]


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


def test_learned_durations_and_round_trip_outlive_the_extension() -> None:
    cluster = VirtualCluster(2, latency_s=0.001, saturation=1.0)
    cluster.submit({("t-0a1", i): VirtualTask(0.1, nbytes=8) for i in range(N)})
    cluster.run()
    cluster.check()
    before = learned(cluster, "round_trip_seconds")
    assert before != 0.003
    assert isinstance(cluster.stealing, FerroflowStealing)
    expected = cluster.stealing.costs.by_prefix()
    cluster.stealing.teardown()
    again = FerroflowStealing(cluster.scheduler, latency_s=0.001)
    assert again.gauges()["round_trip_seconds"][1] == before
    assert again.costs.by_prefix() == expected
    again.teardown()
