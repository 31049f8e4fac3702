"""What is learned of how long tasks take, where something else holds up one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ferroflow_dask.lowering import KIND_ANNOTATION
from ferroflow_dask.plugin.durations import Durations
from ferroflow_dask.policy.pace import Paces


def task(name: str = "f", kind: str | None = None) -> Any:
    annotations = {} if kind is None else {KIND_ANNOTATION: kind}
    return SimpleNamespace(prefix=SimpleNamespace(name=name), annotations=annotations, run_spec=None)


def learned(*seconds: float, kind: str | None = None) -> Durations:
    durations = Durations()
    for each_s in seconds:
        durations.record(task(kind=kind), each_s, 8)
    return durations


def test_one_that_was_held_up_does_not_make_its_kind_long() -> None:
    durations = learned(*[0.001] * 5, 0.2, kind="k")
    assert durations.of(task(kind="k")) == pytest.approx(0.001 * 1.9)
    assert durations.usual(task(kind="k")) == durations.of(task(kind="k"))


def test_what_has_become_longer_is_learned() -> None:
    assert learned(*[0.001] * 5, *[0.2] * 20, kind="k").of(task(kind="k")) == pytest.approx(0.2, rel=0.05)
    assert learned(0.0, *[0.2] * 30, kind="k").of(task(kind="k")) == pytest.approx(0.2, rel=0.05)
    assert learned(*[0.2] * 5, *[0.001] * 20, kind="k").of(task(kind="k")) == pytest.approx(0.001, rel=0.2)


def test_of_a_name_the_mean_tells_of_long_ones_and_what_is_usual_does_not() -> None:
    durations = learned(*[0.01] * 5, 1.0)
    assert durations.of(task()) is None
    assert durations.usual(task()) == pytest.approx(0.019)
    assert durations.by_name()["f"][0] == pytest.approx(0.307)
    assert durations.usual(task("g")) is None


def test_no_worker_is_fast_because_another_was_held_up() -> None:
    durations, paces = Durations(), Paces()

    def run(worker: int, seconds: float) -> float:
        expected_s = durations.usual(task(kind="k")) or seconds
        durations.record(task(kind="k"), seconds, 8)
        return paces.record(worker, expected_s, seconds)

    for i in range(28):
        run(i % 4, 0.01 + 0.0001 * (i % 4))
    run(0, 2.0)
    assert {run(1, 0.01) for _ in range(7)} == {1.0}  # right after that
    assert [paces.speed(worker) for worker in range(4)] == [1.0] * 4
