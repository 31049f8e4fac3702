"""The policy where workers are of two kinds, and tasks take differently long on them."""

from __future__ import annotations

import pytest
from pure_policy import Cluster

from ferroflow_dask.policy import make_policy
from ferroflow_dask.policy.events import WorkerIdle, WorkerJoined
from ferroflow_dask.policy.instructions import StealTask, in_words

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


#: Of a device, free and in all, and results that fit only one that has much left [B].
NEARLY_NONE, PLENTY, TOTAL = 10**6, 10**10, 2 * 10**10
RESULT = {"output_bytes": 5 * 10**9}  # 0.5 s to spill as much


def two_gpus(*free: int) -> Cluster:
    cluster = Cluster(make_policy("ferroflow"), workers=0)
    for i, free_nbytes in enumerate(free):
        cluster.view.add_worker(f"gpu{i}", 1, "gpu")
        cluster.view.set_device_memory(f"gpu{i}", free_nbytes, TOTAL)
        cluster.tell(WorkerJoined(f"gpu{i}"))
    return cluster


@pytest.mark.parametrize(
    "more",
    [
        {"allowed": ("gpu0", "gpu1")},
        {"costs_s": PRODUCT},
        {},
        {"held": {"elsewhere": 5 * 10**9}, "input_bytes": 5 * 10**9, "output_bytes": 0},
    ],
    ids=["restricted to the two", "faster on a GPU", "any worker", "large inputs instead of a large result"],
)
def test_what_would_have_to_be_spilled_goes_to_a_gpu_with_room(more: dict[str, object]) -> None:
    cluster = two_gpus(NEARLY_NONE, PLENTY)
    given = {"costs_s": {}, **RESULT, **more}
    assert cluster.ready([cluster.task("a", 1.0, **given)]) == ["gpu1"]
    # The turns alone would have it on the other one.
    cluster = two_gpus(PLENTY, PLENTY)
    assert cluster.ready([cluster.task("a", 1.0, **given)]) == ["gpu0"]


def test_short_tasks_do_not_follow_each_other_to_a_gpu_that_is_full() -> None:
    cluster = two_gpus(PLENTY, PLENTY)
    first, second = (cluster.task(i, 1e-4, has_cost=True, **RESULT) for i in range(2))
    assert cluster.ready([first]) == ["gpu0"]
    cluster.view.set_device_memory("gpu0", NEARLY_NONE, TOTAL)
    assert cluster.ready([second]) == ["gpu1"]


def test_a_gpu_that_has_room_again_stands_among_the_others() -> None:
    cluster = two_gpus(PLENTY, PLENTY)
    task, asked = cluster.task("a", 1.0), []
    for free in (PLENTY, NEARLY_NONE, PLENTY):
        cluster.view.set_device_memory("gpu0", free, TOTAL)
        asked.append(len(list(cluster.view.least_loaded_for(task))))
    assert asked == [1, 2, 1]  # one of each group


def test_a_full_gpu_is_worth_it_once_the_other_one_is_busy_for_longer_than_spilling_takes() -> None:
    cluster = two_gpus(NEARLY_NONE, PLENTY)
    chosen = cluster.ready(cluster.task(i, 0.3, **RESULT) for i in range(3))
    assert chosen == ["gpu1", "gpu1", "gpu0"]


@pytest.mark.parametrize(("free", "n_stolen"), [(NEARLY_NONE, 0), (PLENTY, 2)], ids=["full", "with room"])
def test_a_full_gpu_steals_nothing_that_it_would_have_to_spill_for(free: int, n_stolen: int) -> None:
    cluster = two_gpus(free, PLENTY)
    cluster.put("gpu1", *(cluster.task(i, 0.1, **RESULT) for i in range(5)))
    given = cluster.tell(WorkerIdle("gpu0"))
    assert [type(instruction) for instruction in given] == [StealTask] * n_stolen
    told = [in_words(declined.reason) for declined in cluster.declined]
    assert any("for data that take 0.4999 s" in reason for reason in told) == (not n_stolen)


def test_what_is_on_its_way_and_results_of_tasks_take_their_part_of_the_free_memory() -> None:
    cluster = two_gpus(PLENTY)
    task = cluster.task("a", 1.0, output_bytes=6 * 10**9)
    assert cluster.view.transfer_s(task, "gpu0") == 0
    cluster.view.set_incoming("gpu0", 5 * 10**9)
    assert cluster.view.transfer_s(task, "gpu0") == pytest.approx(0.1)
    cluster.view.set_incoming("gpu0", 10**12)  # that is others' to wait for
    assert cluster.view.transfer_s(task, "gpu0") == pytest.approx(0.6)
    cluster.view.set_incoming("gpu0", 0)
    cluster.put("gpu0", cluster.task("before", 1.0, output_bytes=5 * 10**9))
    assert cluster.view.transfer_s(task, "gpu0") == pytest.approx(0.1)
    cluster.view.release("before")
    assert cluster.view.transfer_s(task, "gpu0") == 0


def test_a_worker_without_a_device_has_nothing_to_spill() -> None:
    cluster = two_gpus(NEARLY_NONE)
    task = cluster.task("a", 1.0, output_bytes=10**12)
    assert cluster.view.transfer_s(task, "gpu0") > 0
    cluster.view.set_kind("gpu0", "cpu")
    assert cluster.view.transfer_s(task, "gpu0") == 0
    assert not cluster.view.workers["gpu0"].is_full
