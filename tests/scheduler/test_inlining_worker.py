"""The workers' end of inlining: results that are reported with tasks, and inputs that come with them."""

from __future__ import annotations

import pickle
import threading
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dask._task_spec import List, Task, TaskRef
from distributed.worker_state_machine import ComputeTaskEvent
from loose_workers import LooseWorker

from ferroflow_dask.bundling.results import Results
from ferroflow_dask.scheduler.features.inlined_results_worker import RESULT, TASK, ReportedResults, is_small
from ferroflow_dask.scheduler.remote_worker import RemotePlugin, close_of

Point = namedtuple("Point", "x y")


class Loose(LooseWorker):
    """One whose tasks are computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[ComputeTaskEvent] = []
        self.plug()

    def plug(self) -> None:
        """Let another plugin come."""
        self.plugin: Any = RemotePlugin(ReportedResults)
        self.plugin.setup(self)

    def handle_stimulus(self, event: ComputeTaskEvent) -> None:
        self.computed.append(event)
        self.tasks[event.key] = SimpleNamespace(state="waiting", metadata={}, run_spec=event.run_spec)

    def take(self, limit: int = 0, spec: Any = None, **values: bytes) -> None:
        event = ComputeTaskEvent.dummy("t", stimulus_id="s")
        fields = {name: getattr(event, name) for name in (*event.__slots__, "stimulus_id")}
        fields |= {"run_spec": Task("t", list) if spec is None else spec}
        self.stream_handlers[TASK](**fields, limit=limit, values=values)

    def ends(self, value: object, nbytes: int = 8, state: str = "memory") -> Any:
        """Let the task end; return the metadata in its report."""
        if "t" not in self.tasks:
            self.tasks["t"] = SimpleNamespace(metadata={}, run_spec=None)
        ts = self.tasks["t"]
        ts.state, ts.nbytes = state, nbytes
        if state == "memory":
            self.data["t"] = value
        reported = ts.metadata
        self.plugin.transition("t", "executing", state)
        return reported


def of_task(worker: Loose) -> Any:
    """Return what the task computes."""
    return worker.tasks["t"].run_spec({})


PLAIN = [1, 1.5, 1j, True, "s", b"b", None, (1, 2), [1, [2, (3,)]], {"a": 1}, np.float32(2), np.arange(5)]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_is_reported_and_read(value: Any) -> None:
    worker = Loose()
    worker.take(limit=1000)
    reported = worker.ends(value)
    assert worker.tasks["t"].metadata == {}  # the worker keeps no second copy
    other = Loose()
    other.take(spec=Task("t", list, List(TaskRef("x"), TaskRef("x"))), x=reported[RESULT])
    first, second = of_task(other)
    assert first is second
    assert np.all(first == value)
    assert type(first) is type(value)


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
def test_other_values_are_not_reported(value: object) -> None:
    assert not is_small(value, 1000)
    worker = Loose()
    worker.take(limit=1000)
    assert worker.ends(value) == {}
    assert len(worker.plugin.end) == 0


@pytest.mark.parametrize(("nbytes", "size"), [(101, 1), (8, 90)])
def test_what_is_large_in_memory_or_pickled_is_not_reported(nbytes: int, size: int) -> None:
    worker = Loose()
    worker.take(limit=100)
    assert worker.ends(b"x" * size, nbytes) == {}


def test_what_bundles_yield_counts_for_what_it_holds() -> None:
    arrays = np.zeros(8), np.float32(1)
    assert is_small(Results(arrays), 100)
    assert not is_small(Results(arrays), 75)
    assert not is_small(Results((*arrays, Point(1, 2))), 1000)


def test_an_actor_is_not_reported() -> None:
    worker = Loose()
    worker.take(limit=1000)
    worker.tasks["t"].state, worker.tasks["t"].nbytes = "memory", 8
    worker.plugin.transition("t", "executing", "memory")  # it is among the actors, and not in the data
    assert worker.tasks["t"].metadata == {}


def test_only_results_that_are_asked_for_are_reported() -> None:
    worker = Loose()
    assert worker.ends(1) == {}
    worker.take(limit=1000)
    worker.take(limit=0)
    assert worker.ends(1) == {}
    worker.take(limit=1000)
    for finish in ("waiting", "ready", "executing"):
        worker.plugin.transition("t", "released", finish)
    assert len(worker.plugin.end) == 1
    assert worker.ends(None, state="error") == {}
    assert worker.ends(1) == {}


def test_metadata_of_the_task_is_kept() -> None:
    worker = Loose()
    worker.take(limit=1000)
    worker.tasks["t"].metadata = {"own": 1}
    reported = worker.ends(2)
    assert (reported["own"], worker.tasks["t"].metadata) == (1, {"own": 1})
    assert pickle.loads(reported[RESULT]) == 2


@pytest.mark.parametrize("state", ["memory", "error"])
def test_a_task_that_ended_keeps_no_inputs(state: str) -> None:
    worker = Loose()
    spec = Task("t", list, List(TaskRef("x")))
    worker.take(spec=spec, x=pickle.dumps(1))
    assert of_task(worker) == [1]
    worker.plugin.transition("t", "waiting", "released")  # such a task may still run
    assert of_task(worker) == [1]
    worker.tasks["t"].state = "released"
    worker.plugin.transition("t", "resumed", state)
    assert of_task(worker) == [1]
    worker.ends([1], state=state)
    assert worker.tasks["t"].run_spec is spec
    assert worker.plugin.end._without_inputs == {}


def test_a_task_that_is_forgotten_is_not_kept() -> None:
    worker = Loose()
    worker.take(spec=Task("t", list, List(TaskRef("x"))), x=pickle.dumps(1))
    del worker.tasks["t"]
    worker.plugin.transition("t", "released", "forgotten")
    assert worker.plugin.end._without_inputs == {}


def test_other_inputs_are_read_as_ever() -> None:
    worker = Loose()
    worker.take(spec=Task("t", list, List(TaskRef("x"), TaskRef("y"))), x=pickle.dumps(1))
    assert worker.computed[0].run_spec.dependencies == {"y"}
    assert worker.tasks["t"].run_spec({"y": 2}) == [1, 2]


def test_an_input_that_cannot_be_unpickled_is_an_error_of_the_task() -> None:
    worker = Loose()
    worker.take(spec=Task("t", list, List(TaskRef("x"), TaskRef("y"))), x=b"no pickle", y=pickle.dumps(1))
    with pytest.raises(pickle.UnpicklingError):
        of_task(worker)


def test_results_that_an_earlier_plugin_was_asked_for_are_reported() -> None:
    worker = Loose()
    worker.take(limit=1000)
    worker.plug()
    assert RESULT in worker.ends(1)


def test_after_the_last_message_to_the_last_plugin_no_result_is_reported() -> None:
    worker = Loose()  # may be removed before its announcement arrives: it would get no closing message
    worker.plug()
    worker.take(limit=1000)
    close = close_of(ReportedResults.name)
    worker.stream_handlers[close](number=1)
    assert close in worker.stream_handlers
    worker.stream_handlers[close](number=2)
    assert worker.stream_handlers == {}
    assert worker.ends(1) == {}
