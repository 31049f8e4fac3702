"""The time of a worker for a task is learned from the pauses of its threads."""

from __future__ import annotations

import time
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, LocalCluster

from ferroflow_dask.scheduler import install
from ferroflow_dask.scheduler.extension import FerroflowStealing, extension_on
from ferroflow_dask.scheduler.learned import Learned
from ferroflow_dask.scheduler.pauses import ASSUMED_S, Pauses
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


def ran(*turns: tuple[int, int]) -> float | None:
    """Return the pause that is learned [s] if tasks ran 1 ms after each other; turns as in `task_ran`."""
    learned = Learned()
    scheduler: Any = SimpleNamespace(workers={"w": SimpleNamespace(nthreads=1)}, queued=())
    pauses = Pauses(scheduler, learned, latency_s=1e-3)
    for i, turn in enumerate(turns):
        ts: Any = SimpleNamespace()
        pauses.task_ran(ts, "w", 0, (0.003 * i, 0.003 * i + 0.001), turn)
    return learned.pause_s


def test_a_pause_counts_if_the_next_task_had_been_sent_and_its_inputs_were_there() -> None:
    assert ran((1, 2), (2, 2)) == pytest.approx(ASSUMED_S + 0.1 * (2e-3 - ASSUMED_S))
    assert ran((1, 1), (2, 2)) is None  # sent later
    assert ran((1, 3), (-1, 3)) is None  # its inputs came later
    assert ran((1, 3), (-1, 3), (3, 3)) is not None


def test_a_task_that_fetches_its_inputs_says_nothing_of_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[Any, int] = {}

    def noted(_: Pauses, ts: Any, *others: Any) -> None:
        *_, (sent, _) = others
        found[ts.key] = sent

    monkeypatch.setattr(Pauses, "task_ran", noted)
    cluster = VirtualCluster(2, without=["bundles", "prefetch"])
    cluster.submit({f"source-{i}": VirtualTask(1.0, nbytes=10**6) for i in range(2)})
    for key, read in (("one", ("source-0",)), ("both", ("source-0", "source-1"))):
        cluster.run()
        cluster.submit({key: VirtualTask(0.1, read)})
    cluster.run()
    assert {key for key, sent in found.items() if sent < 0} == {"both"}
