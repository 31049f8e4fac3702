"""Functions of bundles: iterators, and results on devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from distributed import Reschedule
from distributed.utils import thread_state

from ferroflow_dask.bundling import sequence
from ferroflow_dask.bundling.results import Results
from ferroflow_dask.bundling.sequence import ExecuteTasks


def test_a_bundle_that_returns_an_iterator_names_the_prefix_of_its_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[object] = []
    worker = SimpleNamespace(
        log_event=lambda _, message: events.append(message), extensions={}, active_threads={}
    )
    monkeypatch.setattr(sequence, "_given_up", {})
    monkeypatch.setattr(thread_state, "execution_state", {"worker": worker}, raising=False)
    steps = ((0, ([1, 2],), (), ()), (1, ([1, 2],), (), ()))
    names = {"lazy": 1, "list": 1}
    lazy = ExecuteTasks(
        (iter, list), steps, ("lazy-1", "list-1"), (), (0, 1), names, 1.0, returns_results=True
    )
    with pytest.raises(Reschedule):
        lazy()
    assert events == [{"prefix": "lazy"}]
    assert [type(value).__name__ for value in lazy().values] == ["list_iterator", "list"]  # once only


def test_results_are_of_a_device_if_one_of_them_is() -> None:
    on_device = SimpleNamespace(__cuda_array_interface__={"shape": (2,)})
    assert Results((1, on_device)).__cuda_array_interface__ == {"shape": (2,)}
    for name in ("__cuda_array_interface__", "shape"):
        assert not hasattr(Results((1, 2)), name)
