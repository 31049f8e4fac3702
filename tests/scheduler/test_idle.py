"""Which idle workers look for work, in which order, and when they are let be for a moment."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ferroflow_dask.policy import ClusterView, TaskView
from ferroflow_dask.scheduler.idle_workers import IdleWorkers

A, B, C, D = "abcd"


def served(
    idle: str, steal_for: Callable[[str], bool], queued: bool = False, may_steal: bool = True
) -> tuple[IdleWorkers, ClusterView, list[str]]:
    """Return who serves idle workers, of which the first comes first, beside one that is crowded."""
    view, again = ClusterView(), []
    for worker in ("crowded", *reversed(idle)):
        view.add_worker(worker, 1)
    for i in range(3):
        view.assign(TaskView(i, 1.0, (i,)), "crowded", 0.0)
    scheduler: Any = SimpleNamespace(queued=queued)
    return (
        IdleWorkers(scheduler, view, steal_for, lambda: may_steal, lambda: again.append("again")),
        view,
        again,
    )


def never(_: str) -> bool:
    return False


def test_those_that_find_nothing_let_others_come_first_and_two_of_them_end_a_turn() -> None:
    asked: list[str] = []
    idle, view, again = served("abcd", lambda worker: asked.append(worker) or False)
    assert view.first_idle(9) == [A, B, C, D]
    idle.serve()
    assert asked == [A, B]
    assert view.first_idle(9) == [C, D, A, B]
    idle.serve()
    assert asked == [A, B, C, D]
    assert not again


def test_after_a_turn_in_which_all_found_work_there_is_another() -> None:
    idle, _, again = served("ab", lambda _: True)
    idle.serve()
    assert again == ["again"]


def test_after_a_turn_in_which_one_found_nothing_there_is_none() -> None:
    idle, _, again = served("ab", lambda worker: worker == A)
    idle.serve()
    assert not again


@pytest.mark.parametrize(
    ("hopeless", "n"),
    [({}, 2), ({"queued": True}, 0), ({"may_steal": False}, 0)],
    ids=["hope", "the scheduler has a queue", "stealing is off"],
)
def test_there_is_hope_where_idle_workers_may_steal(hopeless: dict[str, bool], n: int) -> None:
    idle, _, _ = served("ab", never, **hopeless)
    assert idle.n_hopeful() == n
