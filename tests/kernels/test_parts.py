"""Graphs cut into sessions around the ops that onnxruntime must not or cannot compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from agreement import assert_same
from models import model_of, reference
from onnx import TensorProto
from onnx.helper import make_node as node

from ferroflow_dask import Model, load_onnx
from ferroflow_dask.graph import Graph, graph_from_onnx
from ferroflow_dask.kernels import evaluate, session
from ferroflow_dask.kernels.choice import provider_names
from ferroflow_dask.kernels.ort_graph import GraphSession
from ferroflow_dask.kernels.parts import Parts, kept_ops, open_parts, rounds_of
from ferroflow_dask.kernels.session_settings import SessionSettings
from ferroflow_dask.lowering import bind_graph

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
X = np.random.default_rng(0).standard_normal((1, 3, 7, 7)).astype(np.float32)


def resized(scale: float = 1.5, constant: bool = True) -> onnx.ModelProto:
    """Return a convolution on each side of a Resize that aligns corners."""
    rng = np.random.default_rng(0)
    align = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    nodes = [
        node("Conv", ["x", "w"], ["a"], "before", pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["b"], "positive"),
        node("Resize", ["b", "", "scales"], ["c"], "larger", **align),
        node("Conv", ["c", "w"], ["d"], "behind", pads=[1, 1, 1, 1]),
        node("Sigmoid", ["d"], ["y"], "last"),
    ]
    scales = np.float32([1, 1, scale, scale])
    weights = {"w": rng.standard_normal((3, 3, 3, 3)).astype(np.float32)}
    inputs: dict[str, Any] = {"x": (FLOAT, ["n", 3, 7, 7])}
    if constant:
        weights["scales"] = scales
    else:
        inputs["scales"] = (FLOAT, [4])
    return model_of(nodes, inputs, ["y"], initializers=weights)


def parts(graph: Graph) -> Any:
    return open_parts(graph, {}, SessionSettings(1), provider_names())


@pytest.mark.parametrize(
    ("scale", "constant", "is_whole"),
    [
        pytest.param(2, True, True, id="an integral scale"),
        pytest.param(8 / 7, True, False, id="a scale that is not exact in single precision"),
        pytest.param(1.5, True, False, id="a scale that rounds the size"),
        pytest.param(2, False, False, id="a scale that is an input"),
    ],
)
def test_only_the_case_that_differs_is_kept(scale: float, constant: bool, is_whole: bool) -> None:
    model = resized(scale, constant)
    graph = graph_from_onnx(model)
    found = parts(graph)
    assert isinstance(found, GraphSession if is_whole else Parts)
    values = {"x": X} if constant else {"x": X, "scales": np.float32([1, 1, scale, scale])}
    assert_same(found({**graph.constants, **values})["y"], reference(model, values)["y"])


@pytest.mark.parametrize(
    ("nodes", "inputs"),
    [
        pytest.param(
            [node("Gelu", ["x"], ["g"], domain="com.microsoft"), node("ReduceSum", ["g"], ["y"])],
            {"x": (FLOAT, [3])},
            id="a sum of what cannot be inferred",
        ),
        pytest.param([node("DFT", ["x"], ["y"])], {"x": (TensorProto.DOUBLE, [1, 8, 1])}, id="a precise one"),
        pytest.param(
            [node("Reshape", ["x", "s"], ["r"]), node("Concat", ["r", "r"], ["y"], axis=0)],
            {"x": (FLOAT, [8]), "s": (INT64, ["n"])},
            id="a concatenation of unknown rank",
        ),
        pytest.param([node("NonZero", ["x"], ["y"])], {"x": (FLOAT, None)}, id="places, rank unknown"),
    ],
)
def test_other_types_and_unknown_ranks_are_not_kept(nodes: Any, inputs: Any) -> None:
    graph = graph_from_onnx(model_of(nodes, inputs, ["y"], domains={"com.microsoft": 1}))
    assert not kept_ops(graph, {})


def test_what_onnxruntime_has_no_kernel_for_is_cut_out() -> None:
    """Its error names the node; types of what other parts make are known when they run."""
    nodes = [
        node("Cast", ["x"], ["i"], "to_i", to=TensorProto.UINT16),
        node("Max", ["i", "i"], ["m"], "largest"),
        node("Cast", ["m"], ["f"], "to_f", to=FLOAT),
        node("Sqrt", ["f"], ["y"], "root"),
    ]
    model = model_of(nodes, {"x": (FLOAT, [3])}, ["y"])
    graph = graph_from_onnx(model)
    found = parts(graph)
    assert isinstance(found, Parts)
    assert [part.ops for part in found.report] == [("to_i",), ("largest",), ("to_f", "root")]
    x = np.float32([1, 2, 3])
    assert_same(found({"x": x})["y"], reference(model, {"x": x})["y"])


def test_rounds_hold_what_can_run_together() -> None:
    nodes = [
        node("Neg", ["x"], ["a"], "a"),
        node("Abs", ["x"], ["k1"], "k1"),
        node("Neg", ["k1"], ["b"], "b"),
        node("Add", ["a", "b"], ["k2"], "k2"),
        node("Neg", ["a"], ["c"], "c"),
        node("Neg", ["k2"], ["y"], "y"),
        node("Neg", ["c"], ["z"], "z"),
    ]
    graph = graph_from_onnx(model_of(nodes, {"x": (FLOAT, [3])}, ["y", "z"]))
    kept = {op.id: "" for op in graph.ops if op.name.startswith("k")}
    names = [
        (" ".join(op.name for op in together), " ".join(op.name for op in alone))
        for together, alone in rounds_of(graph, kept)
    ]
    assert names == [("a c z", "k1"), ("b", "k2"), ("y", "")]


def test_a_cut_model_warns_once_and_computes_in_all_granularities(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[str] = []
    monkeypatch.setattr(session.logger, "warning", lambda text, *told: records.append(text % told))
    model = resized()
    graph = graph_from_onnx(model)
    for n in (1, 2, 1):
        x = np.repeat(X, n, axis=0)
        found = bind_graph(graph, {"x": x}, granularity="whole").compute(scheduler="sync")
        assert_same(found["y"], reference(model, {"x": x})["y"])
    (record,) = [record for record in records if "cut into" in record]
    assert record.startswith("model 'test' is cut into 2 sessions around: reference: larger (align_corners")
    assert_same(evaluate(graph, {"x": X})["y"], found["y"])


def test_a_session_that_fails_gives_way_to_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic quantization of an empty tensor is refused only when it runs, for instance."""
    records: list[str] = []
    monkeypatch.setattr(session.logger, "warning", lambda text, *told: records.append(text % told))

    def refuse(*_: Any) -> Any:
        raise RuntimeError("not today")

    monkeypatch.setattr(GraphSession, "__call__", refuse)
    model = model_of([node("Neg", ["x"], ["y"])], {"x": (FLOAT, [3])}, ["y"])
    graph = graph_from_onnx(model)
    for _ in range(2):
        found = bind_graph(graph, {"x": np.ones(3, np.float32)}, granularity="whole").compute(
            scheduler="sync"
        )
        assert found["y"].tolist() == [-1, -1, -1]
    assert records == ["model 'test' is computed op by op: its session failed: not today"]


@pytest.mark.parametrize("name", ["BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4"])
def test_types_without_arrays_cross_the_border_of_a_session(name: str) -> None:
    element = getattr(TensorProto, name)
    nodes = [
        node("Cast", ["x"], ["a"], to=FLOAT),
        node("Add", ["a", "a"], ["b"]),
        node("Cast", ["b"], ["c"], to=element),
        node("Identity", ["c"], ["y"]),
        node("Cast", ["c"], ["z"], to=FLOAT),
    ]
    graph = graph_from_onnx(model_of(nodes, {"x": (element, [3])}, ["y", "c", "z"], opset=21, ir_version=10))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
    found = parts(graph)
    assert isinstance(found, GraphSession)
    results = found({"x": np.float32([0, 1, 3]).astype(dtype)})
    for output in ("y", "c"):
        assert results[output].dtype == dtype
        assert results[output].astype(np.float32).tolist() == [0, 2, 6]
    assert results["z"].tolist() == [0, 2, 6]


def test_a_model_tells_its_parts() -> None:
    told = load_onnx(resized()).providers()
    assert [str(part) for part in told] == [
        "onnxruntime: 2 ops",
        "reference: larger (align_corners aligns the rounded, not the exact size)",
        "onnxruntime: 2 ops",
    ]
    (part,) = Model(graph_from_onnx(resized(2))).providers()
    assert (part.provider, len(part.ops), part.reason) == ("onnxruntime", 5, "")


def test_a_model_without_sessions_tells_who_computes_each_op() -> None:
    told = load_onnx(resized(2)).providers(providers=["array", "reference"])
    assert {part.provider for part in told} == {"array", "reference"}
    assert sum(len(part.ops) for part in told) == 5
