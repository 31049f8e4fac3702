"""The view of a cluster: started tasks, transfers and speeds, and its consistency after random changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ferroflow_dask.policy import ClusterView, TaskView


def cluster(nthreads: int, *keys: str) -> ClusterView:
    view = ClusterView()
    view.add_worker("w", nthreads)
    for i, key in enumerate(keys):
        view.assign(TaskView(key, 1.0, (i,)), "w", 0.0)
    return view


def started(view: ClusterView) -> list[str]:
    return [task.key for task in view.workers["w"].queue if task.has_started]


def test_what_has_started_after_all_has_the_thread_of_what_was_sent_last() -> None:
    view = cluster(2, "a", "b", "c")
    assert started(view) == ["a", "b"]
    view.set_started("c")
    assert started(view) == ["a", "c"]
    assert [task.key for task in view.workers["w"].waiting_from_last()] == ["b"]
    assert view.workers["w"].backlog_s == 3


def test_what_runs_already_takes_no_other_thread() -> None:
    view = cluster(2, "a")
    view.assign(TaskView("b", 1.0, (1,)), "w", 0.0)
    for key in ("a", "b", "gone"):
        view.set_started(key)
    assert started(view) == ["a", "b"]


def test_the_next_one_starts_when_one_ends() -> None:
    view = cluster(1, "a", "b", "c")
    view.set_started("c")
    view.finish("c", 1.0)
    assert started(view) == ["a"]


def test_what_another_worker_of_the_host_has_comes_at_the_bandwidth_within_hosts() -> None:
    view = on_hosts(["a", "a", "b"])
    view.bandwidth, view.host_bandwidth = 1e6, 1e9
    near = {"a": 10**6}
    task = lacking("task", 10**6, "w0", near)
    within_s, between_s = (view.transfer_s(task, worker) for worker in ("w1", "w2"))
    assert between_s - within_s == pytest.approx(1.0, rel=0.01)
    # What comes after it waits for as long as it takes from where it comes.
    for worker, sent_s in (("w1", 0.001), ("w2", 1.0)):
        view.assign(lacking(worker, 10**6, "w0", near), worker, 0.0)
        view.release(worker)
        assert view.transfer_s(task, worker) - (within_s if worker == "w1" else between_s) == pytest.approx(
            sent_s
        )
    some = {"held": {"w0": 3, "w2": 10}, "n_held": {"w0": 1, "w2": 2}, "near": {"a": 3, "b": 10}}
    task = TaskView("some", 1.0, (0,), input_bytes=12, n_inputs=2, **some)
    assert [task.missing_bytes(worker) for worker in ("w0", "w1", "w2")] == [9, 12, 2]
    assert [task.near_bytes(view.workers[worker]) for worker in ("w0", "w1", "w2")] == [0, 3, 0]


def test_a_host_stays_as_long_as_one_of_its_workers() -> None:
    view = on_hosts(["a", "a", "b"])
    view.remove_worker("w1")
    view.assign(TaskView("before", 1.0, (0,)), "w0", 0.0)
    near_a = lacking("task", 10**6, "w1", {"a": 10**6})
    assert next(iter(view.least_loaded_for(near_a))).key == "w0"
    view.remove_worker("w0")
    assert [worker.key for worker in view.least_loaded_for(near_a)] == ["w2"]


def on_hosts(hosts: list[str]) -> ClusterView:
    view = ClusterView()
    for i, host in enumerate(hosts):
        view.add_worker(f"w{i}", 1, "cpu", host)
    return view


def lacking(
    key: object, nbytes: int, holder: str = "elsewhere", near: dict[str, int] | None = None
) -> TaskView:
    held = {"held": {holder: nbytes}, "n_held": {holder: 1}}
    return TaskView(key, 1.0, (0,), input_bytes=nbytes, n_inputs=1, near=near, **held)


def test_what_is_assigned_adds_to_what_comes_until_that_is_told_anew() -> None:
    view = cluster(1)
    view.assign(lacking("a", 10**8), "w", 0.0)
    view.assign(lacking("b", 10**8), "w", 0.0)
    assert view.workers["w"].incoming_nbytes == 2 * 10**8
    view.set_incoming("w", 10**6)
    assert view.workers["w"].incoming_nbytes == 10**6


def test_an_overrun_is_told_by_the_speed_of_the_worker() -> None:
    view = cluster(1, "runs")
    worker = view.workers["w"]
    assert [worker.overrun_s(now) for now in (0.5, 1.5, 3.0)] == [0.0, 0.5, 2.0]
    worker.speed = 0.5  # which takes two seconds for it
    assert [worker.overrun_s(now) for now in (0.5, 1.5, 3.0)] == [0.0, 0.0, 1.0]
    view.finish("runs", 3.0)
    assert worker.overrun_s(9.0) == 0.0


def run_on(view: ClusterView, worker: str, seconds: float, n: int = 1, **more: bool) -> None:
    """Let a worker run tasks of one expected second."""
    for i in range(n):
        task = TaskView((worker, i), 1.0, (0,), **more)
        view.assign(task, worker, 0.0)
        view.observe(task.key, seconds)
        view.finish(task.key, 0.0)


def where_others_are_usual() -> ClusterView:
    """Return a view of `w0`, of which nothing is known, and of three workers that take what is expected."""
    view = on_hosts(["a"] * 4)
    for name in ("w1", "w2", "w3"):
        run_on(view, name, 1.0, n=7)
    return view


def test_a_worker_that_comes_back_is_not_known_to_be_slow() -> None:
    view = where_others_are_usual()
    run_on(view, "w0", 4.0, n=7)
    assert view.workers["w0"].speed == 0.25
    view.remove_worker("w0")
    view.add_worker("w0", 1, "cpu", "a")
    for _ in range(3):
        run_on(view, "w0", 1.0)
        assert view.workers["w0"].speed == 1.0


def test_observe_of_other_workers_updates_a_slow_worker_without_tasks() -> None:
    view = where_others_are_usual()
    run_on(view, "w0", 4.0, n=7)
    assert view.workers["w0"].speed == 0.25
    for _ in range(7):  # all tasks take as long now, and w0 gets none of them
        for name in ("w1", "w2", "w3"):
            run_on(view, name, 4.0)
    assert view.workers["w0"].speed == 1.0


# Any changes


def assert_consistent(view: ClusterView) -> None:
    workers = view.workers.values()
    idle = sorted(worker.key for worker in workers if worker.is_running and worker.has_free_thread)
    assert (view.n_idle, sorted(view.first_idle(99))) == (len(idle), idle)
    crowded = list(view.crowded_from_most_loaded())
    assert {worker.key for worker in crowded} == {worker.key for worker in workers if worker.n_waiting}
    assert view.n_crowded == len(crowded)
    assert [worker.load for worker in crowded] == sorted((one.load for one in crowded), reverse=True)
    for worker in workers:
        orders = [(not task.has_started, task.priority, -task.sent) for task in worker.queue]
        assert worker.queue._orders == orders == sorted(orders)
        assert worker.n_waiting == len(list(worker.waiting_from_last()))
        assert worker.known_to_run <= {task.key for task in worker.queue}
        assert worker.n_starting == (worker.nthreads if worker.is_running else len(worker.known_to_run))
        n_started = sum(task.has_started for task in worker.queue)
        assert not worker.is_running or n_started == min(worker.nthreads, len(worker.queue))
        assert all(view.assigned[task.key] == (task, worker) for task in worker.queue)
    assert len(view.assigned) == sum(len(worker.queue) for worker in workers)


def change(view: ClusterView, rng: random.Random, n: int, now: float) -> Any:
    """Change something in a view; the number is that of no other change."""
    workers, tasks = list(view.workers), list(view.assigned)
    what = rng.choice(
        ["join", "leave", "assign", "assign", "finish", "release", "move", "run", "start", "order"]
    )
    if what == "join" or len(workers) < 2:
        return view.add_worker(f"w{n}", rng.randint(1, 3), host=rng.choice("ab"))
    worker = rng.choice(workers)
    if what == "leave" and len(workers) > 5:
        return view.remove_worker(worker)
    if what == "run":
        return view.set_running(worker, rng.random() < 0.5, now)
    if what == "assign" or not tasks:
        priority = (rng.randrange(3), rng.randrange(4), n)
        return view.assign(TaskView(n, rng.random(), priority, n_steps=rng.choice((0, 3))), worker, now)
    key = rng.choice(tasks)
    if what == "move":
        return view.assign(view.assigned[key][0], worker, now)
    if what == "order":
        return view.set_priority(view.assigned[key][0], (rng.randrange(3), rng.randrange(4), n))
    if what == "start":
        return view.set_started(key)
    return view.finish(key, now) if what == "finish" else view.release(key)


@pytest.mark.parametrize("seed", range(50))
def test_any_changes_leave_a_view_consistent(seed: int) -> None:
    rng, view, now = random.Random(seed), ClusterView(), 0.0
    for n in range(300):
        now += rng.random()
        change(view, rng, n, now)
        assert_consistent(view)


def test_a_pause_does_not_make_a_late_task_look_early() -> None:
    view = ClusterView()
    view.add_worker("w", 1)
    for key in ("runs", "waits"):
        view.assign(TaskView(key, 0.1, (key,)), "w", 0.0)
    worker, found = view.workers["w"], []
    for now, is_running in ((10.0, True), (10.1, False), (10.2, True)):
        view.set_running("w", is_running, now)
        found.append(worker.overrun_s(now))
    assert found == pytest.approx([9.9, 10.0, 10.1])
    assert view.assigned["runs"][0].started_at == 0
