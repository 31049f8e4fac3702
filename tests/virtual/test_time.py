"""Virtual time goes forward only: what is due up to a time happens, in the background too."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ferroflow_dask.exceptions import SimulationError
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.clock import Periodic, VirtualTime


def at_work_on_one() -> dict[Any, VirtualTask]:
    """Return tasks that prefer worker 0, and of whose name a duration is known."""
    near = {"workers": [0], "allow_other_workers": True}
    return {("x", i): VirtualTask(0.5, annotations=near) for i in range(20)}


@pytest.mark.parametrize("policy", ["ferroflow", "dask"])
def test_a_graph_that_comes_after_a_run_up_to_a_time_runs_as_one_that_comes_then(policy: str) -> None:
    timelines = []
    for stops_first in (True, False):
        cluster = VirtualCluster(2, policy=policy, saturation=math.inf)
        cluster.submit({("x", -1): VirtualTask(0.5)})
        cluster.run()
        if stops_first:
            cluster.run(until=100.25)
            assert cluster.time.now == 100.25
            cluster.submit(at_work_on_one())
        else:
            cluster.at(100.25, cluster.submit, at_work_on_one())
        cluster.run()
        cluster.check()
        assert min(start for _, _, start, _ in cluster.record.timeline()[1:]) > 100.25
        timelines.append(cluster.record.timeline())
    assert cluster.n_steals
    assert timelines[0] == timelines[1]


def test_periodic_calls_go_on_up_to_a_time_and_end_soon_where_none_is_given() -> None:
    time, seen = VirtualTime(), []
    Periodic(time, lambda: seen.append(time.now), 1000.0)
    time.run(math.inf, patience_s=10.0, max_calls=1000)
    assert (seen[-1], time.now) == (10.0, 10.0)
    time.run(25.5, patience_s=10.0, max_calls=1000)
    assert (seen, time.now) == ([float(second) for second in range(1, 26)], 25.5)
    time.run(math.inf, patience_s=10.0, max_calls=1000)
    assert (len(seen), time.now) == (25, 25.5)


def test_what_is_or_was_due_before_now_is_told() -> None:
    time = VirtualTime()
    time.at(1.0, lambda: None)
    time.now = 2.0
    with pytest.raises(SimulationError, match=r"due at 0\.5 s, but it is 2\.0 s already"):
        time.at(0.5, lambda: None)
    with pytest.raises(SimulationError, match=r"due at 1\.0 s, but it is 2\.0 s already"):
        time.run(3.0, patience_s=1.0, max_calls=10)
