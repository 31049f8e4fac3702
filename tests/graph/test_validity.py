"""Damaged and invalid models: refused with one line, or computed if onnxruntime loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from agreement import assert_same
from dask.array import from_array
from models import convolution, mlp, model_of, sparse_tensor
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node as node
from onnx.helper import make_tensor_value_info as info

from ferroflow_dask import ClusterProfile, load_onnx
from ferroflow_dask.exceptions import ModelError
from ferroflow_dask.graph import graph_from_onnx

FLOAT = TensorProto.FLOAT


X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)


def model(nodes: list[Any], opset: int = 18, **weights: Any) -> onnx.ModelProto:
    """Return a model from x to y, unchecked, with ONNX's domain declared only."""
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", [info("x", FLOAT, X.shape)], [info("y", FLOAT, X.shape)], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def two_relus(*names: str) -> onnx.ModelProto:
    """Return x → Relu → Relu → y; names of (input, output) pairs may be replaced."""
    first, middle, second, last = names or ("x", "h", "h", "y")
    nodes = [node("Relu", [first], [middle]), node("Relu", [second], [last])]
    return model(nodes)


def changed(change: Any, model: onnx.ModelProto | None = None) -> bytes:
    model = model or two_relus()
    change(model)
    return model.SerializeToString()


def short_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(TensorProto(name="w", data_type=FLOAT, dims=[9999], raw_data=b"1234"))


def negative_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(TensorProto(name="w", data_type=FLOAT, dims=[-1], raw_data=b"1234"))


def twice_the_same(model: onnx.ModelProto) -> None:
    model.graph.initializer.extend([numpy_helper.from_array(np.zeros(9999, np.float32), "w")] * 2)


BAD = {
    "an empty file": (b"", "is empty"),
    "a text": (b"This is no model, but it is long enough.", "is no ONNX model"),
    "half a model": (mlp().SerializeToString()[:50_000], "is no ONNX model, or is truncated"),
    "a message without a graph": (onnx.ModelProto(ir_version=8).SerializeToString(), "has no graph"),
    "no outputs": (changed(lambda m: m.graph.ClearField("output")), "has no outputs"),
    "no IR version": (changed(lambda m: m.ClearField("ir_version")), "is not valid ONNX"),
    "an operator that does not exist": (
        changed(lambda m: setattr(m.graph.node[0], "op_type", "Rlu")),
        "is not valid ONNX: No Op registered for Rlu",
    ),
    "a value that nothing produces": (
        two_relus("x", "h", "nope", "y").SerializeToString(),
        "however input 'nope' of node: name: OpType: Relu is not output of any previous nodes.",
    ),
    "nodes in a cycle": (two_relus("y", "h", "h", "y").SerializeToString(), "is not valid ONNX"),
    "an output that nothing produces": (two_relus("x", "h", "h", "z").SerializeToString(), "'y'"),
    "a missing attribute": (
        changed(lambda m: setattr(m.graph.node[0], "op_type", "Cast")),
        "is not valid ONNX: Required attribute 'to' is missing",
    ),
    "a Constant without value": (
        changed(lambda m: m.graph.node.append(node("Constant", [], ["c"]))),
        "with the outputs ['c'] has no value",
    ),
    "a weight shorter than its shape": (changed(short_weight), "weight 'w' is damaged"),
    "a weight of negative size": (changed(negative_weight), "weight 'w' is damaged: its shape is [-1]"),
    "two weights of one name": (changed(twice_the_same), "has two initializers named 'w'"),
    "a weight without name": (
        changed(lambda m: m.graph.initializer.append(numpy_helper.from_array(np.float32([1])))),
        "has an initializer without name",
    ),
    "a sparse weight beyond its shape": (
        changed(lambda m: m.graph.sparse_initializer.append(sparse_tensor([1], [9], [2, 2], "s"))),
        "sparse tensor 's' is damaged",
    ),
    "a sparse input": (
        changed(
            lambda m: m.graph.input.add(name="s").type.CopyFrom(helper.make_sparse_tensor_type_proto(1, [2]))
        ),
        "input 's' is a sparse_tensor_type",
    ),
    "an input without type": (changed(lambda m: m.graph.input[0].ClearField("type")), "is not valid ONNX"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_models_are_answered_with_one_line_that_names_the_file(tmp_path, content, message):
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError) as error:
        graph_from_onnx(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "\n" not in text
    with pytest.raises(ModelError, match=r"^model: "):
        graph_from_onnx(content)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope.onnx", r"nope\.onnx: there is no such file$"),
        ("", r"is a folder; give the \.onnx file in it$"),
        ("file/m.onnx", "cannot be read: Not a directory"),
    ],
    ids=["nothing", "a folder", "below a file"],
)
def test_what_is_no_file_is_named(tmp_path, name, message):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match=message):
        graph_from_onnx(tmp_path / name)


W = np.float32([1, 2, 3, 4])
REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "an operator of onnxruntime in ONNX's domain": (
        lambda: model([node("SimplifiedLayerNormalization", ["x", "w"], ["y"])], w=W),
        "No Op registered for SimplifiedLayerNormalization",
    ),
    "an operator that is newer than the opset": (
        lambda: model([node("LayerNormalization", ["x", "w"], ["y"])], 13, w=W),
        "No Op registered for LayerNormalization",
    ),
    "a domain that is not declared": (
        lambda: model([node("Gelu", ["x"], ["y"], domain="com.microsoft")]),
        "com.microsoft",
    ),
    "nodes out of order": (
        lambda: model([node("Relu", ["h"], ["y"]), node("Neg", ["x"], ["h"])]),
        "not output of any previous nodes",
    ),
}


def in_all_granularities(path: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    loaded = load_onnx(path)
    profile = ClusterProfile((1,))
    granularities = ("whole", "bundles", "ops")
    found = [
        loaded.bind(inputs, granularity=granularity, profile=profile).compute(scheduler="sync")
        for granularity in granularities
    ]
    return [loaded.evaluate(inputs), *found]


@pytest.mark.parametrize(("make", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_onnxruntime_loads_is_computed_with_a_warning(make: Any, complaint: str) -> None:
    content = make().SerializeToString()
    (expected,) = onnxruntime.InferenceSession(content).run(None, {"x": X})
    with pytest.warns(UserWarning, match="but onnxruntime loads it") as warned:
        found = in_all_granularities(content, {"x": X})
    assert complaint in str(warned[0].message)
    assert len(warned) == 1
    for one in found:
        assert_same(one["y"], expected)


def test_an_output_without_a_shape_is_no_matter() -> None:
    made = model([node("Relu", ["x"], ["y"])])
    made.graph.output[0].type.tensor_type.ClearField("shape")
    assert_same(load_onnx(made).evaluate(x=X)["y"], np.maximum(X, 0))


def test_an_operator_that_no_library_has_is_refused_with_both_answers() -> None:
    with pytest.raises(
        ModelError, match=r"^model: is not valid ONNX: No Op registered for Rlu.*onnxruntime: "
    ):
        load_onnx(model([node("Rlu", ["x"], ["y"])]))


#: Operators of ONNX's first drafts, which onnxruntime has up to opset 9, with attributes.
DRAFTS: dict[str, dict[str, Any]] = {
    "Affine": {"alpha": 2.0, "beta": 0.5},
    "ScaledTanh": {"alpha": 2.0, "beta": 0.5},
    "ImageScaler": {"scale": 2.0, "bias": [1.0, 2.0, 3.0]},
    "ParametricSoftplus": {"alpha": 2.0, "beta": 0.5},
    "Scale": {"scale": 3.0},
    "Crop": {"border": [1, 0, 0, 1]},
}


@pytest.mark.parametrize("is_inside", [False, True], ids=["alone", "in a branch"])
@pytest.mark.parametrize("op_type", DRAFTS)
@pytest.mark.filterwarnings("ignore:.*onnxruntime loads it")
def test_an_operator_of_the_first_drafts_is_computed(op_type: str, is_inside: bool) -> None:
    nodes = [node(op_type, ["x"], ["h"], **DRAFTS[op_type]), node("Abs", ["h"], ["y"])]
    inputs = [info("x", FLOAT, ["n", 3, 4, 4])]
    if is_inside:
        out = [info("y", FLOAT, None)]
        branch = helper.make_graph(nodes, "branch", [], out)
        other = helper.make_graph([node("Neg", ["x"], ["y"])], "other", [], out)
        nodes = [node("If", ["c"], ["z"], then_branch=branch, else_branch=other), node("Abs", ["z"], ["y"])]
        inputs.append(info("c", TensorProto.BOOL, []))
    graph = helper.make_graph(nodes, "g", inputs, [info("y", FLOAT, ["n", 3, "h", "w"])])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=4)
    content = made.SerializeToString()
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
    given = {"x": x, **({"c": np.array(True)} if is_inside else {})}
    (expected,) = onnxruntime.InferenceSession(content).run(None, given)
    rows = {name: from_array(value, chunks=-1) if value.ndim else value for name, value in given.items()}
    batches = load_onnx(content).map_batches(rows).compute(scheduler="sync")
    for found in (*(one["y"] for one in in_all_granularities(content, given)), batches):
        assert_same(found, expected)


LEVELS = {
    level: getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
    for level in ("basic", "extended", "all")
}


def transformer() -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """Return a layer that onnxruntime rewrites into its own operators."""
    rng = np.random.default_rng(0)
    nodes = [
        node("MatMul", ["x", "w1"], ["h1"]),
        node("Add", ["h1", "b1"], ["h2"]),
        node("Div", ["h2", "root"], ["e1"]),
        node("Erf", ["e1"], ["e2"]),
        node("Add", ["e2", "one"], ["e3"]),
        node("Mul", ["h2", "e3"], ["e4"]),
        node("Mul", ["e4", "half"], ["g"]),
        node("Add", ["g", "x"], ["s"]),
        node("LayerNormalization", ["s", "scale", "b1"], ["y"]),
    ]
    weights = {
        "w1": rng.standard_normal((8, 8)).astype(np.float32),
        "b1": rng.standard_normal(8).astype(np.float32),
        "scale": np.ones(8, np.float32),
        "root": np.float32(2**0.5),
        "one": np.float32(1),
        "half": np.float32(0.5),
    }
    return model_of(nodes, {"x": (FLOAT, (2, 4, 8))}, ["y"], initializers=weights), (2, 4, 8)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("of", [transformer, lambda: (convolution(), (2, 3, 8, 8))], ids=["layer", "image"])
@pytest.mark.filterwarnings("ignore:.*onnxruntime loads it")
def test_a_model_that_onnxruntime_has_optimised_is_computed(of: Any, level: str, tmp_path: Path) -> None:
    made, shape = of()
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    path = tmp_path / "optimised.onnx"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    expected = onnxruntime.InferenceSession(made.SerializeToString(), options).run(None, {"x": x})
    domains = {op.domain for op in load_onnx(path).graph.ops}
    assert level == "basic" or domains & {"com.microsoft", "com.microsoft.nchwc"}
    for found in in_all_granularities(path, {"x": x}):
        for one, value in zip(found.values(), expected, strict=True):
            assert_same(one, value, 1e-4, 1e-4)
