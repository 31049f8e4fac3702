"""The view after any changes: its counts and orders are those that its queues have."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ferroflow_dask.policy import ClusterView, TaskView


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
