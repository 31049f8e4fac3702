"""What a GPU does wrong silently, or late: memory that is used again too early, contexts that are broken."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_runs import slow_device
from zict import Buffer

from ferroflow_dask.devices import DeviceRunner, Resident
from ferroflow_dask.devices.workers import _spilling
from ferroflow_dask.exceptions import KernelError
from ferroflow_dask.graph import Builder, Graph
from ferroflow_dask.kernels import make_plan

SHAPE = (8, 8)


def run(runner: DeviceRunner, graph: Graph, arguments: list[Any]) -> list[Any]:
    names = [*graph.inputs, *graph.constants]
    plan = make_plan(graph, graph.live_ops, names, list(graph.outputs))
    values = [*arguments, *graph.constants.values()]
    return runner.run(plan, values, ("array", "onnxruntime"), lambda *_: None)


def in_a_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def of_one(op_type: str, *constants: Any, **attributes: Any) -> Graph:
    builder = Builder("one")
    x = builder.input("x0", "float32", SHAPE)
    more = [builder.constant(np.int64(value), name=f"c{i}") for i, value in enumerate(constants)]
    builder.output(y=builder.op(op_type, x, *more, **attributes))
    return builder.to_graph()


def of_a_batch() -> Graph:
    builder = Builder("batch")
    xs = [builder.input(f"x{i}", "float32", SHAPE) for i in range(4)]
    right = builder.input("right", "float32", SHAPE)
    builder.output(**{f"y{i}": builder.op("MatMul", x, right) for i, x in enumerate(xs)})
    return builder.to_graph()


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(of_one("Relu"), id="an op"),
        pytest.param(of_one("Slice", [0], [1]), id="a copy of a part"),
        pytest.param(of_one("Transpose", perm=[1, 0]), id="a copy in another order"),
        pytest.param(of_a_batch(), id="a batch"),
    ],
)
def test_what_another_stream_made_stays_until_it_is_read(graph: Graph) -> None:
    device = slow_device()
    runner = DeviceRunner(device)
    double = Builder("double")
    x = double.input("x0", "float32", SHAPE)
    double.output(y=double.op("Add", x, x))
    twice = double.to_graph()
    ones = [np.full(SHAPE, i + 1.0, np.float32) for i in range(len(graph.inputs))]
    made = in_a_thread(lambda: [run(runner, twice, [one])[0] for one in ones])
    runner.drain()
    found = in_a_thread(lambda: run(runner, graph, made))
    assert all(isinstance(value, Resident) for value in found)
    made.clear()  # as Dask lets go of them once the task has ended, which its work on the device has not
    gc.collect()
    assert not device.violations


def test_a_device_that_fails_between_two_tasks_is_known_to_be_broken() -> None:
    device = slow_device()
    runner = DeviceRunner(device)
    relu, ones = of_one("Relu"), np.ones(SHAPE, np.float32)
    run(runner, relu, [ones])
    runner.drain()
    assert not runner.is_broken
    device.pending_error = RuntimeError("an illegal memory access was encountered")
    device.to_device(ones)  # something of others
    device.sleep(1)
    with pytest.raises(KernelError, match=r"Relu.* failed on emulated: an illegal memory access"):
        run(runner, relu, [ones])
    assert runner.is_broken


def test_a_device_that_fails_is_found_out_by_looking() -> None:
    device = slow_device()
    runner = DeviceRunner(device)
    found = run(runner, of_one("Relu"), [np.ones(SHAPE, np.float32)])
    device.pending_error = RuntimeError("unspecified launch failure")
    with device.use():
        device.to_device(np.ones(3))
    runner.reap()
    assert not runner.is_broken, "it has not failed yet"
    device.sleep(1)
    runner.reap()
    assert runner.is_broken
    with pytest.raises(KernelError, match=r"\(Relu\) failed on emulated: unspecified launch failure"):
        found[0].to_host()


def test_of_several_that_may_have_done_it_the_number_is_told() -> None:
    device = slow_device()
    runner = DeviceRunner(device)
    builder = Builder("chain")
    x = builder.input("x0", "float32", SHAPE)
    for _ in range(3):
        x = builder.op("Relu", x)
    builder.output(y=x)
    device.pending_error = RuntimeError("unspecified launch failure")
    (found,) = run(runner, builder.to_graph(), [np.ones(SHAPE, np.float32)])
    with pytest.raises(KernelError, match=r"\(Relu\), or one of 2 steps after it, failed on emulated"):
        found.to_host()


class Slow(dict[str, str]):
    """A store that takes its time for the first result, until it is told to go on."""

    def __init__(self) -> None:
        self.is_taking, self.go_on = threading.Event(), threading.Event()

    def __setitem__(self, key: str, value: str) -> None:
        if key == "a":
            self.is_taking.set()
            self.go_on.wait(30)
        super().__setitem__(key, value)


def test_while_one_thread_spills_another_finds_more_to_spill() -> None:
    slow = Slow()
    results: Buffer[str, str] = Buffer({}, slow, n=100, weight=lambda _key, _value: 1)
    results.update(dict.fromkeys("abc", ""))
    worker: Any = SimpleNamespace(data=SimpleNamespace(device_buffer=results))
    spill = _spilling(worker)
    other = threading.Thread(target=spill)
    other.start()
    assert slow.is_taking.wait(30)
    assert spill()
    assert list(results.fast) == ["a", "c"], "the one that was read longest ago, of those that nobody spills"
    assert spill()
    assert spill(), "the last one is on its way"
    slow.go_on.set()
    other.join()
    assert not spill()
    assert dict(slow) == dict.fromkeys("abc", "")


def test_a_session_that_lacks_memory_is_run_again_once_there_is_some() -> None:
    kept = ["a result"]
    runner = DeviceRunner(slow_device(), lambda: bool(kept) and kept.pop() == "a result")

    def session(values: Mapping[str, Any]) -> dict[str, Any]:
        if kept:
            raise MemoryError
        return {"y": values["x"] + 1}

    found, _ = runner.run_session(session, {"x": np.zeros(3)}, 1)
    np.testing.assert_array_equal(found["y"], np.ones(3))
    kept.append("what nobody may spill")
    with pytest.raises(KernelError, match=r"a session of 1 ops, of 24 B .* ran out of memory on emulated"):
        runner.run_session(session, {"x": np.zeros(3)}, 1)
