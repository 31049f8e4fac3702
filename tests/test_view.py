"""The view of a cluster: which tasks of a worker have started, whatever was expected."""

from __future__ import annotations

import pytest

from ferroflow_dask.policy import ClusterView, TaskView
from ferroflow_dask.policy.threshold import AdaptiveThreshold


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


def test_a_threshold_that_keeps_a_thief_from_trying_comes_back_down_but_not_below_what_was_asked() -> None:
    for initial in (1, 2):
        threshold = AdaptiveThreshold(initial)
        for _ in range(20):
            threshold.record(succeeded=False, n_workers=4)
        assert threshold.value == 4
        for _ in range(20):
            threshold.held_back()
        assert threshold.value == initial


def test_what_is_learned_of_transfers_is_how_long_all_of_them_take() -> None:
    view = cluster(1, "running")
    view.bandwidth = 1e8
    tasks = [lacking("small", 10**3), *(lacking(i, 10**8) for i in range(3))]
    for task in tasks:
        view.assign(task, "w", 0.0)
    view.set_incoming("w", 0)
    small_s, large_s, *_ = foreseen_s = [view.transfer_s(task, "w") for task in tasks]
    for _ in range(100):  # the small one late by itself, the three large ones in one go, told for the last
        for task, seconds in zip(tasks, (20 * small_s, 0.0, 0.0, 3 * large_s), strict=True):
            view.observe_transfer(task.key, seconds)
    assert [view.transfer_s(task, "w") for task in tasks] == pytest.approx(foreseen_s, rel=0.6)
    for _ in range(100):
        for task, expected in zip(tasks, foreseen_s, strict=True):
            view.observe_transfer(task.key, 3 * expected)
    assert view.transfer_s(tasks[-1], "w") == pytest.approx(3 * large_s, rel=0.01)


def lacking(key: object, nbytes: int) -> TaskView:
    held = {"held": {"elsewhere": nbytes}, "n_held": {"elsewhere": 1}}
    return TaskView(key, 1.0, (0,), input_bytes=nbytes, n_inputs=1, **held)


def test_what_is_assigned_adds_to_what_comes_until_that_is_told_anew() -> None:
    view = cluster(1)
    view.assign(lacking("a", 10**8), "w", 0.0)
    view.assign(lacking("b", 10**8), "w", 0.0)
    assert view.workers["w"].incoming_nbytes == 2 * 10**8
    view.set_incoming("w", 10**6)
    assert view.workers["w"].incoming_nbytes == 10**6
