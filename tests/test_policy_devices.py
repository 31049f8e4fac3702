"""The policy where workers are of two kinds, and tasks take differently long on them."""

from __future__ import annotations

import pytest
from test_policy import Cluster

from ferroflow_dask.policy import make_policy
from ferroflow_dask.policy.events import WorkerIdle, WorkerJoined
from ferroflow_dask.policy.instructions import StealTask

#: A product that a GPU does ten times as fast as a CPU worker.
PRODUCT = {"cpu": 1.0, "gpu": 0.1}


def two_kinds(n_cpus: int = 2) -> Cluster:
    cluster = Cluster(make_policy("ferroflow"), workers=n_cpus)  # w0, w1, …
    cluster.view.add_worker("gpu", 1, "gpu")
    cluster.tell(WorkerJoined("gpu"))
    return cluster


def test_what_a_gpu_does_faster_queues_there_until_a_cpu_ends_it_earlier() -> None:
    cluster = two_kinds()
    chosen = cluster.ready(cluster.task(i, 1.0, costs_s=PRODUCT) for i in range(24))
    # Ten end on the GPU before one has ended on a CPU; from then on twelve tasks share 1 + 1 + 10 a second.
    assert chosen[:9] == ["gpu"] * 9
    assert chosen.count("gpu") == 20
    assert chosen.count("w0") == chosen.count("w1") == 2


def test_what_is_faster_on_a_cpu_goes_there_though_the_gpu_is_idle() -> None:
    cluster = two_kinds()
    costs = {"cpu": 0.01, "gpu": 0.5}
    assert "gpu" not in cluster.ready(cluster.task(i, 0.01, costs_s=costs) for i in range(20))


def test_data_on_the_host_of_another_worker_are_part_of_the_time() -> None:
    cluster = two_kinds()
    there = {"held": {"w0": 10**9}, "input_bytes": 10**9, "n_held": {"w0": 1}, "n_inputs": 1}  # 10 s
    assert cluster.ready([cluster.task("a", 1.0, costs_s=PRODUCT, **there)]) == ["w0"]


def test_durations_count_where_the_task_is() -> None:
    cluster = two_kinds()
    task = cluster.task("a", 1.0, costs_s=PRODUCT)
    cluster.put("gpu", task)
    assert cluster.view.workers["gpu"].backlog_s == pytest.approx(0.1)
    cluster.put("w0", task)
    assert cluster.view.workers["gpu"].backlog_s == 0
    assert cluster.view.workers["w0"].backlog_s == pytest.approx(1.0)


@pytest.mark.parametrize(("n_waiting", "n_stolen"), [(30, 2), (8, 0)])
def test_an_idle_cpu_takes_from_a_gpu_what_it_ends_earlier(n_waiting: int, n_stolen: int) -> None:
    cluster = two_kinds(1)
    cluster.put("gpu", *(cluster.task(i, 1.0, costs_s=PRODUCT) for i in range(n_waiting)))
    given = cluster.tell(WorkerIdle("w0"))
    assert [type(instruction) for instruction in given] == [StealTask] * n_stolen


def test_an_idle_gpu_takes_from_cpus() -> None:
    cluster = two_kinds(1)
    cluster.put("w0", *(cluster.task(i, 1.0, costs_s=PRODUCT) for i in range(12)))
    given = cluster.tell(WorkerIdle("gpu"))
    # Almost all: ten on the GPU take as long as one on the CPU.
    assert 9 <= len(given) <= 11
    assert {instruction.thief for instruction in given if isinstance(instruction, StealTask)} == {"gpu"}
