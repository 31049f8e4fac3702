"""Bundles that run: one that is late tells those that expect about as much."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from distributed import Reschedule
from distributed.utils import thread_state

from ferroflow_dask.bundling import sequence
from ferroflow_dask.bundling.results import Results
from ferroflow_dask.bundling.sequence import ExecuteTasks

#: Four tasks of `SLOW_S` are said to take this long [s].
EXPECTED_S, SLOW_S = 0.05, 0.3


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run on a worker, where bundles without any grace were never late before."""
    monkeypatch.setattr(sequence, "_LATE_S", 0.0)
    monkeypatch.setattr(sequence, "_given_up", {})
    monkeypatch.setattr(sequence, "_too_short_s", {})
    worker = SimpleNamespace(log_event=lambda *_: None)
    monkeypatch.setattr(thread_state, "execution_state", {"worker": worker}, raising=False)
    return []


def bundle(
    calls: list[int], name: str, cost_s: float, seconds: float = 0.0, prefix: str = "x"
) -> ExecuteTasks:
    def call() -> int:
        calls.append(1)
        time.sleep(seconds)
        return 1

    steps = tuple((0, (), (), ()) for _ in range(4))
    keys = tuple(f"{name}-{i}" for i in range(4))
    return ExecuteTasks((call,), steps, keys, (), (3,), {prefix: 4}, cost_s)


def late(calls: list[int]) -> None:
    with pytest.raises(Reschedule):
        bundle(calls, "late", EXPECTED_S, SLOW_S)()
    assert len(calls) == 1
    calls.clear()


@pytest.mark.parametrize("part", [0.1, 1.0, 1.9])
def test_a_bundle_that_expects_about_as_much_as_a_late_one_does_not_start(
    calls: list[int], part: float
) -> None:
    late(calls)
    with pytest.raises(Reschedule):
        bundle(calls, "next", part * EXPECTED_S)()
    assert not calls


OTHERS: dict[str, Callable[[list[int]], ExecuteTasks]] = {
    "expects more": lambda calls: bundle(calls, "next", 2.1 * EXPECTED_S),
    "has other tasks": lambda calls: bundle(calls, "next", EXPECTED_S, prefix="y"),
    "has given up before": lambda calls: bundle(calls, "late", EXPECTED_S),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_bundle_runs_after_a_late_one_if_it(name: str, calls: list[int]) -> None:
    late(calls)
    assert OTHERS[name](calls)() == 1
    assert len(calls) == 4


def test_a_late_bundle_is_forgotten(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    late(calls)
    monkeypatch.setattr(sequence, "_AS_WRONG_S", 0.0)
    assert bundle(calls, "next", EXPECTED_S)() == 1


def test_a_bundle_that_returns_an_iterator_names_the_prefix_of_its_task(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    worker = SimpleNamespace(log_event=lambda _, message: told.append(message))
    monkeypatch.setattr(thread_state, "execution_state", {"worker": worker})
    steps = ((0, ([1, 2],), (), ()), (1, ([1, 2],), (), ()))
    lazy = ExecuteTasks((iter, list), steps, ("lazy-1", "list-1"), (), (0, 1), {"lazy": 1, "list": 1}, 1.0)
    with pytest.raises(Reschedule):
        lazy()
    assert told == [{"prefix": "lazy"}]
    assert [type(value).__name__ for value in lazy().values] == ["list_iterator", "list"]  # once only


def test_results_are_of_a_device_if_one_of_them_is() -> None:
    on_device = SimpleNamespace(__cuda_array_interface__={"shape": (2,)})
    assert Results((1, on_device)).__cuda_array_interface__ == {"shape": (2,)}
    for name in ("__cuda_array_interface__", "shape"):
        assert not hasattr(Results((1, 2)), name)
