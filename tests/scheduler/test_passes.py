"""Passes over idle workers: after events at once, and by the clock while a steal is possible."""

from __future__ import annotations

from typing import Any

import pytest

from ferroflow_dask.scheduler.idle_workers import Passes
from ferroflow_dask.virtual.clock import VirtualLoop, VirtualTime


class Looking:
    """Passes on a virtual loop, and the times at which they ran."""

    def __init__(self, n_hopeful: int) -> None:
        self.time, self.at = VirtualTime(), []
        self.n_hopeful = n_hopeful
        loop: Any = VirtualLoop(self.time)
        self.passes = Passes(loop, self.run)

    def run(self) -> int:
        self.at.append(self.time.now)
        return self.n_hopeful

    def until(self, when: float) -> list[float]:
        """Go on to a time; return when passes ran since the last call."""
        self.at.clear()
        self.time.run(when, 0.0, 10_000)
        return [pytest.approx(at) for at in self.at]


def test_ask_several_times_runs_one_pass_later() -> None:
    looking = Looking(0)
    for _ in range(3):
        looking.passes.ask()
    assert looking.at == []
    assert looking.until(10.0) == [0.0]


def test_passes_without_hope_run_for_events_only() -> None:
    looking = Looking(0)
    looking.passes.ask()
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
    looking.passes.close()
    looking.passes.ask()
    assert looking.until(10.0) == []
