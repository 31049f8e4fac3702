"""Work on a device: emulated here, by a device that fails what a GPU would do wrong silently."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from device_runs import PROVIDERS, ignore, run, slow_device

from ferroflow_dask.devices import DeviceRunner, Resident
from ferroflow_dask.devices.emulated import EmulatedDevice, UnplannedAccessError
from ferroflow_dask.exceptions import KernelError, KernelNotFoundError
from ferroflow_dask.graph import Builder, Graph, generate_graph
from ferroflow_dask.kernels import evaluate, make_plan


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice()


def products(n_branches: int, ops_per_branch: int, m: int = 16) -> Graph:
    return generate_graph("matmul-parallel", n_branches=n_branches, ops_per_branch=ops_per_branch, m=m)


def assert_right(found: dict[str, Any], graph: Graph) -> None:
    for name, expected in evaluate(graph).items():
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(found[name].to_host(), expected, rtol=1e-4, atol=1e-5 * scale)


def test_what_crosses_to_and_from_the_device_is_sources_and_outputs(device: EmulatedDevice) -> None:
    graph = products(5, 6)
    runner = DeviceRunner(device)
    found = run(runner, graph)
    assert all(isinstance(value, Resident) for value in found.values())
    assert runner.usage().to_host == 0
    assert_right(found, graph)
    assert_right(found, graph)  # a second look costs nothing
    usage = runner.usage()
    assert (usage.to_device, usage.to_host) == (len(graph.constants), len(graph.outputs))
    assert usage.nbytes_to_device == sum(value.nbytes for value in graph.constants.values())
    run(runner, graph)
    assert runner.usage().to_device == len(graph.constants), "sources stay where they are"
    assert not device.violations


def mixed_shapes() -> tuple[Graph, int]:
    """Return products of two shapes and a chain, and how many batches they make."""
    builder = Builder("mixed")
    rng = np.random.default_rng(0)

    def matrix(name: str, m: int, n: int) -> str:
        return builder.constant(rng.standard_normal((m, n), dtype=np.float32), name=name)

    a, b, c = matrix("a", 4, 5), matrix("b", 5, 4), matrix("c", 5, 3)
    outputs = {}
    for i in range(3):
        square = builder.op("MatMul", a, b)  # 3 alike
        outputs[f"x{i}"] = builder.op("MatMul", square, square)  # 3 alike, of what the others make
        outputs[f"y{i}"] = builder.op("Relu", builder.op("MatMul", a, c))  # 3 of another shape
    alone = builder.op("MatMul", builder.op("MatMul", b, a), b)
    outputs["z"] = builder.op("Add", alone, b)
    builder.output(**outputs)
    return builder.to_graph(), 3


def test_exactly_the_ready_products_of_equal_shape_go_out_together(device: EmulatedDevice) -> None:
    graph, n_batches = mixed_shapes()
    calls: list[tuple[int, ...]] = []
    runner = DeviceRunner(device)
    found = run(runner, graph, lambda ids, _seconds, _is_on_device: calls.append(ids))
    assert_right(found, graph)
    runner.drain()
    usage = runner.usage()
    assert (usage.batches, usage.batched_ops, usage.ops) == (n_batches, 9, len(graph.live_ops))
    shape_of = {op.id: (op.op_type, *(graph.spec(name).shape for name in op.inputs)) for op in graph.live_ops}
    for ids in calls:
        assert len({shape_of[i] for i in ids}) == 1
    assert sorted(i for ids in calls for i in ids) == sorted(op.id for op in graph.live_ops), "each once"


def test_chains_side_by_side_are_a_batch_at_each_step_and_are_never_copied(device: EmulatedDevice) -> None:
    runner = DeviceRunner(device)
    m = 32
    found = run(runner, products(4, 10, m=m))
    usage = runner.usage()
    assert (usage.batches, usage.mean_batch) == (10, 4)
    # Operands, one batch and the next, outputs and their stack.
    assert device.peak_nbytes <= (2 + 4 + 4 + 4 + 4) * 4 * m * m
    assert len(found) == 4


def test_batches_do_not_take_more_than_their_part_of_the_memory() -> None:
    m = 32
    device = EmulatedDevice(memory_nbytes=60 * 4 * m * m)  # an eighth of it: two products
    runner = DeviceRunner(device)
    graph = products(6, 3, m=m)
    assert_right(run(runner, graph), graph)
    assert runner.usage().mean_batch == 2


def test_a_task_ends_before_its_work_does() -> None:
    device = slow_device(launch_s=0.02)
    runner = DeviceRunner(device)
    found = run(runner, products(1, 2))
    assert device.clock() == 0
    (value,) = found.values()
    value.to_host()
    assert device.clock() > 0.04


def test_durations_are_the_devices_own() -> None:
    device = slow_device(launch_s=0.01)
    told: list[tuple[str, float]] = []
    runner = DeviceRunner(device, on_duration=lambda label, seconds: told.append((label, seconds)))
    spent: dict[int, float] = {}

    def note(ids: tuple[int, ...], seconds: float, is_on_device: bool) -> None:
        assert is_on_device
        spent.update(dict.fromkeys(ids, seconds))

    run(runner, products(1, 3), note, label="a product")
    runner.drain()
    assert len(spent) == 3
    assert not told, "kernels are compiled in the first"
    run(runner, products(1, 3), ignore, label="a product")
    assert not told
    run(runner, products(1, 3, m=8), ignore, label="a product")  # as is the first of another shape
    runner.drain()
    assert all(seconds == pytest.approx(0.01, rel=0.05) for seconds in spent.values())
    ((label, seconds),) = told
    assert (label, seconds) == ("a product", pytest.approx(0.03, rel=0.2))


def test_no_more_is_under_way_than_a_scheduler_can_foresee() -> None:
    device = slow_device(launch_s=0.02)
    runner = DeviceRunner(device)
    graph = products(1, 20)
    run(runner, graph)
    # All of it takes 0.4 s, and what may be ahead of its end is a good deal less.
    assert device.clock() > 0.25
    assert_right(run(runner, graph), graph)


def test_another_stream_waits_for_what_it_reads(device: EmulatedDevice) -> None:
    runner = DeviceRunner(device)
    graph = products(1, 3)
    (made,) = run(runner, graph).values()
    builder = Builder("next")
    x = builder.input("x", "float32", made.shape)
    builder.output(y=builder.op("Relu", x))
    following = builder.to_graph()
    plan = make_plan(following, following.live_ops, ["x"], ["y"])
    found: list[Any] = []
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            found.extend(runner.run(plan, [made], PROVIDERS, ignore))
        except BaseException as error:  # noqa: BLE001 -- told below
            errors.append(error)

    thread = threading.Thread(target=consume)  # which has a stream of its own
    thread.start()
    thread.join()
    assert not errors
    expected = np.maximum(next(iter(evaluate(graph).values())), 0)
    np.testing.assert_allclose(found[0].to_host(), expected, rtol=1e-4, atol=1e-5)
    made = None
    found.clear()
    gc.collect()
    assert not device.violations


class TestTheEmulation:
    """It fails where a GPU would compute nonsense now and then."""

    def test_reading_what_another_stream_may_not_have_finished(self, device: EmulatedDevice) -> None:
        array = device.to_device(np.ones(4, np.float32))
        errors = []

        def read() -> None:
            try:
                np.add(array, array)
            except UnplannedAccessError as error:
                errors.append(str(error))

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert errors == ["stream 1 reads what stream 0 may not have finished"]

    def test_freeing_what_another_stream_may_still_read(self, device: EmulatedDevice) -> None:
        array = device.to_device(np.ones(4, np.float32))
        event = device.record()
        kept = []

        def read() -> None:
            device.wait(event)
            kept.append(np.add(array, array))

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert not device.violations
        array = None
        gc.collect()
        assert device.violations

    @pytest.mark.parametrize(
        "call",
        [np.asarray, float, bool, lambda x: x.item(), lambda x: x.tolist()],
        ids=["asarray", "float", "bool", "item", "tolist"],
    )
    def test_values_do_not_come_to_the_host_unasked(self, device: EmulatedDevice, call: Any) -> None:
        array = device.to_device(np.ones((), np.float32))
        with pytest.raises((UnplannedAccessError, AttributeError)):
            call(array)


def test_an_op_without_a_kernel_for_the_device_runs_beside_it(device: EmulatedDevice) -> None:
    builder = Builder("sorting", opset=21)
    a = builder.constant(np.float32([[3, 1, 2]]), name="a")
    doubled = builder.op("Add", a, a)
    rounded = builder.op("Det", builder.op("MatMul", builder.op("Transpose", doubled, perm=[1, 0]), doubled))
    builder.output(y=rounded)
    graph = builder.to_graph()
    runner = DeviceRunner(device)
    noted: list[bool] = []
    found = run(runner, graph, lambda _ids, _s, is_on_device: noted.append(is_on_device))
    runner.drain()
    np.testing.assert_allclose(np.asarray(found["y"]), evaluate(graph)["y"], atol=1e-5)
    assert noted.count(False) == runner.usage().host_ops >= 1
    assert noted.count(True) == runner.usage().ops >= 2


def test_types_that_no_device_knows_stay_on_the_host(device: EmulatedDevice) -> None:
    builder = Builder("words", opset=21)
    words = builder.constant(np.array(["a", "b"], object), name="words")
    builder.output(y=builder.op("Identity", words))
    graph = builder.to_graph()
    runner = DeviceRunner(device)
    assert list(run(runner, graph)["y"]) == ["a", "b"]
    assert runner.usage().to_device == 0


def test_a_small_part_of_a_large_array_does_not_keep_it(device: EmulatedDevice) -> None:
    builder = Builder("part", opset=21)
    a = builder.constant(np.ones((1000, 100), np.float32), name="a")
    ends = [builder.constant(np.int64([value]), name=f"c{value}") for value in (0, 1)]
    builder.output(y=builder.op("Slice", builder.op("Add", a, a), *ends))
    (found,) = run(DeviceRunner(device), builder.to_graph()).values()
    gc.collect()
    assert found.nbytes == 400
    assert device.used_nbytes() <= 400 + 400_000  # and the constant


def test_what_has_ended_is_let_go_of_though_nothing_follows() -> None:
    device = slow_device(launch_s=0.001)
    told: list[float] = []
    runner = DeviceRunner(device, on_duration=lambda _label, seconds: told.append(seconds))
    graph = products(1, 3)
    run(runner, graph)
    runner.drain()
    found = run(runner, graph)
    found.clear()
    device.sleep(0.05)
    assert not told
    runner.reap()
    runner.close()
    assert len(told) == 1
    assert device.used_nbytes() == 0


def test_exports_of_a_batch_have_spilled_what_is_in_their_way() -> None:
    m = 64
    nbytes = 4 * m * m
    for n_other in range(20, 36):
        device = EmulatedDevice(memory_nbytes=36 * nbytes)
        kept: list[Any] = []
        runner = DeviceRunner(device, lambda kept=kept: bool(kept) and kept.pop() is not None)
        with device.use():
            kept.append(device.to_device(np.ones((n_other * m, m), np.float32)))
        graph = products(2, 1, m=m)
        assert_right(run(runner, graph), graph)


def test_an_operator_that_nobody_has_is_named(device: EmulatedDevice) -> None:
    builder = Builder("strange")
    a = builder.constant(np.float32([1]), name="a")
    builder.output(y=builder.op("Nonsense", a, domain="elsewhere"))
    with pytest.raises(KernelNotFoundError, match="Nonsense"):
        run(DeviceRunner(device), builder.to_graph())


def test_what_fails_late_names_the_op(device: EmulatedDevice) -> None:
    graph = products(1, 3)
    runner = DeviceRunner(device)
    device.pending_error = RuntimeError("an illegal memory access was encountered")
    name = graph.live_ops[0].name
    with pytest.raises(KernelError, match=rf"op '{name}' \(MatMul\) failed on emulated: an illegal memory"):
        next(iter(run(runner, graph).values())).to_host()


def test_an_op_that_fails_at_once_is_named(device: EmulatedDevice) -> None:
    builder = Builder("wrong")
    a = builder.input("a", "float32", ("m", "n"))
    builder.output(y=builder.op("Add", a, builder.constant(np.ones(4, np.float32), name="b"), name="sum"))
    graph = builder.to_graph()
    plan = make_plan(graph, graph.live_ops, ["a", "b"], ["y"])
    with pytest.raises(KernelError, match=r"op 'sum' \(Add\) failed on \(float32\[2, 3\], float32\[4\]\)"):
        DeviceRunner(device).run(plan, [np.ones((2, 3), np.float32), graph.constants["b"]], PROVIDERS, ignore)


class TestOutOfMemory:
    m = 64
    nbytes = 4 * m * m

    def test_what_is_kept_for_later_goes_first(self) -> None:
        device = EmulatedDevice(memory_nbytes=8 * self.nbytes)
        runner = DeviceRunner(device)
        for seed in range(4):  # each leaves its operands on the device
            graph = generate_graph("matmul-chain", n_ops=2, m=self.m, seed=seed)
            assert_right(run(runner, graph), graph)

    def test_nothing_left_to_spill(self) -> None:
        device = EmulatedDevice(memory_nbytes=2 * self.nbytes)
        graph = generate_graph("matmul-chain", n_ops=2, m=self.m)
        with pytest.raises(KernelError) as caught:
            run(DeviceRunner(device), graph)
        op, both = f"op {graph.live_ops[0].name!r} (MatMul)", f"{2 * self.nbytes:,}"
        assert str(caught.value) == (
            f"{op}, of {both} B of operands, ran out of memory on emulated: {both} of {both} B are in use, "
            "and nothing is left to spill to the host"
        )
