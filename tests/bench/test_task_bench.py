"""Task Bench's patterns against the published table, and tasks that notice wrong inputs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from distributed import Client

from ferroflow_dask.bench.workloads import WORKLOADS, Instance, Request
from ferroflow_dask.bench.workloads import task_bench as module
from ferroflow_dask.bench.workloads.task_bench import KERNELS, PATTERNS, TASK_BENCH, Pattern, PointTask
from ferroflow_dask.exceptions import ResultError


def step(pattern: Pattern, t: int) -> list[tuple[int, ...]]:
    return [pattern.dependences(t, i) for i in range(pattern.width_at(t))]


#: pattern, step, dependences of each point of the step
TABLE: list[Any] = [
    pytest.param(Pattern("trivial", 3), 1, [(), (), ()], id="trivial: none"),
    pytest.param(Pattern("no_comm", 3), 1, [(0,), (1,), (2,)], id="no_comm: itself"),
    pytest.param(
        Pattern("stencil_1d", 4), 1, [(0, 1), (0, 1, 2), (1, 2, 3), (2, 3)], id="stencil: neighbours in range"
    ),
    pytest.param(Pattern("stencil_1d", 1), 1, [(0,)], id="stencil of one point: itself"),
    pytest.param(Pattern("dom", 3), 2, [(0,), (0, 1), (1, 2)], id="dom: itself and the one before"),
    pytest.param(Pattern("tree", 6), 1, [(0,), (0,)], id="tree: two children of the root"),
    pytest.param(Pattern("tree", 6), 2, [(0,), (0,), (1,), (1,)], id="tree: four of two"),
    pytest.param(
        Pattern("tree", 6), 3, [(0,), (0,), (1,), (1,), (2,), (2,)], id="tree: width ends the doubling"
    ),
    pytest.param(
        Pattern("tree", 6), 4, [(0,), (0,), (1,), (1,), (2,), (2,)], id="tree: at full width, the lower half"
    ),
    pytest.param(Pattern("fft", 4), 1, [(0, 1), (0, 1, 2), (1, 2, 3), (2, 3)], id="fft: first ± 1"),
    pytest.param(Pattern("fft", 4), 2, [(0, 2), (1, 3), (0, 2), (1, 3)], id="fft: then ± 2"),
    pytest.param(Pattern("fft", 4), 3, [(0, 1), (0, 1, 2), (1, 2, 3), (2, 3)], id="fft: ± 1 again"),
    pytest.param(
        Pattern("fft", 5),
        3,
        [(0, 4), (1,), (2,), (3,), (0, 4)],
        id="fft of a width that is no power of two: ± 4 too",
    ),
    pytest.param(Pattern("fft", 1), 2, [(0,)], id="fft of one point: itself"),
    pytest.param(Pattern("all_to_all", 3), 1, [(0, 1, 2)] * 3, id="all_to_all: all"),
    pytest.param(
        Pattern("nearest", 4, radix=3), 1, [(0, 1), (0, 1, 2), (1, 2, 3), (2, 3)], id="nearest 3: a stencil"
    ),
    pytest.param(
        Pattern("nearest", 4, radix=2),
        1,
        [(0,), (0, 1), (1, 2), (2, 3)],
        id="nearest 2: the one before first",
    ),
    pytest.param(Pattern("nearest", 2, radix=9), 1, [(0, 1)] * 2, id="nearest: a window wider than the step"),
    pytest.param(
        Pattern("spread", 6, radix=3),
        3,
        [(0, 2, 4), (1, 3, 5), (2, 4, 0), (3, 5, 1), (4, 0, 2), (5, 1, 3)],
        id="spread: evenly, unshifted every third step",
    ),
    pytest.param(
        Pattern("spread", 6, radix=2),
        1,
        [(0, 4), (1, 5), (2, 0), (3, 1), (4, 2), (5, 3)],
        id="spread: all but itself shifted by one",
    ),
    pytest.param(
        Pattern("spread", 4, radix=2), 2, [(0,), (1,), (2,), (3,)], id="spread: shifted onto itself, once"
    ),
    pytest.param(
        Pattern("random_nearest", 4, radix=3, fraction=1.0),
        1,
        [(0, 1), (0, 1, 2), (1, 2, 3), (2, 3)],
        id="random_nearest of all: nearest",
    ),
    pytest.param(
        Pattern("random_nearest", 4, radix=3, fraction=0.0),
        1,
        [(0,), (1,), (2,), (3,)],
        id="random_nearest of none: itself",
    ),
]


@pytest.mark.parametrize(("pattern", "t", "expected"), TABLE)
def test_dependences_are_those_of_the_table(
    pattern: Pattern, t: int, expected: list[tuple[int, ...]]
) -> None:
    assert step(pattern, t) == expected


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_the_first_step_depends_on_nothing_and_others_on_points_that_exist(name: str, width: int) -> None:
    pattern = Pattern(name, width, radix=3, fraction=0.5)
    assert set(step(pattern, 0)) == {()}
    for t in range(1, 8):
        for needed in step(pattern, t):
            assert len(set(needed)) == len(needed)
            assert set(needed) <= set(range(pattern.width_at(t - 1)))


@pytest.mark.parametrize("name", PATTERNS)
def test_only_a_tree_grows(name: str) -> None:
    widths = [Pattern(name, 6).width_at(t) for t in range(5)]
    assert widths == ([1, 2, 4, 6, 6] if name == "tree" else [6] * 5)


def test_random_nearest_keeps_about_its_fraction_and_varies_by_step() -> None:
    pattern = Pattern("random_nearest", 200, radix=11, fraction=0.25)
    steps = [step(pattern, t) for t in (1, 2, 3, 4)]
    kept = sum(len(needed) - 1 for needed in steps[0]) / (200 * 10)
    assert 0.2 < kept < 0.3
    assert steps[0] != steps[1] != steps[2]
    assert steps[0] == steps[3]
    assert all(i in needed for i, needed in enumerate(steps[0]))


# Tasks


def point_task(**sizes: Any) -> PointTask:
    return PointTask(
        **{
            "kernel": "sleep",
            "seconds": 0,
            "imbalance": 0.0,
            "n": 4,
            "iterations": 2,
            "output_bytes": 0,
            "salt": "s",
        }
        | sizes
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_task_returns_its_point(kernel: str) -> None:
    assert point_task(kernel=kernel)(3, 1, (0, 2), (2, 0), (2, 2)) == (3, 1)


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param([(2, 2), (2, 0)], id="in another order"),
        pytest.param([(2, 0)], id="one too few"),
        pytest.param([(2, 0), (2, 2), (2, 3)], id="one too many"),
        pytest.param([(2, 0), (1, 2)], id="of another step"),
        pytest.param([(2, 0), (2, 1)], id="another point"),
        pytest.param([(2, 0), "xy"], id="no point at all"),
    ],
)
def test_a_task_refuses_inputs_that_it_does_not_depend_on(inputs: list[Any]) -> None:
    with pytest.raises(ResultError, match=r"point \(3, 1\) depends on \[\(2, 0\), \(2, 2\)\] and was given"):
        point_task()(3, 1, (0, 2), *inputs)


def test_a_payload_has_the_size_asked_for_and_depends_on_point_and_salt() -> None:
    task = point_task(output_bytes=100)
    *point, payload = task.result(1, 2)
    assert point == [1, 2]
    assert payload.nbytes == 100
    others = (task.result(1, 3), task.result(2, 2), point_task(output_bytes=100, salt="t").result(1, 2))
    assert not any(np.array_equal(payload, other) for *_, other in others)
    assert task(1, 2, (0,), (0, 0, payload))[:2] == (1, 2)


def test_busy_spins_until_its_thread_has_used_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks) * 0.25)
    point_task(kernel="busy", seconds=1.0)(0, 0, ())
    assert next(ticks) * 0.25 == 1.25  # the clock was last read when 1.0 s were over


def test_matmul_multiplies_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(np.ndarray):
        products = 0

        def __matmul__(self, other: Any) -> Any:
            Counting.products += 1
            return np.asarray(self).__matmul__(np.asarray(other)).view(Counting)

    monkeypatch.setattr(module.np, "ones", lambda *a, **k: np.full(*a[:1], 1, *a[1:]).view(Counting))
    point_task(kernel="matmul", n=3, iterations=5)(0, 0, ())
    assert Counting.products == 5


# Instances


def build(name: str, **sizes: Any) -> Instance:
    workload = WORKLOADS[name]
    given = {"width": 4, "steps": 3, "task_ms": 10.0, **sizes}
    return workload.build(Request(workload.arguments(given), seed=0, salt="x", n_threads=2))


@pytest.mark.parametrize(
    ("name", "n_ops", "longest"),
    [
        ("trivial", 12, 1),
        ("no_comm", 12, 3),
        ("stencil_1d", 12, 3),
        ("dom", 12, 3),
        ("task_bench_tree", 1 + 2 + 4, 3),
        ("fft", 12, 3),
        ("all_to_all", 12, 3),
        ("nearest", 12, 3),
        ("spread", 12, 3),
        ("random_nearest", 12, 3),
    ],
)
@pytest.mark.parametrize("kernel", ["sleep", "busy"])
def test_work_and_longest_chain_are_those_of_the_pattern(
    name: str, n_ops: int, longest: int, kernel: str
) -> None:
    instance = build(name, kernel=kernel)
    assert instance.n_ops == n_ops
    assert (instance.t1_s, instance.t_inf_s) == pytest.approx((n_ops * 0.01, longest * 0.01))


def test_durations_differ_by_as_much_as_is_asked() -> None:
    equal, some = point_task(seconds=0.01), point_task(seconds=0.01, imbalance=0.5)
    points = [(t, i) for t in range(30) for i in range(30)]
    assert {equal.duration_s(*point) for point in points} == {0.01}
    durations_s = [some.duration_s(*point) for point in points]
    assert 0.005 <= min(durations_s) < 0.0055
    assert 0.0145 < max(durations_s) <= 0.015
    assert sum(durations_s) / len(points) == pytest.approx(0.01, rel=0.03)
    assert durations_s != [
        point_task(seconds=0.01, imbalance=0.5, salt="other").duration_s(*p) for p in points
    ]
    uneven = build("no_comm", imbalance=0.5, width=1)
    assert uneven.t1_s == uneven.t_inf_s != build("no_comm", width=1).t1_s


def test_the_work_of_products_is_measured() -> None:
    instance = build("stencil_1d", kernel="matmul")
    assert instance.t1_s is instance.t_inf_s is None


def test_every_point_that_nothing_depends_on_is_a_result() -> None:
    build("trivial").check([(t, i) for t in range(3) for i in range(4)])
    build("stencil_1d").check([(2, i) for i in range(4)])
    build("task_bench_tree", steps=4).check([(2, 2), (2, 3), *((3, i) for i in range(4))])


def test_a_payload_of_another_instance_fails_the_check() -> None:
    instance = build("stencil_1d", output_bytes=8)
    ours = [point_task(salt="x", output_bytes=8).result(2, i) for i in range(4)]
    instance.check(ours)
    for wrong in (point_task(salt="y", output_bytes=8).result(2, 3), (2, 3), (2, 3, ours[2][2])):
        with pytest.raises(ResultError, match=r"result of point \(2, 3\)"):
            instance.check([*ours[:3], wrong])


def test_every_pattern_is_a_workload() -> None:
    assert len(TASK_BENCH) == len(PATTERNS) == 10
    assert {workload.suite for workload in TASK_BENCH} == {"task-bench"}


@pytest.mark.cluster
@pytest.mark.parametrize("pattern", ["stencil_1d", "no_comm"])
def test_points_run_once_and_in_fewer_tasks_from_the_first_run_on(
    ferroflow_client: Client, pattern: str
) -> None:
    arguments = WORKLOADS[pattern].arguments({"width": 8, "steps": 20, "task_ms": 0.0})

    def tasks_of_a_run(salt: str) -> int:
        instance = WORKLOADS[pattern].build(Request(arguments, 0, salt, 3))
        futures = instance.submit(ferroflow_client)
        instance.check(ferroflow_client.gather(list(futures)))
        assert instance.count_executed is not None
        assert instance.count_executed(ferroflow_client) == instance.n_ops == 160
        return int(ferroflow_client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))

    for salt in ("first", "second"):
        # Whether it pays to cut a stencil depends on what tasks and messages cost here.
        assert tasks_of_a_run(salt) < (161 if pattern == "stencil_1d" else 80)
