"""The time of a worker for a task is learned from the pauses of its threads."""

from __future__ import annotations

import time
from statistics import fmean, median
from typing import Any

import pytest
from distributed import Client, LocalCluster

from ferroflow_dask.scheduler import install
from ferroflow_dask.scheduler.extension import FerroflowStealing, extension_on
from ferroflow_dask.topology import Host, Link, Runtime, Topology
from ferroflow_dask.topology import Worker as Place
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

N = 400


def learned_s(cluster: VirtualCluster) -> float:
    assert isinstance(cluster.stealing, FerroflowStealing)
    return cluster.stealing.parts.gauges()["pause_seconds"][1]


def topology(worker_task_s: float) -> Topology:
    hosts = [Host(f"h{i}", 2, (Place(1),), link=Link(1e-5, 1e9)) for i in range(2)]
    return Topology(hosts, runtime=Runtime(worker_task_s=worker_task_s), name="pauses")


@pytest.mark.parametrize("worker_task_s", [5e-4, 1e-3, 3e-3, 1e-2])
def test_virtual_workers_take_what_was_set(worker_task_s: float) -> None:
    cluster = VirtualCluster.on(topology(worker_task_s), without=["bundles"])
    cluster.submit({("t-0a1", i): VirtualTask(0.005, nbytes=8) for i in range(N)})
    cluster.run()
    cluster.check()
    # A worker takes half of its time before a task starts, while the one before runs.
    assert learned_s(cluster) == pytest.approx(worker_task_s / 2, rel=0.05)


def test_nothing_is_learned_where_threads_wait_for_tasks() -> None:
    cluster = VirtualCluster(2, latency_s=0.01, saturation=1.0)
    cluster.submit({("t-0a1", i): VirtualTask(0.005, nbytes=8) for i in range(N)})
    cluster.run()
    assert learned_s(cluster) == 0


def test_real_workers_whose_event_loops_are_held_up() -> None:
    found: dict[float, float] = {}
    real: dict[float, float] = {}

    def delay(seconds: float, dask_worker: Any) -> None:
        if not hasattr(dask_worker, "delay_s"):
            execute = dask_worker.execute

            async def late(*args: Any, **kwargs: Any) -> Any:
                start_s = time.perf_counter()
                time.sleep(dask_worker.delay_s)
                dask_worker.slept_s.append(time.perf_counter() - start_s)
                return await execute(*args, **kwargs)

            dask_worker.execute = late
        dask_worker.delay_s, dask_worker.slept_s = seconds, []

    def slept(dask_worker: Any) -> float:
        found_s: float = median(dask_worker.slept_s)  # longer than it should be on a busy machine
        return found_s

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        install(client, without=["bundles"])
        extension = extension_on(cluster.scheduler)
        assert extension is not None
        for seconds in (0.0, 0.003, 0.01):
            client.run(delay, seconds)
            client.gather(client.map(time.sleep, [0.001] * 200, pure=False))
            found[seconds] = extension.core.learned.pause_s or 0.0
            real[seconds] = fmean(client.run(slept).values())
    for seconds in (0.003, 0.01):
        assert found[seconds] - found[0.0] == pytest.approx(real[seconds], rel=0.25), (found, real)
