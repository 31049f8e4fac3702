"""Graphs built op by op: what is inferred, what keeps its name, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from ferroflow_dask import Model
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.exceptions import GraphError
from ferroflow_dask.graph import Builder
from ferroflow_dask.graph.to_onnx import to_onnx
from ferroflow_dask.lowering import bind_graph


def test_the_builder_infers_shapes_as_onnx_does() -> None:
    builder = Builder()
    x = builder.input("x", "float32", ("batch", 3, 8, 8))
    w = builder.constant(np.zeros((4, 3, 3, 3), "float32"))
    pooled = builder.op("MaxPool", builder.op("Conv", x, w), kernel_shape=[2, 2], strides=[2, 2])
    left, right = builder.op("Split", builder.op("Flatten", pooled, axis=1), outputs=2, axis=1, num_outputs=2)
    builder.output(left=left, self=builder.op("Reshape", right, builder.constant(np.int64([-1, 6]))))
    graph = builder.to_graph()
    assert str(graph.spec("left")) == "float32[batch, 18]"
    assert str(graph.spec("self")).endswith(", 6]")  # as the small constant says


REFUSED = {
    "inputs must be added first": (lambda b: b.op("Relu", "y"), "reads 'y'"),
    "the operator must exist": (lambda b: b.op("Rellu", "x"), "no operator 'Rellu'"),
    "sources need their own name": (lambda b: b.input("x"), "two values are named 'x'"),
    "ops need their own name": (lambda b: b.op("Relu", "x", name="x"), "two values are named 'x'"),
    "shapes must fit the operator": (lambda b: b.op("MatMul", "x", "x"), "op 'matmul_1' .MatMul."),
    "attributes need a type": (lambda b: b.op("Relu", "x", foo=object()), "op 'relu_1'"),
    "a constant has a type of ONNX": (
        lambda b: b.constant(np.array("2020-01-01", "datetime64[D]"), "day"),
        "constant 'day': ONNX has no dtype 'datetime64",
    ),
    "an output must exist": (lambda b: b.output("y"), "no value 'y'"),
    "there must be an output": (lambda b: b.to_graph(), "no output"),
    "one value, one output": (lambda b: b.output("x", y="x") or b.to_graph(), "marked as two outputs"),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_the_builder_refuses(build: object, message: str) -> None:
    builder = Builder()
    builder.input("x", "float32", (4, 6))
    with pytest.raises(GraphError, match=message):
        build(builder)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        pytest.param("datetime64[s]", (), r"ONNX has no dtype 'datetime64\[s\]'", id="no type of ONNX's"),
        pytest.param("flaot32", (), "ONNX has no dtype 'flaot32'", id="no type of NumPy's"),
        pytest.param("float32", "batch", r"give its dimensions: shape=\('batch',\)", id="one name"),
        pytest.param("float32", 3, r"give its dimensions: shape=\(3,\)", id="one number"),
        pytest.param("float32", (2.5, 3), "a dimension is 2.5; it must be a size", id="a fraction"),
        pytest.param("float32", (-1, 3), "a dimension is -1", id="negative"),
        pytest.param("float32", (True, 3), "a dimension is True", id="a boolean"),
        pytest.param("float32", ("", 3), "a dimension is ''", id="a name without letters"),
    ],
)
def test_the_builder_refuses_inputs(dtype: str, shape: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Builder().input("x", dtype, shape)


def test_dimensions_may_be_numpys_integers_and_strings_are_objects() -> None:
    builder = Builder()
    builder.output(builder.input("x", str, (np.int64(2), None, "n")))
    spec = builder.to_graph().inputs["x"]
    assert (spec.dtype, spec.shape) == (np.dtype(object), (2, None, "n"))
    assert type(spec.shape[0]) is int


def test_a_source_keeps_its_name_whatever_that_is_where_it_is_an_output_under_another() -> None:
    builder = Builder()
    x, c = builder.input("self", "float32", (2,)), builder.constant(np.float32([3]), "c")
    builder.output(features=x, three=c, y=builder.op("Add", x, c, name="identity_3"))
    graph = builder.to_graph()
    assert list(graph.inputs) == ["self"]
    assert list(graph.constants) == ["c"]
    assert str(graph.spec("features")) == "float32[2]"
    found = Model(graph).bind(self=np.float32([1, 2])).compute(scheduler="sync")
    assert {name: value.tolist() for name, value in found.items()} == {
        "features": [1, 2],
        "three": [3],
        "y": [4, 5],
    }


def branch(op_type: str, *reads: str) -> onnx.GraphProto:
    result = onnx.helper.make_tensor_value_info(f"{op_type}_result", onnx.TensorProto.FLOAT, ("n",))
    node = onnx.helper.make_node(op_type, reads, [result.name])
    return onnx.helper.make_graph([node], op_type, [], [result])


@pytest.mark.parametrize("granularity", ["ops", "bundles", "whole"])
@pytest.mark.parametrize("is_output", [False, True], ids=["inner", "also an output"])
def test_sub_graphs_read_what_was_added_before(is_output: bool, granularity: str) -> None:
    builder = Builder()
    x, flag = builder.input("x", "float32", ("n",)), builder.input("flag", "bool", ())
    hidden = builder.op("Exp", x, name="hidden")
    chosen = builder.op("If", flag, then_branch=branch("Add", "hidden", "x"), else_branch=branch("Neg", "x"))
    assert builder.sinks == (chosen,)
    builder.output(y=chosen, **({"h": hidden} if is_output else {}))
    graph = builder.to_graph()
    assert graph.producers["y"].captured == ("hidden", "x")
    assert str(graph.spec("y")) == "float32[n]"
    inputs = {"x": np.float32([1, 2]), "flag": np.array(True)}
    expected = ReferenceEvaluator(to_onnx(graph)).run(None, inputs)
    found = bind_graph(graph, inputs, profile=ClusterProfile((1,)), granularity=granularity).compute(
        scheduler="sync"
    )
    assert list(found) == list(graph.outputs)
    for value, name in zip(expected, graph.outputs, strict=True):
        np.testing.assert_allclose(found[name], value, rtol=1e-6)


def test_what_a_sub_graph_reads_must_exist() -> None:
    builder = Builder()
    flag = builder.input("flag", "bool", ())
    with pytest.raises(GraphError, match="op 'if_1' reads 'hidden', which was not added before it"):
        builder.op("If", flag, then_branch=branch("Abs", "hidden"), else_branch=branch("Neg", "hidden"))
