"""Whole models in onnxruntime sessions on a device; where CUDA's provider would be, the CPU's stands in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask.array as da
import numpy as np
import onnxruntime
import pytest
from distributed import Client
from models import mlp
from zict import LRU

from ferroflow_dask import Model, executed, install
from ferroflow_dask.deploy import DeviceChoice, device_client
from ferroflow_dask.devices import DeviceUsage
from ferroflow_dask.devices.workers import device_usage
from ferroflow_dask.graph import Builder, Graph, graph_from_onnx
from ferroflow_dask.kernels import evaluate, session
from ferroflow_dask.kernels import ort_graph as sessions
from ferroflow_dask.kernels.session_settings import SessionSettings
from ferroflow_dask.lowering import bind_graph, scatter

pytestmark = pytest.mark.cluster

CUDA = "CUDAExecutionProvider"
X = np.random.default_rng(0).standard_normal((12, 784), dtype=np.float32)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    options = {"execution_provider": ("CPUExecutionProvider", {})}
    with device_client(DeviceChoice("emulated"), workers=0, emulated=options) as client:
        install(client)
        yield client


@pytest.fixture
def graph() -> Graph:
    return graph_from_onnx(mlp())


def usage_of(client: Client) -> DeviceUsage:
    usage = device_usage(client)
    assert usage is not None
    return usage


def test_batches_cross_once_each_way_and_weights_stay(client: Client, graph: Graph) -> None:
    before = usage_of(client)
    found = client.compute(Model(graph).map_batches(da.from_array(X, chunks=(4, -1)))).result()
    (expected,) = evaluate(graph, {"x": X}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    usage = usage_of(client).since(before)
    assert (usage.ops, usage.host_ops) == (3 * len(graph.live_ops), 0)
    assert (usage.to_device, usage.to_host) == (3, 3)
    assert (usage.nbytes_to_device, usage.nbytes_to_host) == (X.nbytes, expected.nbytes)


@pytest.mark.parametrize("is_scattered", [False, True])
def test_a_whole_graph_is_one_session_there(client: Client, graph: Graph, is_scattered: bool) -> None:
    before = usage_of(client)
    placed = scatter(graph, client) if is_scattered else graph
    bound = bind_graph(placed, {"x": X}, granularity="whole")
    found = client.compute(bound).result()
    for name, expected in evaluate(graph, {"x": X}).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)
    report = executed(client, bound.run)
    assert report.executed_ops == len(report.device_seconds) == len(graph.live_ops)
    usage = usage_of(client).since(before)
    assert (usage.ops, usage.to_device, usage.to_host) == (len(graph.live_ops), 1, 1)
    assert usage.batches == 0  # nothing ran by the device's own kernels


def test_without_such_a_session_the_device_computes_by_itself(graph: Graph) -> None:
    options = {"execution_provider": (CUDA, {})}
    with device_client(DeviceChoice("emulated"), workers=0, emulated=options) as client:
        install(client)
        found = client.compute(bind_graph(graph, {"x": X}, granularity="whole")).result()
        for name, expected in evaluate(graph, {"x": X}).items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)
        usage = usage_of(client)
        assert (usage.ops, usage.host_ops) == (len(graph.live_ops), 0)
        assert usage.to_device > 1  # weights, too


def test_another_precision_is_another_session(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def note(_graph: Graph, _constants: Any, execution: Any, _settings: Any) -> Any:
        opened.append(execution)
        return lambda inputs: inputs

    monkeypatch.setattr(session, "_session", note)
    monkeypatch.setattr(session, "_runners", LRU(4, {}))
    options = [{"device_id": "0", "use_tf32": digit} for digit in "0101"]
    for one in options:
        session.session_of(graph, "token", {}, (CUDA, one))
    assert opened == [(CUDA, one) for one in options[:2]]


def test_a_list_of_axes_that_is_empty_is_for_no_session() -> None:
    builder = Builder("squeeze")
    x = builder.input("x", "float32", (1, "n"))
    builder.output(y=builder.op("Squeeze", x, builder.constant(np.int64([]), "axes")))
    assert session.session_of(builder.to_graph(), "empty axes", {}, ("CPUExecutionProvider", {})) is None


def test_why_there_is_no_session_is_told(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA's provider")
    constants: dict[str, Any] = {}
    one_thread = SessionSettings(1)
    assert sessions.open_graph(graph, constants, one_thread, (CUDA, {})) == f"this onnxruntime has no {CUDA}"
    # As onnxruntime-gpu does where CUDA's libraries are missing, it falls back to the CPU.
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
    with pytest.warns(UserWarning, match=CUDA):
        reason = sessions.open_graph(graph, constants, one_thread, (CUDA, {"device_id": "0"}))
    assert reason == f"{CUDA} cannot be loaded here"
