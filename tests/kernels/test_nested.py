"""Control flow: in a session, or op by op with the provider that suits each op inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from agreement import assert_same
from models import model_of
from onnx import TensorProto, helper
from onnx.helper import make_node as node
from onnx.helper import make_tensor_value_info as info

from ferroflow_dask import ClusterProfile
from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.lowering import bind_graph

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = np.float32([[1, 2, 3], [4, 5, 6]])
#: A sum that double precision cannot hold: a rule keeps it from onnxruntime.
LARGE = np.int64([2**53 + 1, 2])
DOMAINS = {"com.microsoft": 1}


def body(nodes: list[Any], inputs: list[Any], outputs: list[Any], **weights: Any) -> onnx.GraphProto:
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    return helper.make_graph(nodes, "body", inputs, outputs, tensors)


def summed(*more: Any) -> list[Any]:
    """Return nodes that sum what is captured exactly, and add it to a carried value."""
    return [node("ReduceSum", ["large"], ["sum"], keepdims=0), *more]


def branches() -> tuple[onnx.ModelProto, dict[str, Any], dict[str, Any]]:
    exact = body(summed(), [], [info("sum", INT64, [])])
    other = body([node("Identity", ["one"], ["same"])], [], [info("same", INT64, [])], one=np.int64(1))
    model = model_of(
        [node("If", ["c"], ["y"], then_branch=exact, else_branch=other)],
        {"c": (BOOL, []), "large": (INT64, [2])},
        ["y"],
    )
    return model, {"c": np.array(True), "large": LARGE}, {"y": np.int64(2**53 + 3)}


def loop() -> tuple[onnx.ModelProto, dict[str, Any], dict[str, Any]]:
    inner = body(
        summed(
            node("Add", ["v", "sum"], ["v2"]),
            node("Less", ["i", "three"], ["again"]),
            node("Gelu", ["x"], ["g"], domain="com.microsoft"),
        ),
        [info("i", INT64, []), info("go", BOOL, []), info("v", INT64, [])],
        [info("again", BOOL, []), info("v2", INT64, []), info("v", INT64, []), info("g", FLOAT, [2, 3])],
        three=np.int64(3),
    )
    model = model_of(
        [node("Loop", ["n", "", "zero"], ["y", "all", "gs"], body=inner)],
        {"n": (INT64, []), "large": (INT64, [2]), "x": (FLOAT, [2, 3])},
        ["y", "all", "gs"],
        initializers={"zero": np.int64(0)},
        domains=DOMAINS,
    )
    total = 2**53 + 3
    from math import erf

    gelu = np.vectorize(lambda x: x * (1 + erf(x / 2**0.5)) / 2, otypes=[np.float32])(X)
    expected = {
        "y": np.int64(4 * total),
        "all": np.arange(4, dtype=np.int64) * total,
        "gs": np.stack([gelu] * 4),
    }
    return model, {"n": np.int64(9), "large": LARGE, "x": X}, expected


def scan() -> tuple[onnx.ModelProto, dict[str, Any], dict[str, Any]]:
    inner = body(
        summed(node("Mul", ["row", "sum"], ["p"]), node("Add", ["s", "row"], ["t"])),
        [info("s", INT64, [3]), info("row", INT64, [3])],
        [info("t", INT64, [3]), info("p", INT64, [3])],
    )
    attributes = {"num_scan_inputs": 1, "scan_input_axes": [1], "scan_input_directions": [1]}
    model = model_of(
        [node("Scan", ["zeros", "x"], ["t", "p"], body=inner, scan_output_axes=[1], **attributes)],
        {"x": (INT64, [3, 2]), "large": (INT64, [2])},
        ["t", "p"],
        initializers={"zeros": np.zeros(3, np.int64)},
    )
    x = np.arange(6, dtype=np.int64).reshape(3, 2)
    return model, {"x": x, "large": LARGE}, {"t": x.sum(1), "p": x[:, ::-1] * (2**53 + 3)}


def sequences() -> tuple[onnx.ModelProto, dict[str, Any], dict[str, Any]]:
    """A loop whose state is a sequence, mapped afterwards."""
    sequence = helper.make_value_info(
        "q", helper.make_sequence_type_proto(helper.make_tensor_type_proto(INT64, None))
    )
    longer = helper.make_value_info("q2", sequence.type)
    inner = body(
        summed(
            node("Add", ["sum", "i"], ["v"]),
            node("SequenceInsert", ["q", "v"], ["q2"]),
            node("Identity", ["go"], ["again"]),
        ),
        [info("i", INT64, []), info("go", BOOL, []), sequence],
        [info("again", BOOL, []), longer],
    )
    each = body(summed(node("Sub", ["e", "sum"], ["d"])), [info("e", INT64, [])], [info("d", INT64, [])])
    model = model_of(
        [
            node("SequenceEmpty", [], ["none"], dtype=INT64),
            node("Loop", ["n", "yes", "none"], ["all"], body=inner),
            node("SequenceMap", ["all"], ["mapped"], body=each),
            node("ConcatFromSequence", ["mapped"], ["y"], axis=0, new_axis=1),
        ],
        {"n": (INT64, []), "large": (INT64, [2])},
        ["y"],
        initializers={"yes": np.array(True)},
    )
    return model, {"n": np.int64(3), "large": LARGE}, {"y": np.arange(3, dtype=np.int64)}


def optional() -> tuple[onnx.ModelProto, dict[str, Any], dict[str, Any]]:
    exact = body(
        [node("OptionalGetElement", ["o"], ["v"]), node("ReduceSum", ["v"], ["z"], keepdims=0)],
        [],
        [info("z", INT64, [])],
    )
    other = body([node("Identity", ["one"], ["same"])], [], [info("same", INT64, [])], one=np.int64(1))
    model = model_of(
        [
            node("Optional", ["large"], ["o"]),
            node("OptionalHasElement", ["o"], ["has"]),
            node("If", ["has"], ["y"], then_branch=exact, else_branch=other),
        ],
        {"large": (INT64, [2])},
        ["y"],
    )
    return model, {"large": LARGE}, {"y": np.int64(2**53 + 3)}


@pytest.mark.parametrize("granularity", ["evaluate", "whole", "bundles", "ops"])
@pytest.mark.parametrize("of", [branches, loop, scan, sequences, optional])
def test_ops_inside_control_flow_are_computed_by_whom_they_should(of: Any, granularity: str) -> None:
    model, inputs, expected = of()
    graph = graph_from_onnx(model)
    for _ in range(2):
        if granularity == "evaluate":
            found = evaluate(graph, inputs)
        else:
            bound = bind_graph(graph, inputs, granularity=granularity, profile=ClusterProfile((1,)))
            found = bound.compute(scheduler="sync")
        for name, value in expected.items():
            assert_same(found[name], value)


@pytest.mark.parametrize("providers", [["onnxruntime"], ["reference"], None], ids=str)
@pytest.mark.parametrize(("trips", "go"), [(0, None), (2, None), (None, True), (2, False)])
def test_a_loop_ends_by_its_count_or_its_condition(trips: Any, go: Any, providers: Any) -> None:
    inner = body(
        [node("Add", ["v", "v"], ["w"]), node("Less", ["i", "three"], ["again"])],
        [info("i", INT64, []), info("go", BOOL, []), info("v", FLOAT, [2])],
        [info("again", BOOL, []), info("w", FLOAT, [2]), info("v", FLOAT, [2])],
        three=np.int64(3),
    )
    names = ["n" if trips is not None else "", "c" if go is not None else "", "v0"]
    given = {"n": np.array(trips or 0), "c": np.array(bool(go)), "v0": np.float32([1, 2])}
    inputs = {"n": (INT64, []), "c": (BOOL, []), "v0": (FLOAT, [2])}
    model = model_of(
        [node("Loop", names, ["y", "s"], body=inner)], {k: inputs[k] for k in names if k}, ["y", "s"]
    )
    given = {name: given[name] for name in names if name}
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, given)
    found = evaluate(graph_from_onnx(model), given, providers=providers)
    for name, value in zip(("y", "s"), expected, strict=True):
        assert_same(found[name], value)


def test_an_error_inside_names_the_op_inside() -> None:
    exact = body([node("Reshape", ["x", "shape"], ["z"], "fold")], [], [info("z", FLOAT, None)])
    model = model_of(
        [node("If", ["c"], ["y"], then_branch=exact, else_branch=exact)],
        {"c": (BOOL, []), "x": (FLOAT, [2, 3]), "shape": (INT64, [1])},
        ["y"],
    )
    with pytest.raises(Exception, match=r"\(If\) failed on .*nested: op 'fold' \(Reshape\) failed on"):
        evaluate(graph_from_onnx(model), {"c": np.array(True), "x": X, "shape": np.int64([4])})
