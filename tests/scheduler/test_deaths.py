"""Deaths of workers, in virtual time: who is blamed, and how many tasks a worker has after one."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_runs import L, finished

from ferroflow_dask.virtual import VirtualCluster, VirtualTask

N = 80


def cluster_of(nthreads: int, **options: Any) -> VirtualCluster:
    """Start tasks of known costs on two workers: each has more of them than in stock."""
    cluster = VirtualCluster(2, nthreads=nthreads, latency_s=L, **options)
    cost = {"ferroflow_cost": 0.25}
    # Dask queues only tasks of large groups.
    cluster.submit({(f"t{i}", 0): VirtualTask(0.25, annotations=cost) for i in range(N)})
    return cluster


def counts(cluster: VirtualCluster) -> dict[Any, int]:
    return {key: ts.suspicious for key, ts in cluster.scheduler.tasks.items() if ts.suspicious}


def processing(cluster: VirtualCluster) -> list[set[Any]]:
    return [{ts.key for ts in ws.processing} for ws in cluster.scheduler.workers.values()]


@pytest.mark.parametrize("nthreads", [1, 4])
def test_a_worker_with_many_tasks_blames_none_and_then_those_that_it_had_of_them(nthreads: int) -> None:
    cluster = cluster_of(nthreads)
    cluster.run(until=1.0)
    suspects = processing(cluster)[0]
    assert len(suspects) > nthreads + 1
    cluster.leave(0)
    cluster.run(until=cluster.time.now + 3 * L)
    assert counts(cluster) == {}
    assert set(cluster.stealing.graphs.deaths.suspects) == suspects
    joined = cluster.join(nthreads)
    has_had = []
    while not has_had:
        cluster.run(until=cluster.time.now + 2 * L)
        assert all(len(one & suspects) <= nthreads + 1 for one in processing(cluster))
        has_had = [one & suspects for one in processing(cluster)[1:] if len(one & suspects) >= nthreads]
    cluster.leave(joined)
    cluster.run(until=cluster.time.now + 3 * L)
    assert counts(cluster) == dict.fromkeys(has_had[0], 1)
    tasks = cluster.scheduler.tasks
    others = [key for key in cluster.stealing.graphs.deaths.suspects if key not in has_had[0]]
    between = [sum(tasks[key].priority < tasks[one].priority for key in others) for one in has_had[0]]
    assert len(set(between)) == len(between)  # they will not be together again
    finished(cluster)
    assert not cluster.stealing.graphs.deaths.suspects


def test_suspects_that_nothing_needs_any_more_are_forgotten() -> None:
    cluster = VirtualCluster(2, latency_s=L)
    cost = {"ferroflow_cost": 0.25}
    # One of the last tasks fails; the others are not run, but Dask knows them while the client wants `end`.
    graph = {(f"t{i}", 0): VirtualTask(0.25, annotations=cost, failures=(i == 8) * 100) for i in range(N)}
    cluster.submit({**graph, "end": VirtualTask(0.25, tuple(graph))})
    cluster.run(until=0.3)
    cluster.leave(0)
    cluster.run(until=cluster.time.now + 3 * L)
    assert cluster.stealing.graphs.deaths.suspects
    finished(cluster)
    assert {ts.state for ts in cluster.scheduler.tasks.values()} >= {"released", "erred"}
    assert not cluster.stealing.graphs.deaths.suspects


def test_a_worker_with_no_more_tasks_than_in_stock_blames_them() -> None:
    cluster = VirtualCluster(2, latency_s=L)
    cluster.submit({("t", i): VirtualTask(1.0) for i in range(2)})
    cluster.run(until=0.5)
    (had, _) = processing(cluster)
    cluster.leave(0)
    cluster.run(until=cluster.time.now + 3 * L)
    assert counts(cluster) == dict.fromkeys(had, 1)
    finished(cluster)


def test_restricted_tasks_are_blamed_since_dask_queues_none_of_them() -> None:
    cluster = VirtualCluster(1, latency_s=L, resources={0: {"GPU": 1}})
    graph = {("t", i): VirtualTask(1.0, annotations={"resources": {"GPU": 1}}) for i in range(8)}
    cluster.submit(graph)
    cluster.run(until=0.5)
    had = processing(cluster)[0]
    cluster.leave(0)
    cluster.run(until=cluster.time.now + 3 * L)
    assert counts(cluster) == dict.fromkeys(had, 1)
