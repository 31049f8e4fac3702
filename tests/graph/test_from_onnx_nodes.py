"""What importing makes of a model's nodes, functions and sub-graphs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
from agreement import assert_equal_to_reference
from models import if_model, model_of
from onnx import TensorProto, helper
from onnx.helper import make_node as node
from onnx.helper import make_tensor_value_info as info

from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.kernels import evaluate

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def test_ops_without_a_name_get_one_and_equal_names_are_told_apart():
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Relu", ["a"], ["b"], name="act"),
        node("Relu", ["b"], ["c"], name="act"),
        node("Relu", ["c"], ["y"], name="relu_1"),
    ]
    graph = graph_from_onnx(model_of(nodes, {"x": (FLOAT, [2])}, ["y"]))
    assert [op.name for op in graph.ops] == ["relu_1_2", "act", "act_2", "relu_1"]
    assert [op.id for op in graph.ops] == [1, 2, 3, 4]


def test_optional_inputs_and_outputs_left_out_stay_empty():
    nodes = [node("Clip", ["x", "", "high"], ["c"]), node("Dropout", ["c"], ["y", ""])]
    graph = graph_from_onnx(model_of(nodes, {"x": (FLOAT, [2])}, ["y"], initializers={"high": np.float32(1)}))
    assert graph.ops[0].inputs == ("x", "", "high")
    assert graph.ops[1].outputs == ("y", "")
    assert evaluate(graph, {"x": np.float32([-5, 5])})["y"].tolist() == [-5, 1]


def test_the_long_name_of_the_default_domain_is_the_short_one():
    model = model_of([node("Relu", ["x"], ["y"])], {"x": (FLOAT, [1])}, ["y"])
    model.graph.node[0].domain = model.opset_import[0].domain = "ai.onnx"
    graph = graph_from_onnx(model)
    assert graph.opsets == {"": 18}
    assert evaluate(graph, {"x": np.float32([-1])})["y"] == 0


def test_functions_are_expanded_with_their_attributes_and_constants():
    inner = helper.make_function(
        "acme", "Double", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    constant = node("Constant", [], ["k"])
    constant.attribute.append(onnx.AttributeProto(name="value_float", ref_attr_name="k", type=1))
    outer = helper.make_function(
        "acme", "Scale", ["a"], ["c"],
        [node("Double", ["a"], ["d"], domain="acme"), constant, node("Mul", ["d", "k"], ["c"])],
        [helper.make_opsetid("", 18), helper.make_opsetid("acme", 1)], attributes=["k"],
    )  # fmt: skip
    model = model_of(
        [node("Scale", ["x"], ["h"], domain="acme", k=3.0),
         node("Scale", ["h"], ["y"], domain="acme", k=0.5)],
        {"x": (FLOAT, [2])}, ["y"], domains={"acme": 1}, functions=[inner, outer],
    )  # fmt: skip
    model.graph.output[0].CopyFrom(info("y", FLOAT, [2]))
    graph = graph_from_onnx(model)
    assert Counter(op.kind for op in graph.ops) == {"Add": 2, "Mul": 2}
    assert sorted(float(value) for value in graph.constants.values()) == [0.5, 3.0]
    assert_equal_to_reference(model, graph, x=np.float32([1, -2]))


def test_values_that_sub_graphs_capture_are_operands():
    model = if_model()
    graph = graph_from_onnx(model)
    (op,) = (op for op in graph.ops if op.op_type == "If")
    assert op.inputs == ("c",)
    assert sorted(op.captured) == ["a", "b", "c"]
    assert {before.op_type for before in graph.predecessors[op.id]} == {"Relu", "Neg"}
    for c in (True, False):
        assert_equal_to_reference(model, graph, x=np.float32([-1, 2]), c=np.array(c))


def test_a_loop_reads_its_captured_weight():
    body = helper.make_graph(
        [node("MatMul", ["v", "w"], ["v_out"]), node("Identity", ["go"], ["go_out"])],
        "body",
        [info("i", INT64, []), info("go", BOOL, []), info("v", FLOAT, [1, 2])],
        [info("go_out", BOOL, []), info("v_out", FLOAT, [1, 2])],
    )
    weight = np.float32([[0, 1], [1, 1]])
    loop = node("Loop", ["n", "", "x"], ["y"], body=body)
    initializers = {"n": np.int64(6), "w": weight}
    model = model_of([loop], {"x": (FLOAT, [1, 2])}, ["y"], initializers=initializers)
    model.graph.output[0].CopyFrom(info("y", FLOAT, [1, 2]))
    graph = graph_from_onnx(model)
    assert graph.ops[0].captured == ("w",)
    assert evaluate(graph, {"x": np.float32([[0, 1]])})["y"].tolist() == [[8, 13]]
