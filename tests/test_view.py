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


def test_a_fetch_for_several_tasks_makes_transfers_no_slower() -> None:
    view = cluster(1, "running")
    view.bandwidth = 1e8
    four = [
        TaskView(
            i, 1.0, (i,), held={"elsewhere": 10**8}, n_held={"elsewhere": 1}, input_bytes=10**8, n_inputs=1
        )
        for i in range(4)
    ]
    for task in four:
        view.assign(task, "w", 0.0)
    foreseen_s = view.transfer_s(four[0], "w")
    for _ in range(100):
        for task in four:  # told for the first of them
            view.observe_transfer(task.key, 4 * foreseen_s if task is four[0] else 0.0)
    assert view.transfer_s(four[0], "w") == pytest.approx(foreseen_s, rel=0.2)
    for _ in range(100):
        for task in four:
            view.observe_transfer(task.key, 3 * foreseen_s)
    assert view.transfer_s(four[0], "w") == pytest.approx(3 * foreseen_s, rel=0.01)
