"""What an idle worker takes, what it leaves, and how the threshold follows from that."""

from __future__ import annotations

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


# The adaptive threshold


def record(threshold: AdaptiveThreshold, *outcomes: bool, workers: int = 32) -> int:
    for outcome in outcomes:
        threshold.record(outcome, workers)
    return threshold.value


def test_refusals_raise_the_threshold_up_to_a_quarter_of_the_workers() -> None:
    assert record(AdaptiveThreshold(), *[False] * 10) == 3
    assert record(AdaptiveThreshold(), *[False] * 200) == 8


def test_threshold_is_considered_every_ten_attempts_and_stays_between_good_and_bad() -> None:
    threshold = AdaptiveThreshold(3)
    assert record(threshold, *[False] * 9) == 3
    assert record(AdaptiveThreshold(3), *[True, False] * 5) == 3


def test_a_fixed_threshold_stays() -> None:
    assert record(AdaptiveThreshold(2, adaptive=False), *[False] * 50) == 2


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
