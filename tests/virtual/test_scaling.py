"""An adaptive cluster asks for as many workers as under Dask, whose limit is the number of tasks."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_runs import bundling_cluster

from ferroflow_dask.scheduler.changes import Changes, Guard
from ferroflow_dask.scheduler.graphs.scaling import Scaling
from ferroflow_dask.virtual import VirtualTask

#: Tasks, their duration [s], threads of the only worker, the target duration of a computation [s].
PROGRAMS = [
    (100, 0.001, 1, 0.02),
    (400, 0.001, 1, 0.1),
    (400, 0.001, 1, 0.05),
    (1_000, 0.001, 1, 0.5),
    (1_000, 0.001, 1, 5.0),
    (2_000, 0.0005, 1, 0.2),
    (1_000, 0.001, 2, 0.1),
    (1_000, 0.002, 4, 0.1),
    (400, 0.001, 4, 5.0),
    (20, 0.001, 1, 0.001),
]


def target_of(policy: str, program: tuple[int, float, int, float]) -> int:
    n, duration_s, threads, target_s = program
    cluster = bundling_cluster(1, threads, policy=policy)
    cluster.submit({("t", i): VirtualTask(duration_s, nbytes=10) for i in range(4)}, client="before")
    cluster.run()
    cluster.submit({("t", 4 + i): VirtualTask(duration_s, nbytes=10) for i in range(n)})
    scheduler: Any = cluster.scheduler
    while len(scheduler.tasks) < n:
        cluster.run(until=cluster.time.now + 1e-3)
    scheduler.handlers = {"adaptive_target": scheduler.adaptive_target}
    changes = Changes()
    if policy != "dask":
        stealing: Any = cluster.stealing
        assert stealing.graphs.bundles.counts["created"]
        guard = Guard(lambda: None)
        for change in Scaling(scheduler, stealing.graphs.bundles, guard).changes():
            changes.make(change)
        assert guard.error is None
    target = scheduler.handlers["adaptive_target"](target_duration=target_s)
    assert scheduler.adaptive_target(target_s) == target
    changes.undo_all()
    cluster.run()
    cluster.check()
    return min(max(int(target), 1), 8)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_an_adaptive_cluster_asks_for_as_many_workers(program: tuple[int, float, int, float]) -> None:
    assert target_of("ferroflow", program) == target_of("dask", program)
