"""What idle workers find: behind work that they may not take, on slow clusters, and who looks first."""

from __future__ import annotations

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
