"""Idle workers: who looks for work and in which order; passes over them after events and by the clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.stealing import WorkStealing

from ferroflow_dask.policy import ClusterView, TaskView
from ferroflow_dask.scheduler.changes import Guard
from ferroflow_dask.scheduler.hooks import Hooks
from ferroflow_dask.scheduler.idle_workers import IdleWorkers
from ferroflow_dask.scheduler.passes import Passes
from ferroflow_dask.virtual.clock import VirtualLoop, VirtualTime

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
    counts = {"asked": 0}

    def worker_idle(address: str) -> None:
        counts["asked"] += steal_for(address)

    scheduler = SimpleNamespace(queued=queued, periodic_callbacks={"stealing": None})
    passes = SimpleNamespace(ask=lambda: again.append("again"), run=None)
    core: Any = SimpleNamespace(
        scheduler=scheduler, view=view, clock=None, guard=Guard(lambda: None), hooks=Hooks(), passes=passes
    )
    placement: Any = SimpleNamespace(worker_idle=worker_idle)
    steals: Any = SimpleNamespace(counts=counts)
    dividing: Any = SimpleNamespace(n_asked=0)
    stealing: Any = SimpleNamespace(replaced=WorkStealing if may_steal else None, _callback_time=0.1)
    return IdleWorkers(core, placement, steals, dividing, stealing), view, again


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


@pytest.mark.parametrize(("find_work", "turns"), [("ab", ["again"]), ("a", [])], ids=["all", "one"])
def test_there_is_another_turn_after_one_in_which_all_found_work(find_work: str, turns: list[str]) -> None:
    idle, _, again = served("ab", lambda worker: worker in find_work)
    idle.serve()
    assert again == turns


@pytest.mark.parametrize(
    ("hopeless", "n"),
    [({}, 2), ({"queued": True}, 0), ({"may_steal": False}, 0)],
    ids=["hope", "the scheduler has a queue", "stealing is off"],
)
def test_there_is_hope_where_idle_workers_may_steal(hopeless: dict[str, bool], n: int) -> None:
    idle, _, _ = served("ab", never, **hopeless)
    assert idle.n_hopeful() == n


# Passes


class Looking:
    """Passes on a virtual loop, and the times at which they ran."""

    def __init__(self, n_hopeful: int) -> None:
        self.time, self.at = VirtualTime(), []
        self.n_hopeful = n_hopeful
        loop: Any = VirtualLoop(self.time)
        self.guard = Guard(lambda: None)
        self.passes = Passes(loop, self.guard)
        self.passes.run = self.run

    def run(self) -> int:
        self.at.append(self.time.now)
        return self.n_hopeful

    def until(self, when: float) -> list[float]:
        """Go on to a time; return when passes ran since the last call."""
        self.at.clear()
        self.time.run(when, 0.0, 10_000)
        return [pytest.approx(at) for at in self.at]


def test_passes_without_hope_run_once_for_all_events_of_an_instant() -> None:
    looking = Looking(0)
    for _ in range(3):
        looking.passes.ask()
    assert looking.at == []
    assert looking.until(10.0) == [0.0]
    looking.passes.ask()
    assert looking.until(20.0) == [10.0]


def test_passes_with_hope_run_by_the_clock_until_it_ends() -> None:
    looking = Looking(1)
    looking.passes.ask()
    assert looking.until(0.05) == [0.0, 0.02, 0.04]
    looking.n_hopeful = 0
    assert looking.until(10.0) == [0.06]


def test_an_event_does_not_put_off_the_next_pass_by_the_clock() -> None:
    looking = Looking(1)
    looking.passes.ask()
    assert looking.until(0.01) == [0.0]
    looking.passes.ask()
    assert looking.until(0.03) == [0.01, 0.02]


def test_close_ends_all_passes() -> None:
    looking = Looking(1)
    looking.passes.ask()
    assert looking.until(0.01) == [0.0]
    looking.guard.is_closed = True
    looking.passes.ask()
    assert looking.until(10.0) == []
