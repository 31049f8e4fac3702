"""What importing makes of a model's nodes, sub-graphs, inputs, outputs, weights and constants."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from agreement import assert_equal_to_reference
from models import if_model, light_models, mlp, model_of, sparse_tensor
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node as node
from onnx.helper import make_tensor_value_info as info

from ferroflow_dask.exceptions import ModelError
from ferroflow_dask.graph import TensorSpec, from_onnx, graph_from_onnx
from ferroflow_dask.kernels import evaluate


@pytest.mark.parametrize("path", light_models(), ids=lambda path: path.stem)
def test_published_architectures_have_their_layers(path):
    graph = graph_from_onnx(path)
    assert graph.name == path.stem
    assert Counter(op.kind for op in graph.ops) == Counter(
        node.op_type for node in onnx.load(path).graph.node
    )
    (data,) = graph.inputs.values()
    assert data == TensorSpec.of("float32", (1, 3, 224, 224))
    (output,) = graph.outputs
    assert graph.spec(output).shape in [(1, 1000), (1, 1000, 1, 1)]
    assert all(
        graph.spec(value).size is not None for op in graph.ops for value in op.outputs if op.kind == "Conv"
    )


@pytest.mark.parametrize("limit", [0, 64, 10**9])
def test_weights_withheld_from_checker_and_inference_are_all_there(monkeypatch, limit):
    monkeypatch.setattr(from_onnx, "_LARGE", limit)
    checked = []
    check = onnx.checker.check_model
    monkeypatch.setattr(
        onnx.checker, "check_model", lambda model: (checked.append(model.ByteSize()), check(model))
    )
    model = mlp()
    graph = graph_from_onnx(model)
    assert graph.spec("h1").shape == ("batch", 32)
    assert_equal_to_reference(model, graph, x=np.ones((2, 784), np.float32))
    assert (checked[0] > 100_000) == (limit == 10**9)


def test_shapes_that_small_weights_decide_are_inferred():
    weight = np.zeros((8, 512), np.float32)  # large: withheld
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Reshape", ["h", "shape"], ["y"])]
    model = model_of(
        nodes,
        {"x": (TensorProto.FLOAT, [6, 8])},
        ["y"],
        initializers={"w": weight, "shape": np.int64([3, -1])},
    )
    assert graph_from_onnx(model).spec("y").shape == (3, 1024)


def test_a_weight_larger_than_the_limit_of_messages_is_no_obstacle(monkeypatch):
    model = mlp()
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", 10_000)
    assert len(graph_from_onnx(model).ops) == 5
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", 100)
    with pytest.raises(ModelError, match="more than 2 GiB of weights inside functions or sub-graphs"):
        graph_from_onnx(model)


FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


CONSTANTS = {
    "tensor": ({"value": numpy_helper.from_array(np.float64([[1.5]]))}, np.float64([[1.5]])),
    "float": ({"value_float": 1.5}, np.float32(1.5)),
    "floats": ({"value_floats": [1.5, 2]}, np.float32([1.5, 2])),
    "int": ({"value_int": 3}, np.int64(3)),
    "ints": ({"value_ints": [3, 4]}, np.int64([3, 4])),
    "string": ({"value_string": "é"}, np.array("é", object)),
    "strings": ({"value_strings": ["a", "é"]}, np.array(["a", "é"], object)),
    "sparse": ({"sparse_value": sparse_tensor([5, 6], [0, 2], [3])}, np.float32([5, 0, 6])),
    "a large tensor": (
        {"value": numpy_helper.from_array(np.arange(9999, dtype=np.float32))},
        np.arange(9999, dtype=np.float32),
    ),
}


@pytest.mark.parametrize(("attribute", "expected"), CONSTANTS.values(), ids=CONSTANTS)
def test_constant_nodes_become_sources(attribute, expected):
    model = model_of([node("Constant", [], ["c"], **attribute), node("Identity", ["c"], ["y"])], {}, ["y"])
    graph = graph_from_onnx(model)
    assert [op.kind for op in graph.ops] == ["Identity"]
    value = graph.constants["c"]
    assert value.dtype == expected.dtype
    assert value.tolist() == expected.tolist()
    assert graph.spec("c").shape == expected.shape


@pytest.mark.parametrize(
    "indices", [pytest.param([1, 3], id="flat indices"), pytest.param([[0, 1], [1, 1]], id="coordinates")]
)
def test_sparse_initializers_become_dense(indices):
    model = model_of([node("Add", ["x", "s"], ["y"])], {"x": (FLOAT, [2, 2])}, ["y"])
    model.graph.sparse_initializer.append(sparse_tensor([7, 8], indices, [2, 2], "s"))
    model.graph.output[0].CopyFrom(info("y", FLOAT, [2, 2]))
    graph = graph_from_onnx(model)
    assert graph.constants["s"].tolist() == [[0, 7], [0, 8]]
    assert evaluate(graph, {"x": np.ones((2, 2), np.float32)})["y"].tolist() == [[1, 8], [1, 9]]


@pytest.mark.parametrize(
    "element", [TensorProto.BFLOAT16, TensorProto.FLOAT8E5M2, TensorProto.INT4, TensorProto.FLOAT16, BOOL]
)
def test_weights_keep_their_dtype(element):
    dtype = helper.tensor_dtype_to_np_dtype(element)
    model = model_of([node("Identity", ["w"], ["y"])], {}, ["y"], opset=21, ir_version=10)
    model.graph.initializer.append(helper.make_tensor("w", element, [3], [1, 0, 1]))
    model.graph.output[0].CopyFrom(info("y", element, [3]))
    graph = graph_from_onnx(model)
    assert graph.constants["w"].dtype == dtype == graph.spec("y").dtype
    assert evaluate(graph)["y"].astype(int).tolist() == [1, 0, 1]


def test_outputs_may_be_inputs_or_initializers_and_inputs_may_be_unused():
    model = model_of(
        [node("Relu", ["x"], ["r"]), node("Add", ["r", "r"], ["s"])],
        {"x": (FLOAT, ["n", None]), "unused": (FLOAT, [1])},
        ["x", "w", "r", "s"],
        initializers={"w": np.float32([3])},
    )
    model.graph.output[0].CopyFrom(info("x", FLOAT, ["n", None]))
    model.graph.output[1].CopyFrom(info("w", FLOAT, [1]))
    graph = graph_from_onnx(model)
    assert graph.outputs == ("x", "w", "r", "s")
    assert graph.inputs["x"].shape == ("n", None)
    assert graph.spec("s").shape[0] == "n"
    result = evaluate(graph, {"x": np.float32([[-1, 1]]), "unused": np.float32([0])})
    found = {name: value.tolist() for name, value in result.items()}
    assert found == {"x": [[-1, 1]], "w": [3], "r": [[0, 1]], "s": [[0, 2]]}


def test_sequences_may_enter_and_leave():
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, [2]))
    graph = helper.make_graph(
        [node("SequenceInsert", ["s", "x"], ["t"])],
        "g",
        [helper.make_value_info("s", sequence), info("x", FLOAT, [2])],
        [helper.make_value_info("t", sequence)],
    )
    imported = graph_from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert imported.inputs["s"] == TensorSpec(is_sequence=True)
    assert (str(imported.inputs["s"]), imported.spec("t").is_sequence) == ("sequence", True)
    one = np.float32([1, 2])
    assert [v.tolist() for v in evaluate(imported, {"s": [one], "x": one + 2})["t"]] == [[1, 2], [3, 4]]


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


def test_values_that_sub_graphs_capture_are_operands():
    model = if_model()
    graph = graph_from_onnx(model)
    (op,) = (op for op in graph.ops if op.op_type == "If")
    assert op.inputs == ("c",)
    assert sorted(op.captured) == ["a", "b", "c"]
    assert {before.op_type for before in graph.predecessors[op.id]} == {"Relu", "Neg"}
    for c in (True, False):
        assert_equal_to_reference(model, graph, x=np.float32([-1, 2]), c=np.array(c))
