"""Policies as pure objects: scenarios without a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.policy import ClusterView, Policy, TaskView, make_policy
from ferroflow_dask.policy.events import (
    Event,
    GraphArrived,
    StealConfirmed,
    StealRefused,
    TaskReady,
    WorkerIdle,
    WorkerJoined,
    WorkerLeft,
)
from ferroflow_dask.policy.instructions import (
    AssignTask,
    DeclineSteal,
    Instruction,
    SetPriority,
    StealTask,
    in_words,
)
from ferroflow_dask.policy.threshold import AdaptiveThreshold


class Cluster:
    """A view and a policy, with instructions carried out as a shell must: each before the next."""

    def __init__(self, policy: Policy, workers: int = 4, nthreads: int = 1, latency_s: float = 1e-3) -> None:
        self.policy = policy
        self.view = ClusterView(bandwidth=1e8, latency_s=latency_s)
        self.tasks: dict[object, TaskView] = {}
        self.declined: list[DeclineSteal] = []
        self.now = 0.0
        for i in range(workers):
            self.view.add_worker(f"w{i}", nthreads)
            self.tell(WorkerJoined(f"w{i}"))

    def task(self, key: object, cost_s: float = 1.0, **more: object) -> TaskView:
        index = len(self.tasks)
        self.tasks[key] = TaskView(key, cost_s, more.pop("priority", (0, 1, index)), index=index, **more)  # type: ignore[arg-type]
        return self.tasks[key]

    def tell(self, event: Event) -> list[Instruction]:
        given: list[Instruction] = []
        for instruction in self.policy.handle(event, self.view, self.now):
            match instruction:
                case DeclineSteal():
                    self.declined.append(instruction)
                    continue
                case AssignTask(key, worker) | StealTask(key, _, worker):
                    self.view.assign(self.tasks[key], worker, self.now)
                case SetPriority(key, order):
                    self.tasks[key].priority = (*self.tasks[key].priority[:-1], order)
            given.append(instruction)
        return given

    def ready(self, tasks: Iterable[TaskView]) -> list[str]:
        """Return the workers that get the tasks, in order."""
        chosen = []
        for task in tasks:
            (instruction,) = self.tell(TaskReady(task))
            assert isinstance(instruction, AssignTask)
            chosen.append(instruction.worker)
        return chosen

    def arrive(self, tasks: list[TaskView]) -> list[Instruction]:
        return self.tell(GraphArrived(tuple(tasks), frozenset(task.key for task in tasks)))

    def put(self, worker: str, *tasks: TaskView) -> None:
        for task in tasks:
            self.view.assign(task, worker, self.now)


def ferroflow(**options: object) -> Cluster:
    return Cluster(make_policy("ferroflow", **options))


# Placement


def test_all_workers_are_candidates_not_only_holders_of_inputs() -> None:
    cluster = ferroflow()
    held = {"held": {"w0": 100}, "input_bytes": 100}
    assert sorted(cluster.ready(cluster.task(i, 0.2, **held) for i in range(4))) == ["w0", "w1", "w2", "w3"]


def test_a_task_stays_with_its_data_when_moving_costs_more_than_waiting() -> None:
    cluster = ferroflow()
    big = {"held": {"w0": 10**9}, "input_bytes": 10**9}  # 10 s of transfer
    assert cluster.ready(cluster.task(i, 1.0, **big) for i in range(4)) == ["w0"] * 4


def test_what_is_on_its_way_to_a_worker_comes_before_what_is_sent_next() -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("long", 2.0))
    big = {"held": {"w0": 10**8}, "input_bytes": 10**8}  # 1 s of transfer
    for worker in ("w1", "w2", "w3"):
        assert cluster.ready([cluster.task(worker, 0.1, **big)]) == [worker]
        cluster.view.set_incoming(worker, 10**8)
    assert cluster.ready([cluster.task("next", 0.1, **big)]) == ["w0"]
    cluster.put("w1", cluster.task("as long", 3.0))  # by then the link is free
    assert cluster.view.transfer_s(cluster.tasks["next"], "w1") == pytest.approx(1.013)


def test_what_comes_for_another_task_is_not_sent_again() -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("long", 2.0))
    cluster.view.set_incoming("w1", 10**8)
    shared = {"held": {"w0": 10**8}, "input_bytes": 10**8, "coming": {"w1": 10**8}}
    task = cluster.task("reader", 0.1, **shared)
    assert [cluster.view.transfer_s(task, worker) for worker in ("w0", "w1")] == [0.0, 1.0]
    assert cluster.ready([task]) == ["w1"]


def test_locality_breaks_ties() -> None:
    cluster = ferroflow()
    assert cluster.ready([cluster.task("a", held={"w2": 0}, input_bytes=0)]) == ["w0"]
    assert cluster.ready([cluster.task("b", held={"w2": 8}, input_bytes=8)]) == ["w2"]


def test_a_task_goes_where_the_fewest_workers_have_to_be_asked() -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("long", 0.03))
    parts = {"held": {"w0": 8, "w1": 8}, "n_held": {"w0": 1, "w1": 1}, "input_bytes": 16, "n_inputs": 2}
    # w2 and w3 could start at once like w1, and there is next to nothing to send; but they lack both parts.
    assert cluster.ready([cluster.task("of both", 0.01, **parts)]) == ["w1"]
    assert cluster.tasks["of both"].n_peers("w2") == 2
    assert cluster.tasks["of both"].n_peers("w1") == 1


@pytest.mark.parametrize(
    ("cost_s", "n_readers", "expected"), [(1e-4, 3, "w0"), (0.02, 3, "w1"), (1e-4, 1000, "w1")]
)
def test_data_are_fetched_only_for_work_that_is_worth_it(
    cost_s: float, n_readers: int, expected: str
) -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("long", 1.0))
    held = {"held": {"w0": 8}, "n_held": {"w0": 1}, "input_bytes": 8, "n_inputs": 1}
    assert cluster.ready([cluster.task("reader", cost_s, n_readers=n_readers, **held)]) == [expected]


def test_equal_workers_take_turns() -> None:
    cluster = ferroflow()
    for key in range(8):
        assert cluster.ready([cluster.task(key)]) == [f"w{key % 4}"]
        cluster.view.finish(key, cluster.now)


def test_changes_between_two_questions_leave_the_order_right() -> None:
    cluster = ferroflow()
    for i in range(3):
        cluster.put("w0", cluster.task(i, 0.1))
    cluster.view.finish(0, cluster.now)
    cluster.put("w1", cluster.task("other", 0.1))
    cluster.view.finish(1, cluster.now)
    assert [worker.key for worker in cluster.view.crowded_from_most_loaded()] == []
    assert cluster.view.first_idle(9) == ["w3", "w2"]
    cluster.view.finish(2, cluster.now)
    cluster.view.set_running("w3", False)
    assert cluster.view.first_idle(9) == ["w0", "w2"]
    assert [worker.key for worker in cluster.view.least_loaded()] == ["w2"]


def test_short_tasks_without_inputs_stay_together_until_others_would_idle() -> None:
    cluster = ferroflow()  # whose messages take a millisecond
    chosen = cluster.ready(cluster.task(i, cost_s=1e-3) for i in range(24))
    assert [len(set(chosen[i : i + 3])) for i in range(0, 12, 3)] == [1, 1, 1, 1]
    assert set(Counter(chosen).values()) == {6}


@pytest.mark.parametrize(
    ("second", "expected"),
    [({}, "w0"), ({"cost_s": 1.0}, "w1"), ({"is_guess": True}, "w1"), ({"allowed": ["w2"]}, "w2")],
)
def test_only_short_tasks_go_beside_the_one_before(second: dict[str, Any], expected: str) -> None:
    cluster = ferroflow()
    assert cluster.ready([cluster.task("first", cost_s=1e-3)]) == ["w0"]
    assert cluster.ready([cluster.task("second", **{"cost_s": 1e-3, **second})]) == [expected]


def test_among_equal_workers_a_restricted_task_goes_to_the_one_that_holds_less() -> None:
    cluster = ferroflow()
    cluster.view.workers["w1"].nbytes = 100
    cluster.view.workers["w3"].nbytes = 10
    assert cluster.ready([cluster.task("a", allowed=("w1", "w3"))]) == ["w3"]


@pytest.mark.parametrize(
    ("is_guess", "expected"),
    [
        (True, {"w0": 9, "w1": 1, "w2": 1, "w3": 1}),
        (False, {"w0": 3, "w1": 3, "w2": 3, "w3": 3}),
    ],
    ids=["guessed: what cannot start elsewhere stays with its data", "known: spread"],
)
def test_data_moves_for_known_durations_only(is_guess: bool, expected: dict[str, int]) -> None:
    cluster = ferroflow()
    held = {"held": {"w0": 100}, "input_bytes": 100}
    assert Counter(cluster.ready(cluster.task(i, is_guess=is_guess, **held) for i in range(12))) == expected


def test_long_tasks_of_a_graph_are_placed_first_and_short_ones_fill_the_gaps() -> None:
    cluster = ferroflow()
    costs = [0.001] * 30 + [0.2] * 2
    tasks = [cluster.task(i, cost, rank_s=cost, has_cost=True) for i, cost in enumerate(costs)]
    placed = {i.key: i.worker for i in cluster.arrive(tasks) if isinstance(i, AssignTask)}
    heavy = {placed[30], placed[31]}
    assert len(heavy) == 2
    assert heavy.isdisjoint(placed[i] for i in range(30))


def test_tasks_of_unknown_cost_are_left_for_when_they_are_ready() -> None:
    cluster = ferroflow()
    assert cluster.arrive([cluster.task("a")]) == []


def test_priorities_follow_the_upward_rank_within_the_places_of_the_ranked() -> None:
    cluster = ferroflow()
    tasks = [
        cluster.task(key, rank_s=rank) for key, rank in [("a", 1.0), ("b", None), ("c", 3.0), ("d", 2.0)]
    ]
    cluster.tell(GraphArrived(tuple(tasks), frozenset()))
    assert {task.key: task.priority for task in tasks} == {
        "a": (0, 1, 3),
        "b": (0, 1, 1),  # not ranked: keeps its place
        "c": (0, 1, 0),
        "d": (0, 1, 2),
    }


def test_static_is_round_robin_by_index() -> None:
    cluster = Cluster(make_policy("static"), workers=3)
    assert cluster.ready(cluster.task(i) for i in range(5)) == ["w0", "w1", "w2", "w0", "w1"]


def test_random_draws_from_its_seed() -> None:
    def draws(seed: int) -> list[str]:
        cluster = Cluster(make_policy("random", seed=seed))
        return cluster.ready(cluster.task(i) for i in range(50))

    assert draws(1) == draws(1) != draws(2)
    assert min(Counter(draws(1)).values()) >= 5


# Stealing


def steals(instructions: list[Instruction]) -> list[object]:
    assert all(isinstance(i, StealTask) for i in instructions)
    return [i.key for i in instructions]


def test_an_idle_worker_takes_half_of_the_surplus_by_time() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, 0.1) for i in range(9)))
    taken = steals(cluster.tell(WorkerIdle("w1")))
    assert len(taken) == 4
    assert cluster.view.workers["w0"].backlog_s == pytest.approx(0.5)


def test_the_task_due_last_moves_first() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, 0.1) for i in range(4)))
    assert steals(cluster.tell(WorkerIdle("w1")))[0] == 3


def test_the_cheapest_to_move_moves_first() -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("runs", 1.0), cluster.task("light", 0.5))
    cluster.put("w0", cluster.task("heavy", 0.5, held={"w0": 10**7}, input_bytes=10**7))
    assert steals(cluster.tell(WorkerIdle("w1")))[0] == "light"


def test_what_is_short_waits_rather_than_moves() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, 0.001) for i in range(3)))
    assert cluster.tell(WorkerIdle("w1")) == []


def test_transfer_longer_than_the_wait_forbids_a_steal() -> None:
    cluster = ferroflow()
    big = {"held": {"w0": 10**9}, "input_bytes": 10**9}
    cluster.put("w0", *(cluster.task(i, 1.0, **big) for i in range(4)))
    assert cluster.tell(WorkerIdle("w1")) == []


def test_a_short_task_behind_one_that_overruns_is_taken() -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("longer than thought", 0.001), cluster.task("stuck", 0.001))
    assert cluster.tell(WorkerIdle("w1")) == []
    cluster.now = 0.5
    assert steals(cluster.tell(WorkerIdle("w1"))) == ["stuck"]


def test_work_does_not_go_back_and_forth() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, 0.1) for i in range(9)))
    cluster.tell(WorkerIdle("w1"))
    assert cluster.tell(WorkerIdle("w0")) == []
    assert cluster.tell(WorkerIdle("w1")) == []


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"allowed": frozenset({"w0", "w2"})}, "restricted to other workers"),
        ({"is_movable": False}, "started or an actor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_some_tasks_are_never_stolen(more: dict[str, object], what: str) -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, 0.5, **more) for i in range(5)))
    assert cluster.tell(WorkerIdle("w1")) == [], what


def test_a_victim_needs_as_many_waiting_tasks_as_the_threshold_says() -> None:
    cluster = ferroflow(threshold=4)
    cluster.put("w0", *(cluster.task(i, 0.5) for i in range(4)))
    assert cluster.tell(WorkerIdle("w1")) == []
    cluster.put("w0", cluster.task("one more", 0.5))
    assert steals(cluster.tell(WorkerIdle("w1"))) != []


def test_a_worker_that_left_is_neither_victim_nor_candidate() -> None:
    cluster = ferroflow(threshold=1)
    cluster.put("w0", *(cluster.task(i, 0.5) for i in range(4)))
    cluster.view.remove_worker("w0")
    cluster.tell(WorkerLeft("w0"))
    assert cluster.tell(WorkerIdle("w1")) == []
    assert "w0" not in cluster.ready(cluster.task(10 + i) for i in range(8))


# The adaptive threshold


def record(threshold: AdaptiveThreshold, *outcomes: bool, workers: int = 32) -> int:
    for outcome in outcomes:
        threshold.record(outcome, workers)
    return threshold.value


def test_refusals_raise_the_threshold_up_to_a_quarter_of_the_workers() -> None:
    assert record(AdaptiveThreshold(), *[False] * 10) == 3
    assert record(AdaptiveThreshold(), *[False] * 200) == 8


def test_success_brings_the_threshold_back_down() -> None:
    threshold = AdaptiveThreshold()
    raised = record(threshold, *[False] * 20)
    assert record(threshold, *[True] * 60) < raised
    assert record(threshold, *[True] * 60) == 1


def test_a_fixed_threshold_stays() -> None:
    assert record(AdaptiveThreshold(2, adaptive=False), *[False] * 50) == 2


def test_the_policy_learns_from_refusals_and_starts_afresh_with_a_graph() -> None:
    cluster = ferroflow()
    for _ in range(10):
        cluster.tell(StealRefused("k", "w0", "w1"))
    policy = cluster.policy
    assert policy.threshold_of("w1").value == 3  # type: ignore[attr-defined]
    assert policy.threshold_of("w2").value == 1  # type: ignore[attr-defined]
    cluster.tell(StealConfirmed("k", "w0", "gone"))  # a thief that left meanwhile
    cluster.tell(GraphArrived((), frozenset()))
    assert policy.threshold_of("w1").value == 1  # type: ignore[attr-defined]


# The view


def test_loads_are_exact_again_when_a_queue_is_empty() -> None:
    cluster = ferroflow(threshold=1)
    tasks = [cluster.task(i, 0.1) for i in range(7)]
    cluster.put("w0", *tasks)
    for task in tasks:
        cluster.view.finish(task.key, 1.0)
    assert cluster.view.workers["w0"].backlog_s == 0.0
    assert set(cluster.view.first_idle(9)) == {"w0", "w1", "w2", "w3"}
    assert not cluster.view.has_crowded


def test_threads_count_as_free_places() -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=1, nthreads=3)
    cluster.put("w0", *(cluster.task(i) for i in range(3)))
    assert not cluster.view.has_crowded
    assert cluster.view.first_idle(9) == []
    cluster.put("w0", cluster.task("fourth"))
    assert [worker.key for worker in cluster.view.crowded_from_most_loaded()] == ["w0"]
    assert [task.key for task in cluster.view.workers["w0"].waiting_from_last()] == ["fourth"]


# Making one


def test_an_unknown_policy_lists_the_known() -> None:
    with pytest.raises(
        UnknownNameError, match="unknown policy 'greedy'; choose one of: ferroflow, random, ring, static"
    ):
        make_policy("greedy")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("static", {"threshold": 2}, "policy 'static' does not take the option 'threshold'; it takes: none"),
        ("ferroflow", {"threshold": 0}, "threshold is 0; it must be a whole number"),
        ("ferroflow", {"threshold": "x"}, "threshold is 'x'"),
    ],
)
def test_options_of_another_policy_are_refused(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_policy(name, **options)


# Reasons


@pytest.mark.parametrize(
    ("costs", "more", "threshold", "reason"),
    [
        ([0.001, 0.001], {}, 1, "the victim is done in 0.002 s; a steal takes 0.003 s"),
        ([1.0, 1.0], {}, 2, "1 tasks wait there; the threshold is 2"),
        ([1e-4] * 100, {}, 1, "no task there may move here, and is long enough"),
        ([1.0, 1.0], {"is_movable": False}, 1, "no task there may move here, and is long enough"),
        (
            [1.0, 1.0],
            {"held": {"w0": 10**9}, "input_bytes": 10**9},
            1,
            "would end in 11.02 s instead of 2 s, for data that take 10.01 s",
        ),
    ],
    ids=["too soon", "below the threshold", "too short", "nothing may move", "too much data"],
)
def test_a_declined_steal_has_a_reason(
    costs: list[float], more: dict[str, object], threshold: int, reason: str
) -> None:
    cluster = Cluster(make_policy("ferroflow", threshold=threshold), workers=2)
    cluster.put("w0", *(cluster.task(i, cost, **more) for i, cost in enumerate(costs)))
    assert cluster.tell(WorkerIdle("w1")) == []
    (declined,) = cluster.declined
    assert (declined.key, declined.victim, declined.thief) == (len(costs) - 1, "w0", "w1")
    assert declined.reason == reason


@pytest.mark.parametrize(
    ("queued", "held", "reason"),
    [
        ([], {}, "finishes in 0.2 s (queue 0, transfer 0, run 0.2), first of 1"),
        (
            [0.3, 0.4],
            {"w1": 10**6},
            "finishes in 0.523 s (queue 0.3, transfer 0.023, run 0.2), first of 2; next best w1 in 0.6 s",
        ),
        (
            [0.3, 0.31],
            {"w1": 10**6},
            "finishes in 0.51 s (queue 0.31, transfer 0, run 0.2), first of 2; next best w0 in 0.523 s",
        ),
    ],
    ids=["the only one", "though the input is elsewhere", "as it holds the input"],
)
def test_a_placement_tells_what_was_considered(
    queued: list[float], held: dict[str, int], reason: str
) -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=2)
    for i, cost_s in enumerate(queued):
        cluster.put(f"w{i}", cluster.task(("before", i), cost_s))
    more = {"held": held, "input_bytes": sum(held.values()), "is_guess": not held}
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
    assert cluster.declined[-1].reason == "would end in 4.003 s instead of 2 s"


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
    cluster.tell(GraphArrived(tuple(tasks), frozenset()))
    in_order = [task.key for task in sorted(tasks, key=lambda task: task.priority)]
    assert in_order == [(branch, step) for branch in (1, 2, 0) for step in range(3)] + ["join"]


# ferroflow's own rule


def test_the_ring_takes_one_task_from_the_next_worker_that_has_some() -> None:
    cluster = Cluster(make_policy("ring"))
    cluster.put("w0", *(cluster.task(("a", i)) for i in range(4)))
    cluster.put("w2", *(cluster.task(("c", i)) for i in range(4)))
    assert [(s.victim, s.key) for s in cluster.tell(WorkerIdle("w1"))] == [("w2", ("c", 3))]
    assert [(s.victim, s.key) for s in cluster.tell(WorkerIdle("w3"))] == [("w0", ("a", 3))]


def test_the_rings_threshold_is_a_ratchet() -> None:
    cluster = Cluster(make_policy("ring"))
    for _ in range(10):  # nothing to steal, as at the end of a run
        assert cluster.tell(WorkerIdle("w1")) == []
    cluster.put("w0", *(cluster.task(i) for i in range(3)))
    assert cluster.tell(WorkerIdle("w1")) == []
    assert cluster.declined[-1].reason == "no worker has more than 3 tasks waiting that may move"
    cluster.put("w0", *(cluster.task(i) for i in range(10, 15)))
    assert len(cluster.tell(WorkerIdle("w1"))) == 1


@pytest.mark.parametrize(("now", "n"), [(0.02, 0), (0.2, 3)], ids=["a little late", "stuck"])
def test_even_short_tasks_leave_a_worker_that_is_stuck(now: float, n: int) -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, 1e-5) for i in range(4)))
    cluster.now = now
    assert len(cluster.tell(WorkerIdle("w1"))) == n


def test_of_equal_priorities_the_last_that_was_sent_is_due_first() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, priority=(0, 1, 0)) for i in range(4)))
    assert [task.key for task in cluster.view.workers["w0"].queue] == [0, 3, 2, 1]  # the first has started
    assert [s.key for s in cluster.tell(WorkerIdle("w1"))] == [1]
    cluster.view.finish(0, cluster.now)
    assert [task.key for task in cluster.view.workers["w0"].queue if task.has_started] == [3]


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
