"""When idle workers look for work: after events at once, and without any ever more rarely."""

from __future__ import annotations

from typing import Any

import pytest

from ferroflow_dask.scheduler.idle_workers import Passes
from ferroflow_dask.virtual.clock import VirtualLoop, VirtualTime


class Looking:
    """Passes on a virtual loop, and the times at which they ran."""

    def __init__(self, n_hopeful: int, n_fruitless: int | None = 1) -> None:
        self.time, self.at = VirtualTime(), []
        self.n_hopeful, self.n_fruitless = n_hopeful, n_fruitless
        loop: Any = VirtualLoop(self.time)
        self.passes = Passes(loop, self._run, lambda: self.n_hopeful, self.time)

    def _run(self) -> int | None:
        self.at.append(self.time.now)
        return self.n_fruitless

    def until(self, when: float) -> list[float]:
        """Go on to a time; return when passes ran since the last call."""
        self.at.clear()
        self.time.run(when, 0.0, 10_000)
        return [pytest.approx(at) for at in self.at]


def test_a_pass_runs_once_for_all_who_ask_before_it() -> None:
    looking = Looking(0)
    for _ in range(3):
        looking.passes.ask()
    assert looking.at == []
    assert looking.until(10.0) == [0.0]


@pytest.mark.parametrize("nothing", [{"n_hopeful": 0}, {"n_hopeful": 1, "n_fruitless": None}], ids=str)
def test_without_hope_there_is_one_pass_for_an_event(nothing: dict[str, Any]) -> None:
    looking = Looking(**nothing)
    looking.passes.ask()
    assert looking.until(10.0) == [0.0]


def test_while_nothing_happens_looks_become_rare() -> None:
    looking = Looking(1)
    looking.passes.ask()
    gaps = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 0.64, 0.64]
    times = [sum(gaps[:n]) for n in range(len(gaps) + 1)]
    assert looking.until(times[-1] + 0.1) == times


def test_looks_stay_soon_until_each_idle_worker_had_its_turn() -> None:
    looking = Looking(4, n_fruitless=2)
    looking.passes.ask()
    assert looking.until(0.1) == [0.0, 0.01, 0.02, 0.04, 0.06, 0.1]


def test_after_an_event_looks_are_soon_again() -> None:
    looking = Looking(1)
    looking.passes.ask()
    looking.until(1.0)  # the next look would be at 1.27
    looking.passes.ask()
    assert looking.until(1.6) == [1.0, 1.01, 1.03, 1.07, 1.15, 1.31]


def test_events_do_not_put_off_a_look_that_is_due() -> None:
    looking = Looking(1)
    looking.passes.ask()
    looking.until(0.004)
    looking.passes.ask()
    assert looking.until(0.013) == [0.004, 0.01]


def test_looks_end_with_hope_and_when_closed() -> None:
    looking = Looking(1)
    looking.passes.ask()
    looking.until(0.005)
    looking.n_hopeful = 0
    assert looking.until(10.0) == [0.01]
    looking.n_hopeful = 1
    looking.passes.ask()
    looking.until(10.005)
    looking.passes.close()
    looking.passes.ask()
    assert looking.until(20.0) == []


@pytest.mark.parametrize(("held_up_s", "read_s"), [(0.005, 0.0), (0.05, 0.002)], ids=["little", "long"])
def test_a_look_that_was_held_up_long_waits_for_what_came_meanwhile(held_up_s: float, read_s: float) -> None:
    looking = Looking(1)
    looking.passes.ask()
    looking.until(0.009)
    looking.time.now = 0.01 + held_up_s  # the loop was busy, and runs what is due only now
    due, looking.time._heap = looking.time._heap, []
    for entry in due:
        looking.time.at(looking.time.now, entry.call, background=True)
    assert looking.until(looking.time.now + 0.015)[0] == 0.01 + held_up_s + read_s
