"""Policies as pure objects: scenarios without a cluster."""

from __future__ import annotations

from collections import Counter

import pytest
from pure_policy import Cluster, ferroflow, steals

from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.policy import make_policy
from ferroflow_dask.policy.events import GraphArrived, TaskReady, WorkerIdle
from ferroflow_dask.policy.instructions import AssignTask, in_words

# The view


def test_loads_are_exact_again_when_a_queue_is_empty() -> None:
    cluster = ferroflow()
    tasks = [cluster.task(i, 0.1) for i in range(7)]
    cluster.put("w0", *tasks)
    for task in tasks:
        cluster.view.finish(task.key, 1.0)
    assert cluster.view.workers["w0"].backlog_s == 0.0
    assert set(cluster.view.first_idle(9)) == {"w0", "w1", "w2", "w3"}
    assert not cluster.view.n_crowded


def test_threads_count_as_free_places() -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=1, nthreads=3)
    cluster.put("w0", *(cluster.task(i) for i in range(3)))
    assert not cluster.view.n_crowded
    assert cluster.view.first_idle(9) == []
    cluster.put("w0", cluster.task("fourth"))
    assert [worker.key for worker in cluster.view.crowded_from_most_loaded()] == ["w0"]
    assert [task.key for task in cluster.view.workers["w0"].waiting_from_last()] == ["fourth"]
    for key in cluster.tasks:
        cluster.view.finish(key, 1.0)
    assert cluster.view.n_idle == len(cluster.view.first_idle(9)) == 1


def test_of_equal_priorities_the_last_that_was_sent_is_due_first() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, priority=(0, 1, 0)) for i in range(4)))
    assert [task.key for task in cluster.view.workers["w0"].queue] == [0, 3, 2, 1]  # the first has started
    assert [s.key for s in cluster.tell(WorkerIdle("w1"))] == [1]
    cluster.view.finish(0, cluster.now)
    assert [task.key for task in cluster.view.workers["w0"].queue if task.has_started] == [3]


def test_set_priority_moves_a_task_in_its_queue_but_not_another_of_its_key() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i) for i in range(4)))
    cluster.view.set_priority(cluster.tasks[3], (0, 1, 0.5))
    queue = cluster.view.workers["w0"].queue
    assert [task.key for task in queue] == [0, 3, 1, 2]
    namesake = cluster.task(2)
    cluster.view.set_priority(namesake, (0, 0, 0))
    assert [task.key for task in queue] == [0, 3, 1, 2]
    assert namesake.priority == (0, 0, 0)


def test_what_has_started_stays_in_front_of_what_comes_before_it() -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=2, nthreads=2)
    cluster.put("w0", *(cluster.task(key, priority=(0, 1, key)) for key in (5, 6, 7, 1, 2)))
    queue = cluster.view.workers["w0"].queue
    assert [(task.key, task.has_started) for task in queue] == [
        (5, True),
        (6, True),
        (1, False),
        (2, False),
        (7, False),
    ]
    cluster.view.finish(6, cluster.now)
    assert [task.key for task in queue if task.has_started] == [1, 5]
    cluster.view.release(2)  # it was waiting: nothing starts for it
    assert [task.key for task in queue if task.has_started] == [1, 5]


def test_an_unknown_policy_or_option_lists_the_known() -> None:
    known = "unknown policy 'greedy'; choose one of: ferroflow, random, ring, static"
    with pytest.raises(UnknownNameError, match=known):
        make_policy("greedy")
    none = "options of policy 'ferroflow' must be among: none; got 'threshold'"
    with pytest.raises(UsageError, match=none):
        make_policy("ferroflow", threshold=2)


# Reasons


@pytest.mark.parametrize(
    ("costs", "more", "reason"),
    [
        ([0.001, 0.001], {}, "the victim is done in 0.002 s; a steal takes 0.003 s"),
        ([1e-4] * 100, {}, "no task there may move here, and is long enough"),
        ([1.0, 1.0], {"is_movable": False}, "no task there may move here, and is long enough"),
        ([1.0, 1.0], {"allowed": {"w0"}}, "no task there may move here, and is long enough"),
        (
            [1.0, 1.0],
            {"held": {"w0": 10**9}, "input_bytes": 10**9},
            "would end in 11.02 s instead of 2 s, for data that take 10.01 s",
        ),
    ],
    ids=["too soon", "too short", "nothing may move", "restricted to others", "too much data"],
)
def test_a_declined_steal_has_a_reason(costs: list[float], more: dict[str, object], reason: str) -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=2)
    cluster.put("w0", *(cluster.task(i, cost, **more) for i, cost in enumerate(costs)))
    assert cluster.tell(WorkerIdle("w1")) == []
    (declined,) = cluster.declined
    assert (declined.key, declined.victim, declined.thief) == (len(costs) - 1, "w0", "w1")
    assert in_words(declined.reason) == reason


@pytest.mark.parametrize(
    ("queued", "held", "has_cost", "reason"),
    [
        ([], {}, False, "finishes in 0.2 s (queue 0, transfer 0, run 0.2), first of 1"),
        (
            [0.3, 0.4],
            {"w1": 10**6},
            True,
            "finishes in 0.523 s (queue 0.3, transfer 0.023, run 0.2), first of 2; next best w1 in 0.6 s",
        ),
        (
            [0.3, 0.55],
            {"w1": 10**6},
            False,
            "finishes in 0.523 s (queue 0.3, transfer 0.023, run 0.2), first of 2; next best w1 in 0.75 s",
        ),
        (
            [0.3, 0.31],
            {"w1": 10**6},
            True,
            "finishes in 0.51 s (queue 0.31, transfer 0, run 0.2), first of 2; next best w0 in 0.523 s",
        ),
    ],
    ids=[
        "the only one",
        "though the input is elsewhere",
        "unless it gains more than the task takes",
        "as it holds the input",
    ],
)
def test_a_placement_tells_what_was_considered(
    queued: list[float], held: dict[str, int], has_cost: bool, reason: str
) -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=2)
    for i, cost_s in enumerate(queued):
        cluster.put(f"w{i}", cluster.task(("before", i), cost_s))
    more = {"held": held, "input_bytes": sum(held.values()), "is_guess": not held, "has_cost": has_cost}
    (assigned,) = cluster.tell(TaskReady(cluster.task("a", 0.2, **more)))
    assert isinstance(assigned, AssignTask)
    assert in_words(assigned.reason) == reason


# Speeds and orders


def run_on(cluster: Cluster, worker: str, expected_s: float, measured_s: float, n: int = 10) -> None:
    for _ in range(n):
        task = cluster.task(("run", worker, len(cluster.tasks)), expected_s)
        cluster.put(worker, task)
        cluster.view.observe(task.key, measured_s)
        cluster.view.finish(task.key, cluster.now)


def speeds(cluster: Cluster) -> list[float]:
    return [worker.speed for worker in cluster.view.workers.values()]


def test_the_speed_of_a_worker_is_learned_relative_to_the_others() -> None:
    cluster = ferroflow()
    for worker in ("w0", "w1", "w2", "w3", "w0", "w1", "w2", "w3"):
        run_on(cluster, worker, 0.02, 0.2 if worker == "w3" else 0.02)
    assert speeds(cluster) == [1.0, 1.0, 1.0, 0.125]


def test_wrong_expectations_and_noise_make_no_worker_slow() -> None:
    cluster = ferroflow()
    for _ in range(3):
        for i, worker in enumerate(cluster.view.workers):
            run_on(cluster, worker, 0.02, 0.1 * (0.9 + 0.05 * i), n=3)
    assert speeds(cluster) == [1.0] * 4


def test_guesses_and_very_short_tasks_tell_nothing_of_a_worker() -> None:
    cluster = ferroflow()
    guess = cluster.task("guess", 0.5, is_guess=True)
    for _ in range(10):
        cluster.put("w0", guess)
        cluster.view.observe("guess", 50.0)
    for worker in ("w0", "w2", "w3"):
        run_on(cluster, worker, 0.02, 0.02)
    run_on(cluster, "w1", 1e-4, 1e-2)
    assert speeds(cluster) == [1.0] * 4


def test_a_slow_worker_gets_its_share_and_no_more() -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=2)
    run_on(cluster, "w0", 0.02, 0.02)
    run_on(cluster, "w1", 0.02, 0.32)
    placed = Counter(cluster.ready(cluster.task(i, 0.02) for i in range(34)))
    assert placed == {"w0": 32, "w1": 2}


def test_a_slow_thief_leaves_what_ends_earlier_where_it_is() -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=2)
    run_on(cluster, "w0", 0.02, 0.02)
    run_on(cluster, "w1", 0.02, 0.08)
    cluster.put("w0", cluster.task("a", 1.0), cluster.task("b", 1.0))
    assert cluster.tell(WorkerIdle("w1")) == []
    assert in_words(cluster.declined[-1].reason) == "would end in 4.003 s instead of 2 s"


def test_a_slow_victim_loses_what_it_would_end_later() -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=2)
    run_on(cluster, "w0", 0.02, 0.02)
    run_on(cluster, "w1", 0.02, 0.08)
    cluster.put("w1", *(cluster.task(i, 0.1) for i in range(10)))
    assert len(steals(cluster.tell(WorkerIdle("w0")))) == 7  # 0.7 s, and three tasks of 0.4 s


def test_branches_are_run_to_their_end_longest_first() -> None:
    cluster = ferroflow()
    tasks = []
    for branch, cost in enumerate([1.0, 3.0, 2.0]):
        for step in range(3):
            before = ((branch, step - 1),) if step else ()
            rank = cost * (3 - step)
            tasks.append(cluster.task((branch, step), cost, rank_s=rank, dependencies=before))
    join = tuple((branch, 2) for branch in range(3))
    tasks.append(cluster.task("join", 1.0, rank_s=0.5, dependencies=join))
    cluster.tell(GraphArrived(tuple(tasks)))
    in_order = [task.key for task in sorted(tasks, key=lambda task: task.priority)]
    assert in_order == [(branch, step) for branch in (1, 2, 0) for step in range(3)] + ["join"]
