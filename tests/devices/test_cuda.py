"""A real GPU, where there is one: what the emulated device cannot tell."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import dask.array as da
import numpy as np
import onnx
import onnxruntime
import pytest
from distributed import Client, wait
from models import light_models, mlp, randomize

from ferroflow_dask import Model, calibrate, install, use_gpus
from ferroflow_dask.deploy import DeviceChoice, device_client
from ferroflow_dask.deploy.cuda import as_the_driver_counts
from ferroflow_dask.devices import DeviceRunner
from ferroflow_dask.devices.workers import device_usage, gpu_workers
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.graph import Builder, generate_graph, graph_from_onnx
from ferroflow_dask.kernels import evaluate, make_plan
from ferroflow_dask.lowering import bind_graph, scatter

#: A product of two 1024² matrices is wrong by no more in single precision, and by some 3e-4 in TF32.
FP32_ERROR = 5e-6


def n_gpus() -> int:
    if find_spec("cupy") is None:
        return 0
    from ferroflow_dask.devices.cuda import count_devices

    return count_devices()


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not n_gpus(), reason="there is no GPU, or no CuPy")]


def error_of_a_product(precision: str) -> float:
    from ferroflow_dask.devices.cuda import CudaDevice

    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 1024, 1024), dtype=np.float32)
    device = CudaDevice(precision=precision)
    with device.use():
        stack = device.to_device(np.stack([a, a]))
        found = device.to_host(device.product(device.to_device(a), device.to_device(b)))
        stacked = device.to_host(device.product(stack, device.to_device(np.stack([b, b]))))
    expected = a.astype(np.float64) @ b.astype(np.float64)
    errors = [float(np.linalg.norm(one - expected) / np.linalg.norm(expected)) for one in (found, *stacked)]
    assert max(errors) < 10 * min(errors), "one at a time and in a batch are as precise"
    return max(errors)


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [("fp32", 0, FP32_ERROR), ("tf32", FP32_ERROR, 2e-3), ("fp16", FP32_ERROR, 2e-3), ("bf16", 1e-4, 2e-2)],
)
def test_products_are_as_precise_as_asked_for(precision: str, least: float, most: float) -> None:
    assert least <= error_of_a_product(precision) <= most


def test_a_device_that_is_not_there() -> None:
    from ferroflow_dask.devices.cuda import CudaDevice

    with pytest.raises(
        ClusterError, match=f"there is no device cuda:{n_gpus()}; this process sees {n_gpus()}"
    ):
        CudaDevice(n_gpus())


def test_a_plan() -> None:
    from ferroflow_dask.devices.cuda import CudaDevice

    graph = generate_graph("matmul-parallel", n_branches=4, ops_per_branch=8, m=256)
    names = list(graph.constants)
    plan = make_plan(graph, graph.live_ops, names, list(graph.outputs))
    runner = DeviceRunner(CudaDevice())
    spent: list[float] = []
    found = runner.run(
        plan,
        [graph.constants[name] for name in names],
        ("array",),
        lambda ids, seconds, _is_on_device: spent.extend([seconds] * len(ids)),
    )
    for value, expected in zip(found, evaluate(graph).values(), strict=True):
        np.testing.assert_allclose(value.to_host(), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    runner.drain()
    assert len(spent) == len(graph.live_ops)
    assert all(seconds > 0 for seconds in spent)
    usage = runner.usage()
    assert (usage.to_device, usage.to_host, usage.mean_batch) == (2, 4, 4)


@pytest.fixture(scope="module")
def gpu_client() -> Iterator[Client]:
    if find_spec("dask_cuda") is None:
        pytest.skip("dask-cuda is not installed")
    with device_client(DeviceChoice("cuda", 0), workers=2) as client:
        install(client)
        yield client


def as_computed(client: Client, graph: Any, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.compute(bind_graph(scatter(graph, client), {}, **options)).result()
    return found


def test_a_cluster_of_a_gpu_and_cpus(gpu_client: Client) -> None:
    graph = generate_graph("matmul-parallel", n_branches=4, ops_per_branch=4, m=512)
    before = device_usage(gpu_client)
    found = as_computed(gpu_client, graph, gpu_matmul_threshold=1)
    for name, expected in evaluate(graph).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    usage = device_usage(gpu_client).since(before)
    assert usage.ops == len(graph.live_ops)
    assert (usage.to_device, usage.to_host) == (len(graph.constants), len(graph.outputs))
    assert calibrate(gpu_client).gpu_flop_rate > 1e11


def test_more_than_the_device_keeps() -> None:
    dask_cuda = pytest.importorskip("dask_cuda")
    n, nbytes, kept_nbytes = 50, 4 * 1024 * 1024, 64_000_000
    builder = Builder("many")
    a = builder.constant(np.full((1024, 1024), 0.5, np.float32), name="a")
    values = [a]
    for _ in range(n):
        values.append(builder.op("Add", values[-1], a))
    builder.output(**{f"y{i}": value for i, value in enumerate(values[1:])})
    with (
        dask_cuda.LocalCUDACluster(
            CUDA_VISIBLE_DEVICES=as_the_driver_counts([0]),
            device_memory_limit=kept_nbytes,
            resources={"GPU": 1},
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        use_gpus(client)
        install(client)
        results = client.persist(
            bind_graph(scatter(builder.to_graph(), client), {})
        )  # it has no other workers
        wait(results)
        usage = device_usage(client)
        assert (usage.ops, usage.host_ops) == (n, 0)
        assert usage.to_host >= n - kept_nbytes // nbytes
        assert usage.nbytes_to_host == nbytes * usage.to_host
        found = client.compute(results).result()
    for i in range(n):
        assert (found[f"y{i}"] == 0.5 * (i + 2)).all()


def test_a_model_in_a_session_of_cudas(gpu_client: Client) -> None:
    execution = "CUDAExecutionProvider"
    if execution not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu does not stand in onnxruntime's place")
    graph = graph_from_onnx(mlp())
    x = np.random.default_rng(0).standard_normal((8, 784), dtype=np.float32)
    before = device_usage(gpu_client)
    y = Model(graph).map_batches(da.from_array(x, chunks=(4, -1)))
    found = gpu_client.compute(y, workers=gpu_workers(gpu_client)).result()
    (expected,) = evaluate(graph, {"x": x}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)  # which TF32 fails
    usage = device_usage(gpu_client).since(before)
    assert (usage.ops, usage.to_device, usage.to_host) == (2 * len(graph.live_ops), 2, 2)


@pytest.mark.parametrize("path", light_models(), ids=lambda path: path.stem)
def test_models(gpu_client: Client, path: Any) -> None:
    graph = graph_from_onnx(randomize(onnx.load(path)))  # all weights of one kind are equal in the file
    (name,) = graph.inputs
    images = np.random.default_rng(0).standard_normal((2, 3, 224, 224), dtype=np.float32)
    y = Model(graph).map_batches(da.from_array(images, chunks=(1, -1, -1, -1)))
    found = gpu_client.compute(y, workers=gpu_workers(gpu_client)).result()
    expected = np.concatenate([next(iter(evaluate(graph, {name: x[None]}).values())) for x in images])
    near = 1e-3 * np.abs(expected).max()
    assert np.abs(expected[0] - expected[1]).max() > 10 * near
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=near)
