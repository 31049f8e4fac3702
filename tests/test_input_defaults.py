"""Initializers that a model lists as inputs, too, are defaults: whoever computes it may give others."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import onnx
import pytest
from agreement import assert_equal_to_reference, assert_same
from command_line import USAGE, answer, assert_one_line, ferroflow
from distributed import Client
from models import model_of, reference
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.helper import make_node as node

from ferroflow_dask import Graph, bind, load_onnx, place
from ferroflow_dask.cost import ClusterProfile
from ferroflow_dask.exceptions import BindError
from ferroflow_dask.graph.defaults import with_inputs
from ferroflow_dask.kernels import evaluate

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
#: Below and above the size [B] from which on weights travel beside a graph.
WIDTHS = (3, 1200)


def layer(width: int, ir_version: int = 8) -> onnx.ModelProto:
    """Return y = relu(x) * w + b, where `w` may be given, and `b` may not from IR version 4 on."""
    nodes = [node("Relu", ["x"], ["r"]), node("Mul", ["r", "w"], ["m"]), node("Add", ["m", "b"], ["y"])]
    inputs: dict[str, Any] = {"x": (FLOAT, ["rows", width]), "w": (FLOAT, [width])}
    if ir_version < 4:  # which lists them all
        inputs["b"] = (FLOAT, [width])
    initializers = {"w": np.full(width, 2, np.float32), "b": np.arange(width, dtype=np.float32)}
    return model_of(nodes, inputs, ["y"], initializers=initializers, opset=13, ir_version=ir_version)


def given(width: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return an input, and what may be given in place of the default."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((6, width), np.float32), rng.standard_normal(width, np.float32)


@pytest.mark.parametrize("ir_version", [3, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_default_counts_until_another_value_is_given(width: int, ir_version: int) -> None:
    model = layer(width, ir_version)
    graph = load_onnx(model)
    x, w = given(width)
    assert list(graph.inputs) == ["x"]
    assert list(graph.defaults) == (["w", "b"] if ir_version == 3 else ["w"])
    assert_equal_to_reference(model, graph, x=x)
    assert_equal_to_reference(model, graph, x=x, w=w)
    assert_equal_to_reference(model, graph, x=x)  # the graph is what it was


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("placement", ["ops", "bundles", "whole"])
@pytest.mark.parametrize("providers", [None, ["array", "reference"]], ids=["session", "op by op"])
def test_bound_graphs_take_it(width: int, placement: str, providers: list[str] | None) -> None:
    model = layer(width)
    graph = load_onnx(model)
    x, w = given(width)
    for inputs in ({"x": x, "w": w}, {"x": x}):
        bound = bind(graph, inputs, placement=placement, profile=ClusterProfile((1, 1)), providers=providers)
        assert bound.placement == placement
        assert_same(bound.compute(scheduler="sync")["y"], reference(model, inputs)["y"])


@pytest.mark.parametrize("width", WIDTHS)
def test_batches_take_it_whole(width: int) -> None:
    model = layer(width)
    graph = load_onnx(model)
    x, w = given(width)
    y = graph.map_batches({"x": da.from_array(x, (2, -1)), "w": w})
    assert_same(y.compute(scheduler="sync"), reference(model, {"x": x, "w": w})["y"])
    default = graph.map_batches(da.from_array(x, (2, -1)))
    assert_same(default.compute(scheduler="sync"), reference(model, {"x": x})["y"])


@pytest.mark.cluster
@pytest.mark.parametrize("width", WIDTHS)
def test_a_placed_default_gives_way(process_client: Client, width: int) -> None:
    model = layer(width)
    graph = place(load_onnx(model), process_client)
    x, w = given(width)
    for inputs in ({"x": x, "w": w}, {"x": x}):
        expected = reference(model, inputs)["y"]
        for placement in ("ops", "whole"):
            bound = bind(graph, inputs, placement=placement)
            assert_same(process_client.compute(bound).result()["y"], expected)
        batches = graph.map_batches({**inputs, "x": da.from_array(x, (2, -1))})
        assert_same(process_client.compute(batches).result(), expected)


def test_shapes_that_came_of_a_default_are_not_kept() -> None:
    nodes = [node("Reshape", ["x", "shape"], ["r"]), node("Relu", ["r"], ["y"])]
    model = model_of(
        nodes, {"x": (FLOAT, [6]), "shape": (INT64, ["n"])}, [], initializers={"shape": np.int64([2, 3])}
    )
    model.graph.output.append(onnx.helper.make_tensor_value_info("y", FLOAT, ["a", "b"]))
    graph = load_onnx(model)
    assert graph.spec("r").shape == (2, 3)
    x = np.arange(6, dtype=np.float32)
    assert_equal_to_reference(model, graph, x=x, shape=np.int64([3, 2]))
    opened = with_inputs(graph, ["shape"])
    assert [(str(opened.spec(name).dtype), opened.spec(name).is_static) for name in "ry"] == [
        ("float32", False)
    ] * 2


def test_the_graph_with_an_input_for_its_default_is_made_once() -> None:
    graph: Graph = pickle.loads(pickle.dumps(load_onnx(layer(3))))
    assert with_inputs(graph, ["x", "z"]) is graph
    assert with_inputs(graph, ["x", "w"]) is with_inputs(graph, ["w"])
    assert list(with_inputs(graph, ["w"]).inputs) == ["x", "w"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"w": np.zeros(3)}, r"'w' has dtype float64, the graph takes float32\[3\]"),
        ({"w": np.zeros(4, np.float32)}, r"'w' has shape \[4\], the graph takes float32\[3\]"),
        ({"b": np.zeros(3, np.float32)}, r"no input 'b'; it takes x: .*; and, if given, w: float32\[3\]$"),
    ],
    ids=["dtype", "shape", "a constant"],
)
def test_what_does_not_fit_is_refused(inputs: dict[str, Any], message: str) -> None:
    graph = load_onnx(layer(3))
    x = np.zeros((1, 3), np.float32)
    with pytest.raises(BindError, match=message):
        graph.bind(x=x, **inputs)
    with pytest.raises(BindError, match=message):
        evaluate(graph, {"x": x, **inputs})


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(layer(3), "layer.onnx")
    for name, value in zip("xw", given(3), strict=True):
        np.save(f"{name}.npy", value)
    return tmp_path


@pytest.mark.parametrize(
    "how",
    [
        ("--policy", "sequential"),
        ("--workers", "1", "--no-processes"),
        ("--workers", "1", "--no-processes", "--batch", "2"),
    ],
    ids=["without Dask", "on a cluster", "in batches"],
)
def test_the_command_line_takes_it(files: Path, how: tuple[str, ...]) -> None:
    inputs = ("--input", "x=x.npy", "--input", "w=w.npy")
    answer("run", "--model", "layer.onnx", *inputs, "--output", "y.npz", *how)
    x, w = given(3)
    with np.load(files / "y.npz") as written:
        assert_same(written["y"], reference(layer(3), {"x": x, "w": w})["y"])


def test_the_command_line_tells_of_it(files: Path) -> None:
    facts = json.loads(answer("info", "--model", "layer.onnx", "--json").stdout)
    assert (facts["inputs"], facts["defaults"]) == ({"x": "float32[rows, 3]"}, {"w": "float32[3]"})
    np.save(files / "w.npy", np.zeros(3))
    told = ferroflow("run", "--model", "layer.onnx", "--input", "x=x.npy", "--input", "w=w.npy")
    assert_one_line(told.exit_code, told.stderr, USAGE, r"save array.astype\('float32'\) in 'w.npy'")
