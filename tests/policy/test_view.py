"""The view of a cluster: which tasks of a worker have started, whatever was expected."""

from __future__ import annotations

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
