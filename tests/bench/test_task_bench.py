"""Task Bench's patterns against the published table, and tasks that notice wrong inputs."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import Client

from ferroflow_dask.bench.workloads import WORKLOADS, Instance, Request
from ferroflow_dask.bench.workloads.task_bench import PATTERNS, TASK_BENCH, Pattern, PointTask
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


def test_a_task_returns_its_point() -> None:
    assert PointTask(0.0, "s")(3, 1, (0, 2), (2, 0), (2, 2)) == (3, 1)


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
        PointTask(0.0, "s")(3, 1, (0, 2), *inputs)


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
def test_work_and_longest_chain_are_those_of_the_pattern(name: str, n_ops: int, longest: int) -> None:
    instance = build(name)
    assert instance.n_ops == n_ops
    assert (instance.t1_s, instance.t_inf_s) == pytest.approx((n_ops * 0.01, longest * 0.01))


def test_every_point_that_nothing_depends_on_is_a_result() -> None:
    build("trivial").check([(t, i) for t in range(3) for i in range(4)])
    build("stencil_1d").check([(2, i) for i in range(4)])
    build("task_bench_tree", steps=4).check([(2, 2), (2, 3), *((3, i) for i in range(4))])


def test_another_point_fails_the_check() -> None:
    with pytest.raises(ResultError, match="value 3: value 0: the value is 1, expected 2"):
        build("stencil_1d").check([(2, 0), (2, 1), (2, 2), (1, 3)])


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
