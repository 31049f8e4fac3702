"""What idle workers find: behind work that they may not take, on slow clusters, and who looks first."""

from __future__ import annotations

import pytest
from pure_policy import Cluster, ferroflow, steals

from ferroflow_dask.policy import make_policy
from ferroflow_dask.policy.events import WorkerIdle


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


def test_a_threshold_that_holds_back_comes_down_beside_work_that_may_not_move() -> None:
    cluster = ferroflow(threshold=1)
    cluster.put("w0", *(cluster.task(i, 9.0, allowed=frozenset({"w0"})) for i in range(9)))
    cluster.put("w1", cluster.task("runs", 1.0), cluster.task("free", 1.0))
    threshold = cluster.policy.threshold_of("w2")  # type: ignore[attr-defined]
    for _ in range(20):
        threshold.record(False, 32)
    raised = threshold.value
    for _ in range(2 * raised):
        cluster.tell(WorkerIdle("w2"))
    assert threshold.value < raised


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
    n = cluster.view.n_chances
    cluster.view.finish("a", cluster.now)
    assert cluster.view.first_idle(9)[0] == "w0"
    assert cluster.view.n_chances == n + 1
    cluster.put("w1", cluster.task("b"))
    assert cluster.view.n_chances == n + 1
    cluster.put("w1", cluster.task("c"))  # which waits there
    assert cluster.view.n_chances == n + 2
    cluster.view.to_end_of_idle("w0")
    assert cluster.view.first_idle(9)[-1] == "w0"


def answered(cluster: Cluster, after_s: float, times: int = 20) -> None:
    """Let requests be answered so late."""
    for i in range(times):
        task = cluster.task(("asked", i), 0.0)
        task.asked_at = cluster.now
        cluster.put("w3", task)
        cluster.now += after_s
        cluster.view.observe_answer(task.key, cluster.now)
        cluster.view.finish(task.key, cluster.now)


def test_where_answers_are_late_a_steal_has_to_win_more() -> None:
    cluster = ferroflow()
    assert cluster.view.steal_s(cluster.now) == pytest.approx(3e-3)  # three messages of a millisecond
    answered(cluster, 0.002)
    assert cluster.view.steal_s(cluster.now) == pytest.approx(3e-3)
    answered(cluster, 0.03)
    assert cluster.view.steal_s(cluster.now) == pytest.approx(0.045, rel=0.1)
    cluster.put("w0", *(cluster.task(i, 0.01) for i in range(4)))
    assert cluster.tell(WorkerIdle("w1")) == []
    cluster.now += 10.0  # what makes steals rare is forgotten
    cluster.view.finish(0, cluster.now)
    assert cluster.view.steal_s(cluster.now) == pytest.approx(3e-3, rel=0.1)
    assert steals(cluster.tell(WorkerIdle("w1"))) != []


def test_an_answer_counts_for_so_much_at_most_and_clocks_may_be_set_back() -> None:
    cluster = ferroflow()
    answered(cluster, 60.0)
    most_s = cluster.view.steal_s(cluster.now)
    assert most_s < 0.06
    cluster.now -= 1e6
    assert cluster.view.steal_s(cluster.now) == most_s


def test_silence_no_longer_than_that_of_messages_is_no_overrun() -> None:
    cluster = ferroflow()
    answered(cluster, 0.03)
    cluster.put("w0", *(cluster.task(i, 0.002) for i in range(9)))
    cluster.now += 0.1
    assert cluster.tell(WorkerIdle("w1")) == []
    cluster.now += 0.2
    assert steals(cluster.tell(WorkerIdle("w1"))) != []


def test_of_what_is_too_short_no_more_is_taken_than_is_held_up() -> None:
    cluster = ferroflow()
    cluster.put("w0", *(cluster.task(i, 1e-4) for i in range(200)))
    cluster.now = 0.035
    assert 1 <= len(steals(cluster.tell(WorkerIdle("w1")))) <= 12
