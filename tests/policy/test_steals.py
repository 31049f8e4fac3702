"""What an idle worker finds, takes and leaves, and how the threshold follows from that."""

from __future__ import annotations

from typing import Any

import pytest
from pure_policy import Cluster, ferroflow, steals

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.policy import make_policy
from ferroflow_dask.policy.baselines import AdaptiveThreshold
from ferroflow_dask.policy.events import StealRefused, WorkerIdle, WorkerLeft
from ferroflow_dask.policy.instructions import in_words


def test_an_idle_worker_takes_half_of_the_surplus_by_time() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, 0.1) for i in range(9)))
    taken = steals(cluster.tell(WorkerIdle("w1")))
    assert taken == [8, 7, 6, 5]  # those due last
    assert cluster.view.workers["w0"].backlog_s == pytest.approx(0.5)


def test_the_cheapest_to_move_moves_first() -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("runs", 1.0), cluster.task("light", 0.5))
    cluster.put("w0", cluster.task("heavy", 0.5, held={"w0": 10**7}, input_bytes=10**7))
    assert steals(cluster.tell(WorkerIdle("w1")))[0] == "light"


@pytest.mark.parametrize(
    ("cost_s", "now_s", "taken"),
    [
        pytest.param(1e-3, 0.0, [], id="none before the first task overruns"),
        pytest.param(1e-3, 0.02, ["waits"], id="tasks of 1 ms after 20 ms"),
        pytest.param(1e-4, 0.05, [], id="no tasks of 0.1 ms after 50 ms"),
        pytest.param(1e-4, 0.06, ["waits"], id="tasks of 0.1 ms after 60 ms"),
    ],
)
def test_tasks_leave_a_worker_whose_first_task_overruns(
    cost_s: float, now_s: float, taken: list[str]
) -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("longer than thought", cost_s), cluster.task("waits", cost_s))
    cluster.now = now_s
    assert steals(cluster.tell(WorkerIdle("w1"))) == taken


def test_an_overrun_that_messages_explain_is_none() -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("runs", 0.001), cluster.task("waits", 0.0018))
    cluster.now = 0.0015
    assert cluster.tell(WorkerIdle("w1")) == []
    assert in_words(cluster.declined[-1].reason) == "the victim is done in 0.0028 s; a steal takes 0.003 s"


def test_work_does_not_go_back_and_forth() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, 0.1) for i in range(9)))
    cluster.tell(WorkerIdle("w1"))
    assert cluster.tell(WorkerIdle("w0")) == []
    assert cluster.tell(WorkerIdle("w1")) == []


def test_a_worker_that_left_is_neither_victim_nor_candidate() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, 0.5) for i in range(4)))
    cluster.view.remove_worker("w0")
    cluster.tell(WorkerLeft("w0"))
    assert cluster.tell(WorkerIdle("w1")) == []
    assert "w0" not in cluster.ready(cluster.task(10 + i) for i in range(8))


def test_idle_workers_share_what_is_moved_at_a_time() -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=49)
    cluster.put("w0", *(cluster.task(i, 1.0) for i in range(200)))
    assert len(steals(cluster.tell(WorkerIdle("w1")))) == 2  # 96 for 48 of them
    few = Cluster(make_policy("ferroflow"), workers=3)
    few.put("w0", *(few.task(i, 1.0) for i in range(200)))
    assert len(steals(few.tell(WorkerIdle("w1")))) == 48


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


# What idle workers find, and who looks first


def test_work_is_found_behind_workers_that_have_none_to_give() -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=8)
    for i in range(6):
        pinned = (cluster.task((i, j), 10.0, allowed=frozenset({f"w{i}"})) for j in range(9))
        cluster.put(f"w{i}", *pinned)
    cluster.put("w6", cluster.task("runs", 1.0), cluster.task("free", 1.0))
    assert steals(cluster.tell(WorkerIdle("w7"))) == ["free"]


def test_work_is_found_behind_tasks_that_may_not_move() -> None:
    cluster = Cluster(make_policy("ferroflow"), workers=100)
    cluster.put("w0", cluster.task("runs", 1.0), cluster.task("free", 1.0))
    cluster.put("w0", *(cluster.task(i, 1.0, allowed=frozenset({"w0"})) for i in range(100)))
    assert steals(cluster.tell(WorkerIdle("w1"))) == ["free"]


def test_a_task_that_does_not_pay_hides_no_other() -> None:
    cluster = ferroflow()
    for name in ("w0", "w1"):
        cluster.view.set_kind(name, "gpu")
    quick_there = {"costs_s": {"cpu": 100.0, "gpu": 0.1}}
    as_quick_here = {"costs_s": {"cpu": 0.5, "gpu": 0.4}}
    cluster.put("w0", *(cluster.task(i, 0.4, **as_quick_here) for i in range(20)))
    cluster.put("w0", cluster.task("last", 0.1, **quick_there))
    taken = steals(cluster.tell(WorkerIdle("w2")))
    assert taken
    assert "last" not in taken


def test_who_becomes_idle_is_served_before_those_that_found_nothing() -> None:
    cluster = ferroflow()
    cluster.put("w0", cluster.task("a"))
    assert sorted(cluster.view.first_idle(9)) == ["w1", "w2", "w3"]
    cluster.view.finish("a", cluster.now)
    assert cluster.view.first_idle(9)[0] == "w0"
    cluster.put("w1", cluster.task("b"))
    cluster.view.to_end_of_idle("w0")
    assert cluster.view.first_idle(9)[-1] == "w0"


# The adaptive threshold


def record(threshold: AdaptiveThreshold, *outcomes: bool, workers: int = 32) -> int:
    for outcome in outcomes:
        threshold.record(outcome, workers)
    return threshold.value


@pytest.mark.parametrize(
    ("threshold", "outcomes", "value"),
    [
        pytest.param({}, [False] * 10, 3, id="refusals raise it"),
        pytest.param({}, [False] * 200, 8, id="up to a quarter of the workers"),
        pytest.param({"initial": 3}, [False] * 9, 3, id="after every ten attempts"),
        pytest.param({"initial": 3}, [True, False] * 5, 3, id="it stays between good and bad"),
        pytest.param({"initial": 2, "adaptive": False}, [False] * 50, 2, id="fixed"),
    ],
)
def test_threshold_follows_the_outcomes(threshold: dict[str, Any], outcomes: list[bool], value: int) -> None:
    assert record(AdaptiveThreshold(**threshold), *outcomes) == value


def test_threshold_after_success_comes_down() -> None:
    threshold = AdaptiveThreshold()
    raised = record(threshold, *[False] * 20)
    assert record(threshold, *[True] * 60) < raised
    assert record(threshold, *[True] * 60) == 1


@pytest.mark.parametrize(("options", "value"), [({}, 3), ({"threshold": 2}, 4), ({"adaptive": False}, 1)])
def test_ring_threshold_follows_its_options(options: dict[str, object], value: int) -> None:
    cluster = Cluster(make_policy("ring", **options))
    for _ in range(10):
        cluster.tell(StealRefused("k", "w0", "w1"))
    assert cluster.policy.gauges()["steal_threshold"][1] == value
    cluster.view.remove_worker("w1")
    cluster.tell(WorkerLeft("w1"))
    assert cluster.policy.gauges()["steal_threshold"][1] == options.get("threshold", 1)


@pytest.mark.parametrize("threshold", [0, 1.5, "2"])
def test_ring_with_a_bad_threshold_raises(threshold: object) -> None:
    with pytest.raises(UsageError, match=r"threshold must be an integer of at least 1 waiting task, got"):
        make_policy("ring", threshold=threshold)
