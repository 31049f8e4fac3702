"""Where policies place tasks, when they are ready and when their graph arrives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from policy_contract import CONTRACT, HELD, THERE, Make
from pure_policy import Cluster, ferroflow

from ferroflow_dask.policy import make_policy, policy_names
from ferroflow_dask.policy.events import GraphArrived


def test_a_task_stays_with_its_data_when_moving_costs_more_than_waiting() -> None:
    cluster = ferroflow()
    big = {"held": {"w0": 10**9}, "input_bytes": 10**9}  # 10 s of transfer
    assert cluster.ready(cluster.task(i, 1.0, **big) for i in range(4)) == ["w0"] * 4


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        pytest.param({}, "w0", id="data that take longer than a message"),
        pytest.param({"held": {"w0": 10**4}, "input_bytes": 10**4}, "w1", id="less data"),
        pytest.param({"has_cost": True}, "w1", id="a declared duration"),
        pytest.param({"held": {"w0": 10**7, "w1": 10**7}}, "w1", id="data on both"),
    ],
)
def test_data_go_to_a_busy_worker_if_that_gains_a_task(change: dict[str, Any], chosen: str) -> None:
    cluster = ferroflow()
    held = {"held": {"w0": 10**7}, "input_bytes": 10**7, **change}  # .1 s of transfer
    for worker, seconds in (("w0", 2.0), ("w1", 1.5), ("w2", 3.0), ("w3", 3.0)):
        cluster.put(worker, cluster.task(worker, seconds))
    assert cluster.ready([cluster.task("next", 1.0, **held)]) == [chosen]
    cluster.view.finish("w1", cluster.now)  # now it has a free thread
    assert cluster.ready([cluster.task("after", 1.0, **held)]) == ["w1"]


@pytest.mark.parametrize(
    ("queue_s", "change", "chosen"),
    [
        pytest.param(3.0, {}, "w0", id="it ends before the queue is empty"),
        pytest.param(2.9, {}, "w1", id="it ends later"),
        pytest.param(0.0, {}, "w1", id="no queue"),
        pytest.param(3.0, {"is_guess": True}, "w1", id="an unknown duration"),
        pytest.param(3.0, {"has_cost": True}, "w1", id="a declared duration"),
        pytest.param(3.0, {"input_bytes": 4 * 10**5, "held": {"w0": 4 * 10**5}}, "w1", id="few data"),
    ],
)
def test_a_task_waits_with_its_inputs_while_the_queue_keeps_the_others_busy(
    queue_s: float, change: dict[str, Any], chosen: str
) -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i) for i in range(2)))
    for worker in ("w2", "w3"):
        cluster.put(worker, cluster.task(worker))
    cluster.view.queue_s = queue_s
    held = {"held": {"w0": 10**6}, "input_bytes": 10**6, **change}  # .01 s of transfer
    assert cluster.ready([cluster.task("next", **held)]) == [chosen]


@pytest.mark.parametrize("state", ["paused", "short of memory"])
def test_a_holder_that_cannot_run_it_soon_keeps_no_task(state: str) -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("before"))
    if state == "paused":
        cluster.view.set_running("w0", False, cluster.now)
    else:
        cluster.view.set_short_of_memory("w0", True)
    cluster.view.queue_s = 8.0
    held = {"held": {"w0": 10**6}, "input_bytes": 10**6}
    assert cluster.ready([cluster.task("next", **held)]) == ["w1"]


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
    cluster.view.set_running("w3", False, cluster.now)
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
    if expected == "w0":
        cluster.view.set_running("w0", False, cluster.now)
        assert cluster.ready([cluster.task("paused", cost_s=1e-3)]) == ["w1"]


def test_among_equal_workers_a_restricted_task_goes_to_the_one_that_holds_less() -> None:
    cluster = ferroflow()
    cluster.view.workers["w1"].nbytes = 100
    cluster.view.workers["w3"].nbytes = 10
    assert cluster.ready([cluster.task("a", allowed=("w1", "w3"))]) == ["w3"]


def test_of_two_busy_workers_that_each_lack_half_of_the_inputs_the_one_that_ends_first() -> None:
    cluster = ferroflow()
    for worker in (*cluster.view.workers, *["w1"] * 10):
        task = cluster.task(len(cluster.tasks), cost_s=0.1)
        cluster.put(worker, task)
        cluster.view.observe(task.key, 0.2 if worker == "w1" else 0.1)
        cluster.view.finish(task.key, cluster.now)
    assert cluster.view.workers["w1"].speed == pytest.approx(0.5)
    for worker, cost_s in (("w0", 0.5), ("w1", 0.125), ("w2", 9.0), ("w3", 9.0)):
        cluster.put(worker, cluster.task(worker, cost_s))
    halves = {"held": {"w0": 100, "w1": 100}, "input_bytes": 200}
    # 0.5 + 0.2 against 0.25 + 0.4 s.
    assert cluster.ready([cluster.task("a", cost_s=0.2, **halves)]) == ["w1"]


def test_tasks_of_unknown_cost_are_left_for_when_they_are_ready() -> None:
    cluster = ferroflow()
    assert cluster.arrive([cluster.task("a")]) == []


def test_priorities_follow_the_upward_rank_within_the_places_of_the_ranked() -> None:
    cluster = ferroflow()
    tasks = [
        cluster.task(key, rank_s=rank) for key, rank in [("a", 1.0), ("b", None), ("c", 3.0), ("d", 2.0)]
    ]
    cluster.tell(GraphArrived(tuple(tasks)))
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


def test_tasks_with_one_small_input_are_spread() -> None:
    cluster = ferroflow()
    held = {"held": {"w0": 100}, "input_bytes": 100}
    assert Counter(cluster.ready(cluster.task(i, **held) for i in range(12))) == dict.fromkeys(
        ("w0", "w1", "w2", "w3"), 3
    )


# What every policy keeps to, whoever wrote it


@pytest.mark.parametrize("keeps", CONTRACT, ids=lambda keeps: keeps.__name__)
@pytest.mark.parametrize("name", policy_names())
def test_every_policy_keeps_the_contract(name: str, keeps: Callable[[Make], None]) -> None:
    keeps(lambda: make_policy(name))


@pytest.mark.parametrize("name", policy_names())
def test_our_policies_use_all_workers_that_they_may(name: str) -> None:
    cluster = Cluster(make_policy(name))
    assert set(cluster.ready(cluster.task(i, **THERE) for i in range(20))) == {"w1", "w3"}


@pytest.mark.parametrize("name", policy_names())
def test_our_policies_use_a_worker_that_was_paused(name: str) -> None:
    cluster = Cluster(make_policy(name), workers=3)
    cluster.view.set_running("w1", False, cluster.now)
    assert "w1" not in cluster.ready(cluster.task(i, **HELD) for i in range(20))
    cluster.view.set_running("w1", True, cluster.now)
    assert "w1" in cluster.ready(cluster.task(100 + i, **HELD) for i in range(20))


@pytest.mark.parametrize(
    ("short", "is_bundle", "chosen"),
    [
        pytest.param(
            ["w0"], True, "w1", id="a bundle goes where there is memory, though its data are elsewhere"
        ),
        pytest.param(["w0"], False, "w0", id="another task stays with its data: Dask can spill results"),
        pytest.param(["w0", "w1", "w2"], True, "w3", id="one worker has memory"),
        pytest.param(["w0", "w1", "w2", "w3"], True, "w0", id="no worker has memory"),
        pytest.param(["w1"], True, "w0", id="another worker is short of memory"),
    ],
)
def test_workers_that_are_short_of_memory_get_no_bundles(
    short: list[str], is_bundle: bool, chosen: str
) -> None:
    cluster = ferroflow()
    for worker in short:
        cluster.view.set_short_of_memory(worker, True)
    task = cluster.task("a", held={"w0": 10**9}, input_bytes=10**9, is_bundle=is_bundle)
    assert cluster.ready([task]) == [chosen]


def test_a_bundle_waits_for_a_worker_that_has_memory_and_goes_to_no_paused_one() -> None:
    cluster = ferroflow()
    for worker in ("w0", "w1", "w2"):
        cluster.view.set_short_of_memory(worker, True)
    cluster.put("w3", cluster.task("long", 9.0))
    assert cluster.ready([cluster.task("first", is_bundle=True)]) == ["w3"]
    cluster.view.set_running("w3", False, cluster.now)
    assert cluster.ready([cluster.task("second", is_bundle=True)]) == ["w0"]
    cluster.view.set_running("w3", True, cluster.now)
    cluster.view.set_short_of_memory("w1", False)
    assert cluster.ready([cluster.task("third", is_bundle=True)]) == ["w1"]
