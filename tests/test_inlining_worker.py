"""The workers' end of results that come with tasks: what is told, what is taken, and what is given back."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed.worker_state_machine import UpdateDataEvent
from loose_workers import LooseWorker

from ferroflow_dask.bundling.results import Results
from ferroflow_dask.scheduler.inlining import worker as inlining_worker
from ferroflow_dask.scheduler.inlining.worker import INLINE, WorkerInlining, is_small
from ferroflow_dask.scheduler.worker_plugins import by_value

Point = namedtuple("Point", "x y")


class Loose(LooseWorker):
    """One that takes what it is told."""

    def handle_stimulus(self, event: UpdateDataEvent) -> None:
        for key, value in event.data.items():
            self.has(key, value)

    def has(self, key: str, value: object, state: str = "memory", nbytes: int = 8) -> None:
        self.tasks[key] = SimpleNamespace(state=state, run_id=1, nbytes=nbytes)
        if state == "memory":
            self.data[key] = value

    def take(self, limit: int = 0, **values: bytes) -> None:
        self.stream_handlers[INLINE](key="t", limit=limit, values=values)


def plugged(worker: Loose) -> Any:
    plugin = WorkerInlining()
    plugin.setup(worker)  # type: ignore[arg-type]
    return plugin


PLAIN = [1, 1.5, 1j, True, "s", b"b", None, (1, 2), [1, [2, (3,)]], {"a": 1}, np.float32(2), np.arange(5)]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_is_told_and_taken(value: Any) -> None:
    worker = Loose()
    plugin = plugged(worker)
    worker.take(limit=1000)
    worker.has("t", value)
    plugin.transition("t", "executing", "memory")
    (told,) = worker.sent
    assert (told["key"], told["run_id"]) == ("t", 1)
    other = Loose()
    plugged(other)
    other.take(x=told["value"])
    assert np.all(other.data["x"] == value)
    assert type(other.data["x"]) is type(value)
    assert [(message["op"], message["keys"]) for message in other.sent] == [("add-keys", ["x"])]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(threading.Lock(), id="lock"),
        pytest.param(object(), id="object"),
        pytest.param(Point(1, 2), id="named tuple"),
        pytest.param(np.array([object()]), id="array of objects"),
        pytest.param(np.dtype(float), id="dtype"),
        pytest.param([[[[1]]]], id="deep list"),
        pytest.param(list(range(126)), id="long list"),
        pytest.param([0] * 20 + ["x" * 1000], id="list of something long"),
        pytest.param(np.broadcast_to(1.0, (500, 500)), id="broadcast array"),
        pytest.param(10**5000, id="large number"),
        pytest.param({(1, 2): {3: object()}}, id="dict with an object"),
        pytest.param({i: i for i in range(100)}, id="long dict"),
    ],
)
def test_other_values_are_not_told(value: object) -> None:
    assert not is_small(value, 1000)
    worker = Loose()
    plugin = plugged(worker)
    worker.take(limit=1000)
    worker.has("t", value)
    plugin.transition("t", "executing", "memory")
    assert worker.sent == []
    assert len(plugin._results) == 0


@pytest.mark.parametrize(("nbytes", "size"), [(101, 1), (8, 90)])
def test_what_is_large_in_memory_or_pickled_is_not_told(nbytes: int, size: int) -> None:
    worker = Loose()
    plugin = plugged(worker)
    worker.take(limit=100)
    worker.has("t", b"x" * size, nbytes=nbytes)
    plugin.transition("t", "executing", "memory")
    assert worker.sent == []


def test_what_bundles_yield_counts_for_what_it_holds() -> None:
    arrays = np.zeros(8), np.float32(1)
    assert is_small(Results(arrays), 100)
    assert not is_small(Results(arrays), 75)
    assert not is_small(Results((*arrays, Point(1, 2))), 1000)


def test_an_actor_is_not_told() -> None:
    worker = Loose()
    plugin = plugged(worker)
    worker.take(limit=1000)
    worker.has("t", None)
    del worker.data["t"]  # it is among the actors
    plugin.transition("t", "executing", "memory")
    assert worker.sent == []


def test_what_nobody_asked_for_or_takes_back_or_does_not_come_is_not_told() -> None:
    worker = Loose()
    plugin = plugged(worker)
    worker.has("t", 1)
    plugin.transition("t", "executing", "memory")
    worker.take(limit=1000)
    worker.take(limit=0)
    plugin.transition("t", "executing", "memory")
    worker.take(limit=1000)
    for finish in ("waiting", "ready", "executing"):
        plugin.transition("t", "released", finish)
    assert len(plugin._results) == 1
    plugin.transition("t", "executing", "error")
    plugin.transition("t", "executing", "memory")
    assert worker.sent == []


@pytest.mark.parametrize("state", ["fetch", "flight", "executing", "waiting", "missing"])
def test_a_result_that_comes_another_way_is_left_to_it(state: str) -> None:
    worker = Loose()
    plugged(worker)
    worker.has("x", None, state)
    worker.take(x=pickle.dumps(1))
    assert worker.data == {}
    assert worker.sent == []


def test_a_result_that_is_there_is_left_as_it_is() -> None:
    worker = Loose()
    plugged(worker)
    worker.has("x", "own")
    worker.take(x=pickle.dumps("other"))
    assert worker.data == {"x": "own"}
    assert worker.sent == []


def test_what_cannot_be_unpickled_is_told_and_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[tuple[Any, ...]] = []
    monkeypatch.setattr(inlining_worker.logger, "warning", lambda *told, **_: warnings.append(told))
    worker = Loose()
    plugged(worker)
    worker.take(x=b"no pickle", y=pickle.dumps(1))
    assert worker.data == {"y": 1}
    assert [message["keys"] for message in worker.sent] == [["y"]]
    assert warnings == [("ferroflow: result of %r cannot be unpickled on this worker", "x")]


def test_what_was_asked_before_the_plugin_came_again_is_still_told() -> None:
    worker = Loose()
    plugged(worker)
    worker.take(limit=1000)
    again = plugged(worker)
    worker.has("t", 1)
    again.transition("t", "executing", "memory")
    assert [message["key"] for message in worker.sent] == ["t"]


def test_the_workers_need_not_have_the_package_nor_numpy() -> None:
    script = """
import sys, pickle, types
sys.modules["ferroflow_dask"] = sys.modules["numpy"] = None  # importing them raises
plugin = pickle.loads(sys.stdin.buffer.read())
sent = []
task = types.SimpleNamespace(state="memory", run_id=1, nbytes=8)
worker = types.SimpleNamespace(
    state=types.SimpleNamespace(tasks={"t": task}, data={"t": (1, "two")}), handle_stimulus=None,
    batched_send=sent.append, stream_handlers={}, log_event=lambda *_: None,
)
plugin.setup(worker)
worker.stream_handlers["ferroflow-inline"](key="t", limit=100, values={})
plugin.transition("t", "executing", "memory")
assert pickle.loads(sent[0]["value"]) == (1, "two")
"""
    subprocess.run([sys.executable, "-c", script], input=by_value(WorkerInlining()), check=True)
