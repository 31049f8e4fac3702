"""Clusters with emulated devices: CPU and GPU workers side by side, spilling, loss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Future, LocalCluster, wait
from waiting import soon

import ferroflow_dask
from ferroflow_dask import Model, executed, install
from ferroflow_dask.clients import workers_of
from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.deploy import DeviceChoice, count_gpus, device_client
from ferroflow_dask.deploy.cuda import as_the_driver_counts
from ferroflow_dask.devices import DeviceUsage
from ferroflow_dask.devices.workers import device_usage, gpu_workers
from ferroflow_dask.exceptions import KernelError
from ferroflow_dask.graph import Builder, Graph, generate_graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.lowering import bind_graph, scatter
from ferroflow_dask.scheduler import installed

pytestmark = pytest.mark.cluster

EMULATED = DeviceChoice("emulated")
#: As fast as one core in everything, so that where an op goes is a matter of what it is told to cost.
FAST = AnalyticCost(flop_rate=1e12, memory_bandwidth=1e12)


@pytest.fixture(scope="module")
def gpu_client() -> Iterator[Client]:
    with device_client(EMULATED, workers=0) as client:
        install(client)
        yield client


@pytest.fixture(scope="module")
def mixed_client() -> Iterator[Client]:
    with device_client(EMULATED, workers=2) as client:
        install(client)
        yield client


def usage_of(client: Client) -> DeviceUsage:
    usage = device_usage(client)
    assert usage is not None
    return usage


def assert_right(found: dict[str, Any], graph: Graph) -> None:
    for name, expected in evaluate(graph).items():
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("granularity", ["ops", "bundles", "whole"])
def test_arrays_stay_on_the_device_from_source_to_output(gpu_client: Client, granularity: str) -> None:
    graph = generate_graph("matmul-parallel", n_branches=4, ops_per_branch=6, m=64)
    profile = ferroflow_dask.calibrate(gpu_client)
    assert profile.n_gpus == 1
    placed = scatter(graph, gpu_client)
    before = usage_of(gpu_client)
    bound = bind_graph(placed, {}, profile=profile, granularity=granularity)
    found = gpu_client.compute(bound).result()
    assert_right(found, graph)
    assert all(type(value) is np.ndarray for value in found.values())
    report = executed(gpu_client, bound.run)
    assert report.executed_ops == len(report.device_seconds) == len(graph.live_ops)
    usage = usage_of(gpu_client).since(before)
    assert (usage.ops, usage.host_ops) == (len(graph.live_ops), 0)
    assert (usage.to_device, usage.to_host) == (len(graph.constants), len(graph.outputs))
    if granularity != "ops":
        assert usage.batched_ops == usage.ops


def test_what_is_read_on_the_host_crosses_once(gpu_client: Client) -> None:
    builder = Builder("two")
    a = builder.constant(np.eye(32, dtype=np.float32), name="a")
    first = builder.op("MatMul", a, a)
    builder.output(y=first, z=builder.op("Relu", first))
    graph = builder.to_graph()
    before = usage_of(gpu_client)
    bound = bind_graph(graph, {})
    assert_right(gpu_client.compute(bound).result(), graph)
    usage = usage_of(gpu_client).since(before)
    assert (usage.to_device, usage.to_host) == (1, 2)


def test_an_input_that_is_on_the_device_is_checked_there(gpu_client: Client) -> None:
    builder = Builder("squares")
    square = builder.op("MatMul", *[builder.input("x", "float32", (32, 32))] * 2)
    builder.output(y=builder.op("MatMul", square, square))
    graph, eye = builder.to_graph(), np.eye(32, dtype=np.float32)
    squared = gpu_client.persist(Model(graph).bind(x=eye))
    key, _ = squared.places["y"]
    wait(squared)
    before = usage_of(gpu_client)
    bound = Model(graph).bind(x=Future(key, gpu_client))
    np.testing.assert_array_equal(gpu_client.compute(bound).result()["y"], eye)
    usage = usage_of(gpu_client).since(before)
    assert (usage.to_device, usage.to_host) == (0, 1)  # the result


def slow_and_large(n_slow: int, n_products: int, m: int) -> Graph:
    """Return sleeping ops and products side by side."""
    builder = Builder("mixed")
    root = builder.constant(np.float32([1]), name="root")
    matrix = builder.constant(np.eye(m, dtype=np.float32), name="matrix")
    outputs = {}
    for i in range(n_slow):
        outputs[f"slow{i}"] = builder.op("Slow", root, domain="ferroflow", duration=0.05)
    for i in range(n_products):
        outputs[f"product{i}"] = builder.op("MatMul", matrix, matrix)
    builder.output(**outputs)
    return builder.to_graph()


def where_ops_ran(client: Client, run: str) -> tuple[set[int], set[int]]:
    report = executed(client, run)
    return set(report.seconds), set(report.device_seconds)


class Costs:
    """What sleeping and products take, whatever they do."""

    def __init__(self, slow_s: float, product_s: float) -> None:
        self.by_type = {"Slow": slow_s, "MatMul": product_s}

    def seconds(self, op: Op, graph: Graph) -> float | None:
        return self.by_type.get(op.op_type)


def test_each_op_goes_where_it_ends_first(mixed_client: Client) -> None:
    graph = slow_and_large(8, 8, 256)
    placed = scatter(graph, mixed_client)
    bound = bind_graph(placed, {}, costs=Costs(0.05, 100.0), gpu_costs=Costs(100.0, 0.01))
    assert_right(mixed_client.compute(bound).result(), graph)
    on_cpu, on_gpu = where_ops_ran(mixed_client, bound.run)
    products = {op.id for op in graph.live_ops if op.op_type == "MatMul"}
    assert on_gpu == products
    assert on_cpu == {op.id for op in graph.live_ops} - products


@pytest.mark.parametrize("threshold", [256 * 256, 256 * 256 + 1])
def test_a_threshold_overrides_costs(mixed_client: Client, threshold: int) -> None:
    graph = slow_and_large(4, 4, 256)
    placed = scatter(graph, mixed_client)
    bound = bind_graph(placed, {}, gpu_costs=FAST, gpu_matmul_threshold=threshold)
    assert_right(mixed_client.compute(bound).result(), graph)
    _, on_gpu = where_ops_ran(mixed_client, bound.run)
    products = {op.id for op in graph.live_ops if op.op_type == "MatMul"}
    assert on_gpu == (products if threshold == 256 * 256 else set())


def test_idle_cpus_take_work_from_a_gpu_that_has_too_much(mixed_client: Client) -> None:
    builder = Builder("long")
    root = builder.constant(np.float32([1]), name="root")
    builder.output(
        **{f"y{i}": builder.op("Slow", root, domain="ferroflow", duration=0.03) for i in range(30)}
    )
    graph = builder.to_graph()
    placed = scatter(graph, mixed_client)

    # That a GPU is told to be faster, and is not.
    bound = bind_graph(placed, {}, costs=Costs(0.03, 0), gpu_costs=Costs(0.01, 0))
    assert_right(mixed_client.compute(bound).result(), graph)
    by_worker = mixed_client.run(lambda dask_worker: dask_worker.state.executed_count)
    assert sum(count > 0 for count in by_worker.values()) == 3


def test_workers_learn_durations_from_the_device(mixed_client: Client) -> None:
    graph = generate_graph("matmul-chain", n_ops=3, m=128)
    bound = bind_graph(scatter(graph, mixed_client), {}, gpu_costs=FAST, gpu_matmul_threshold=1)
    mixed_client.compute(bound).result()

    def learned(dask_scheduler: Any) -> list[str]:
        known = dask_scheduler.extensions["stealing"].costs._kinds_s
        return [kind for kind in known if kind.startswith("MatMul") and kind.endswith("on a GPU")]

    assert soon(lambda: mixed_client.run_on_scheduler(learned), within_s=10)  # a little after they have ended


@pytest.mark.parametrize(
    ("n", "m", "memory_nbytes"),
    [
        pytest.param(60, 256, 16 * 4 * 256 * 256, id="15 MB on 4"),
        pytest.param(80, 5793, 2**31, id="10 GB on 2", marks=pytest.mark.slow),
    ],
)
def test_more_results_than_the_device_holds_are_spilled(n: int, m: int, memory_nbytes: int) -> None:
    nbytes = 4 * m * m
    builder = Builder("many")
    a = builder.constant(np.full((m, m), 0.5, np.float32), name="a")
    values = [a]
    for _ in range(n):
        values.append(builder.op("Add", values[-1], a))
    builder.output(**{f"y{i}": value for i, value in enumerate(values[1:])})
    with device_client(EMULATED, workers=0, emulated={"memory_nbytes": memory_nbytes}) as client:
        install(client)
        kept = client.persist(bind_graph(scatter(builder.to_graph(), client), {}))
        wait(kept)
        usage = usage_of(client)
        assert usage.used_nbytes <= memory_nbytes < n * nbytes
        assert usage.to_host >= n - memory_nbytes // nbytes
        for i in range(0, n, 7):
            (value,) = client.compute(kept.only(f"y{i}")).result().values()
            assert (value == 0.5 * (i + 2)).all()


def test_a_gpu_worker_is_lost(mixed_client: Client) -> None:
    graph = slow_and_large(20, 20, 128)
    bound = bind_graph(scatter(graph, mixed_client), {}, gpu_costs=FAST)
    future = mixed_client.compute(bound)
    (gpu,) = gpu_workers(mixed_client)

    def end() -> None:
        import os

        os._exit(1)

    # Kept: what nobody waits for is not run.
    ended = mixed_client.submit(end, workers=[gpu], retries=0, priority=10, pure=False)
    assert_right(future.result(), graph)
    assert soon(lambda: gpu not in workers_of(mixed_client), within_s=60)
    assert soon(lambda: count_gpus(mixed_client) == 1, within_s=90)  # its nanny has started another
    del ended


def test_what_cannot_fit_is_an_error_and_no_wait() -> None:
    n = 2_500_000 // 4
    builder = Builder("too large together")
    x = builder.constant(np.ones(n, np.float32), name="x")
    parts = [builder.op("Add", x, x) for _ in range(6)]
    builder.output(y=builder.op("Concat", *parts, axis=0, name="all"))
    graph = builder.to_graph()
    with device_client(EMULATED, workers=0, emulated={"memory_nbytes": 10_000_000}) as client:
        install(client)
        # Each part fits, and is spilled for the next; all of them and the result do not.
        with pytest.raises(KernelError, match=r"op 'all' \(Concat\), of .* B of operands, ran out of memory"):
            client.compute(bind_graph(graph, {})).result(timeout=60)
        found = client.compute(bind_graph(products_of(8), {})).result(timeout=60)
        assert_right(found, products_of(8))


def products_of(m: int) -> Graph:
    return generate_graph("matmul-chain", n_ops=2, m=m)


@pytest.mark.parametrize("message", ["hello", {"kind": 3}, {"kind": "x", "seconds": -1.0}, {}])
def test_what_anybody_says_of_devices_takes_no_policy_off(mixed_client: Client, message: Any) -> None:
    mixed_client.log_event("ferroflow-devices", message)
    assert installed(mixed_client) is not None
    graph = products_of(8)
    assert_right(mixed_client.compute(bind_graph(graph, {})).result(), graph)


def test_batches_leave_no_log_on_the_device(gpu_client: Client) -> None:
    builder = Builder("model", opset=21)
    x = builder.input("x", "float32", ("n", 4))
    builder.output(y=builder.op("Relu", x))
    graph = builder.to_graph()
    given = np.random.default_rng(0).standard_normal((40, 4), dtype=np.float32)
    found = gpu_client.compute(Model(graph).map_batches(da.from_array(given, chunks=(4, 4)))).result()
    np.testing.assert_array_equal(found, np.maximum(given, 0))
    assert executed(gpu_client, "").executed_ops == 0


def test_a_device_that_fails_gets_another_process() -> None:
    with device_client(EMULATED, workers=0) as client:
        install(client)
        graph = generate_graph("matmul-chain", n_ops=2, m=16)
        placed = scatter(graph, client)
        before = client.run(os.getpid)

        def break_device() -> None:
            from ferroflow_dask.devices import attached

            runner = attached()
            assert runner is not None
            runner.device.pending_error = RuntimeError("unspecified launch failure")  # type: ignore[attr-defined]

        client.run(break_device)
        with pytest.raises(KernelError, match=r"\(MatMul\) failed on emulated: unspecified launch failure"):
            client.compute(bind_graph(placed, {})).result()

        def is_another() -> bool:
            present = client.run(os.getpid, on_error="ignore")  # it may be closing just now
            return bool(count_gpus(client) and present) and not present.items() & before.items()

        assert soon(is_another, 90)  # a worker may take 30 s to close
        assert_right(client.compute(bind_graph(scatter(graph, client), {})).result(), graph)


def test_a_worker_that_is_not_told_to_use_its_gpu_is_an_ordinary_one() -> None:
    with (
        LocalCluster(n_workers=1, resources={"GPU": 1}, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        install(client)
        graph = generate_graph("matmul-chain", n_ops=3, m=16)
        assert_right(client.compute(bind_graph(scatter(graph, client), {})).result(), graph)

        def learned(dask_scheduler: Any) -> tuple[str, int]:
            extension = dask_scheduler.extensions["stealing"]
            (worker,) = extension.view.workers.values()
            return worker.kind, len(extension.costs._kinds_s)

        assert client.run_on_scheduler(learned) == ("cpu", 1)


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, [0, 1]), ("3,5", ["3", "5"]), ("GPU-8f2a, MIG-1", ["GPU-8f2a", "MIG-1"])]
)
def test_gpus_are_named_as_the_driver_does(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[Any]
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert as_the_driver_counts([0, 1]) == expected


class TestCosts:
    def annotations(self, **options: Any) -> dict[str, Any]:
        builder = Builder("unknown shapes")
        x = builder.input("x", "float32", ("n", 16))
        y = builder.op("NonZero", builder.op("MatMul", x, builder.constant(np.ones((16, 16), np.float32))))
        builder.output(y=builder.op("Cast", y, to=1))
        bound = bind_graph(builder.to_graph(), {"x": np.ones((4, 16), np.float32)}, **options)
        layers = bound.__dask_graph__().layers.values()
        (found,) = [layer.annotations["ferroflow_cost"] for layer in layers if layer.annotations]
        return {key[0].partition("-")[0]: cost for key, cost in found.items()}

    def test_what_is_not_known_is_not_forbidden(self) -> None:
        found = self.annotations(costs=Costs(0, 0.5), gpu_costs=Costs(0, 0.01))
        assert found == {
            "matmul": {"cpu": 0.5, "gpu": 0.01},
            "nonzero": {"cpu": None, "gpu": None},
            "cast": {"cpu": None, "gpu": None},
        }

    def test_a_threshold_holds_where_nothing_is_known(self) -> None:
        found = self.annotations(costs=Costs(0, 0.5), gpu_matmul_threshold=1)
        assert {name: set(cost) for name, cost in found.items()} == {
            "matmul": {"cpu"},  # of unknown size
            "nonzero": {"cpu"},
            "cast": {"cpu"},
        }
