"""Memory of virtual workers: what is spilled, when they pause, and when they die."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed.spill import SpillBuffer

from ferroflow_dask.topology import Host, Topology, Worker
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.memory import MemorySpec, Store
from ferroflow_dask.virtual.runs import Result

#: Latency of messages [s].
L = 0.001
LIMIT = MemorySpec(nbytes=1000, disk_bandwidth=100.0)


def filled(target: float, *sizes: int) -> Store:
    store = Store(target)
    for i, nbytes in enumerate(sizes):
        store[i] = Result(nbytes)
    return store


def cluster_of(policy: str = "dask", workers: int = 1, **options: Any) -> VirtualCluster:
    return VirtualCluster(workers, policy=policy, latency_s=L, memory=LIMIT, **options)


def test_results_that_were_used_least_recently_are_spilled_first() -> None:
    store = filled(100, 40, 40)
    assert store[0].nbytes == 40  # type: ignore[attr-defined]
    store[2] = Result(40)
    assert (list(store), store.fast_nbytes, store.slow_nbytes) == ([0, 2, 1], 80, 40)
    store[1]
    assert (list(store), store.written, store.read) == ([2, 1, 0], 80, 40)
    del store[0], store[1]
    assert (store.fast_nbytes, store.slow_nbytes, len(store)) == (40, 0, 1)


def test_a_result_above_the_target_goes_to_disk_and_displaces_nothing() -> None:
    store = filled(100, 60, 150)
    assert (store.fast_nbytes, store.slow_nbytes, store.written) == (60, 150, 150)


def test_a_spilled_result_is_replaced_and_forgotten_without_being_read() -> None:
    store = filled(100, 60, 60)
    store[0] = Result(10)
    assert (store.read, store.fast_nbytes, store.slow_nbytes) == (0, 70, 0)
    del store[0]
    with pytest.raises(KeyError):
        store[0]


@pytest.mark.parametrize("seed", range(20))
def test_a_store_spills_what_a_spill_buffer_spills(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    store, buffer = Store(100), SpillBuffer(str(tmp_path), target=100)
    for _ in range(200):
        key = rng.randrange(12)
        match rng.choice(("put", "get", "get", "delete", "evict")):
            case "put":
                store[key] = buffer[key] = Result(rng.choice((10, 20, 30, 50, 120)))
            case "get" if key in store:
                assert store[key].nbytes == buffer[key].nbytes  # type: ignore[attr-defined]
            case "delete" if key in store:
                del store[key], buffer[key]
            case "evict" if buffer.fast:
                assert store.evict() == buffer.evict()
        assert set(store) == set(buffer)
        assert store.fast_nbytes == buffer.fast.total_weight
        assert {*store._slow} == {*buffer.slow}


def test_what_is_above_the_target_is_written_and_read_at_the_rate_of_the_disk() -> None:
    cluster = cluster_of()
    cluster.submit({f"a{i}": VirtualTask(1.0, nbytes=300) for i in range(3)}, keep=["a0", "a1", "a2"])
    # 600 of 900 B stay: one result is written in 3 s, in which nothing else is reported.
    assert cluster.run() == pytest.approx(3 + 3, abs=0.1)
    cluster.submit({"end": VirtualTask(1.0, ("a0", "a1", "a2"))})
    memory = cluster.record.memory
    end_s = cluster.run()
    assert memory.read == {0: 900}
    # Each of three reads displaces another result. The task holds all three, so the monitor, which sees
    # 900 B, writes the last two in vain.
    assert memory.written == {0: 300 + 900 + 600}
    assert end_s > 6 + 18
    assert memory.results_peak == 900
    cluster.check()


def test_a_worker_pauses_and_goes_on() -> None:
    cluster = cluster_of(workers=2)
    graph = {f"w{i}": VirtualTask(1.0, working_nbytes=850) for i in range(4)}
    cluster.submit(graph)
    end_s = cluster.run()
    assert cluster.record.memory.pauses == 4
    assert end_s < 3  # the monitor looks every .2 s, and resumes a worker whose task has ended
    assert cluster.record.memory.peaks == {0: 850, 1: 850}
    cluster.check()


def test_a_worker_that_takes_too_much_dies_and_comes_back() -> None:
    cluster = cluster_of()
    cluster.submit({"big": VirtualTask(1.0, working_nbytes=990)})
    cluster.run()
    # Dask gives up after three more tries.
    assert cluster.record.memory.deaths == [0, 1, 2, 3]
    assert cluster.scheduler.tasks["big"].state == "erred"
    assert len(cluster.scheduler.workers) == 1
    cluster.submit({"small": VirtualTask(1.0)})
    cluster.run()
    assert cluster.scheduler.tasks["small"].state == "memory"


def test_two_tasks_that_do_not_fit_beside_each_other_end_a_worker() -> None:
    graph = {f"w{i}": VirtualTask(1.0, working_nbytes=600) for i in range(2)}
    alone, together = cluster_of(), cluster_of(nthreads=2)
    for cluster in (alone, together):
        cluster.submit(graph)
        cluster.run()
    assert not alone.record.memory.deaths
    assert together.record.memory.deaths


def test_nothing_is_spilled_if_the_configuration_says_so() -> None:
    with dask.config.set(
        {f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause")}
    ):
        cluster = cluster_of()
        cluster.submit({f"a{i}": VirtualTask(1.0, nbytes=300) for i in range(3)}, keep=["a0", "a1", "a2"])
        assert cluster.run() == pytest.approx(3, abs=0.1)
    assert not cluster.record.memory.written


def test_the_scheduler_learns_of_the_memory_by_heartbeats() -> None:
    cluster = cluster_of()
    graph = {"a": VirtualTask(0.1, nbytes=500), "b": VirtualTask(2.0, working_nbytes=120)}
    cluster.submit(graph, keep=["a", "b"])
    cluster.run(until=1.5)
    (ws,) = cluster.scheduler.workers.values()
    assert ws.memory_limit == LIMIT.nbytes
    assert ws.metrics["memory"] == 620
    assert (ws.memory.managed, ws.memory.spilled, ws.memory.unmanaged_recent) == (500, 0, 120)


def test_bundles_take_memory_for_the_values_that_live() -> None:
    workers = (Worker(1, memory_nbytes=10_000),)
    cluster = VirtualCluster.on(Topology((Host("a", workers=workers),)))
    graph = {"a-0": VirtualTask(0.001, nbytes=100)}
    graph |= {f"a-{i}": VirtualTask(0.001, (f"a-{i - 1}",), nbytes=100) for i in range(1, 20)}
    cluster.submit(graph)
    cluster.run()
    assert cluster.record.steps
    assert cluster.record.memory.peaks == {0: 200}
    cluster.check()


def test_the_policy_knows_by_any_task_which_workers_are_short_of_memory() -> None:
    cluster = cluster_of("ferroflow")
    cluster.submit({"long": VirtualTask(10.0, working_nbytes=700)})
    found = []

    def look() -> None:
        (worker,) = cluster.stealing.view.workers.values()  # type: ignore[union-attr]
        found.append(worker.is_short_of_memory)

    for when in (5.0, 15.0):
        cluster.at(when, cluster.submit, {f"at-{when}": VirtualTask(0.1)}, client=f"client-{when}")
        cluster.at(when + 0.1, look)
    cluster.run()
    assert found == [True, False]
