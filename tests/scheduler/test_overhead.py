"""What the plugin costs the scheduler: calls of its functions per task, and how CPU time is measured."""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import feeding
import pytest
from calls_per_task import arrival_calls, calls
from command_line import answer
from garbage import collected_as_by_a_scheduler
from measure_scheduler import main as program
from overhead_graphs import GRAPHS
from scheduler_cost import VERSIONS, Overhead, measure, overhead_table

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

#: Most calls per task of functions of the plugin and the policy. They may only become fewer: a change that
#: needs more calls has to save them elsewhere.
ARRIVAL_BUDGET = 71
BUDGETS = {"independent": 42, "tree": 69, "array": 88, "shuffle": 72, "chains": 78}


@pytest.mark.parametrize("name", GRAPHS)
def test_calls_per_task_are_within_the_budget(name: str) -> None:
    n_tasks, found = calls(name)
    per_task = sum(found.values()) / n_tasks
    dearest = ", ".join(f"{function} {n / n_tasks:.1f}" for function, n in found.most_common(5))
    assert per_task <= BUDGETS[name], f"{per_task:.1f} calls per task; most: {dearest}"
    assert per_task > 5, "the plugin was not at work"


def test_calls_of_the_plan_of_a_graph_are_within_the_budget() -> None:
    n_tasks, found = arrival_calls()
    assert sum(found.values()) / n_tasks <= ARRIVAL_BUDGET


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_have_the_size_that_is_asked_for(name: str) -> None:
    graph = GRAPHS[name](400)
    assert len(graph) == pytest.approx(400, rel=0.1)
    assert graph == GRAPHS[name](400, seed=0) != GRAPHS[name](400, seed=1)
    assert all(needed in graph for task in graph.values() for needed in task.dependencies)


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Slow(VirtualCluster):
    """A cluster whose scheduler takes 1 ms of CPU time for the end of each task."""

    def __init__(self, **options: Any) -> None:
        super().__init__(4, policy="no-stealing", latency_s=0.0, **options)
        stock = self.scheduler.stream_handlers["task-finished"]

        def finished(**message: Any) -> None:
            busy(1e-3)
            stock(**message)

        self.scheduler.stream_handlers["task-finished"] = finished


def test_cpu_time_that_is_measured_changes_nothing_and_that_is_charged_keeps_the_scheduler_busy() -> None:
    plain, measured, charged = Slow(), Slow(scheduler_cpu="measured"), Slow(scheduler_cpu="charged")
    for cluster in (plain, measured, charged):
        cluster.submit({("x", i): VirtualTask(0.001) for i in range(40)})
        cluster.run()
        cluster.check()
    assert plain.cpu.seconds == 0
    assert min(measured.cpu.seconds, charged.cpu.seconds) >= 40e-3
    assert measured.record.timeline() == plain.record.timeline()
    assert charged.record.makespan_s >= 40e-3  # instead of the 10 ms that four workers need
    completions_s = [completion.time for completion in charged.record.completions]
    assert completions_s == sorted(completions_s)


def test_other_modes_are_refused() -> None:
    with pytest.raises(
        UsageError, match="scheduler_cpu must be one of: ignored, measured, charged; got 'all'"
    ):
        VirtualCluster(1, scheduler_cpu="all")


def test_versions_take_turns() -> None:
    runs: list[str] = []
    (one,) = measure(["chains"], 100, 2, 2, lambda graph, version: runs.append(version))
    assert runs == [*VERSIONS[::-1], *VERSIONS]
    assert one.n_tasks == 100
    assert {version: len(values) for version, values in one.per_task_s.items()} == dict.fromkeys(VERSIONS, 2)
    assert all(0 < value < math.inf for values in one.per_task_s.values() for value in values)


def test_the_ratio_is_that_of_runs_which_followed_each_other() -> None:
    times = {"dask": [1e-4, 2e-4, 4e-4], "no-stealing": [1e-4] * 3, "ferroflow": [2e-4, 3e-4, 8e-4]}
    one = Overhead("tree", 63, times)
    assert (one.us("dask"), one.us("ferroflow"), one.ratio) == (200.0, 300.0, 2.0)
    assert overhead_table([one]).splitlines()[2] == "| tree | 63 | 200 | 100 | 300 | 2.00 |"


def test_the_command_prints_a_table() -> None:
    asked = ("overhead", "--graph", "tree", "--tasks", "100", "--workers", "2", "--repeat", "1")
    result = answer(*asked, command=program)
    assert result.stdout.splitlines()[0].startswith("| graph | tasks | Dask [µs] |")
    assert result.stdout.splitlines()[2].startswith("| tree | 102 |")


def test_garbage_is_collected_as_by_a_scheduler_and_then_as_before() -> None:
    def is_collected(value: object) -> bool:
        return any(one is value for one in gc.get_objects())

    before, old = gc.get_threshold(), [object()]
    with collected_as_by_a_scheduler():
        assert gc.get_threshold() == tuple(3 * one for one in before)
        new = [object()]
        assert not is_collected(old)
        assert is_collected(new)
    assert gc.get_threshold() == before


# Workers that a scheduler feeds


@pytest.mark.parametrize("name", feeding.GRAPHS)
def test_a_scheduler_that_takes_no_time_keeps_all_workers_busy(name: str) -> None:
    found = feeding.feed(name, "dask", 6, 0.1, cpu="ignored")
    assert 0.8 < found.busy <= 1.0
    assert found.starts_per_s == pytest.approx(6 * found.busy / 0.1, rel=0.25)


def slow_from(limit: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a scheduler keep up to `limit` workers busy, except in each third run; return what is tried."""
    tried: list[int] = []

    def feed(name: str, policy: str, workers: int, duration_s: float) -> feeding.Feeding:
        tried.append(workers)
        return feeding.Feeding(0.95 if workers <= limit and len(tried) % 3 else 0.5, 1.0)

    monkeypatch.setattr(feeding, "feed", feed)
    return tried


@pytest.mark.parametrize(
    ("limit", "found", "numbers"),
    [
        (300, 288, [64, 128, 256, 512, 384, 320, 288]),
        (64, 64, [64, 128, 96, 80, 72]),
        (63, 0, [64]),
        (9000, 1000, [64, 128, 256, 512, 1000]),
    ],
)
def test_the_largest_number_of_busy_workers_is_searched(
    limit: int, found: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = slow_from(limit, monkeypatch)
    assert feeding.most_workers("shuffle", "dask", 0.1, 64, 1000) == found
    assert tried == [number for number in numbers for _ in range(3)]


def test_the_command_prints_the_largest_numbers_of_workers() -> None:
    limits = ("--fewest", "2", "--most", "4")
    result = answer("feeding", "--graph", "independent", "--task-ms", "1000", *limits, command=program)
    assert result.stdout.splitlines()[2] == "| independent | 1.00 | 4 | 4 |"
