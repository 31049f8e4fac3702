"""Operators of all sorts, each with one node, against `onnx.reference`."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import assert_same
from kernel_cases import expected_of, normal_from, op_of
from onnx import TensorProto, helper

from ferroflow_dask.graph import Op
from ferroflow_dask.kernels import compile_op

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
normal = normal_from(seed=0)

IMAGE = normal(2, 3, 8, 8)
STRINGS = np.array(["b", "a", "c"], object)

CASES: dict[str, tuple[Any, ...]] = {
    # sentence: (op_type, values, attributes, number of outputs, opset or (domain, version))
    "Conv with bias and padding": ("Conv", [IMAGE, normal(4, 3, 3, 3), normal(4)], {"pads": [1, 1, 1, 1]}),
    "Conv in groups with strides": ("Conv", [IMAGE, normal(6, 1, 3, 3)], {"group": 3, "strides": [2, 2]}),
    "Conv dilated in one dimension": ("Conv", [normal(1, 2, 9), normal(3, 2, 2)], {"dilations": [3]}),
    "ConvTranspose": ("ConvTranspose", [IMAGE, normal(3, 2, 3, 3)], {"strides": [2, 2]}),
    "MaxPool with indices": ("MaxPool", [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2]}, 2),
    "MaxPool dilated, that pads by itself": (
        "MaxPool",
        [IMAGE],
        {"kernel_shape": [3, 2], "dilations": [2, 3], "auto_pad": "SAME_UPPER"},
    ),
    "AveragePool counting the padding": (
        "AveragePool",
        [IMAGE],
        {"kernel_shape": [3, 3], "pads": [1] * 4, "count_include_pad": 1},
    ),
    "GlobalAveragePool": ("GlobalAveragePool", [IMAGE], {}),
    "Gemm transposed and scaled": (
        "Gemm",
        [normal(4, 3), normal(5, 4), normal(5)],
        {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0},
    ),
    "Gemm without its optional bias": ("Gemm", [normal(3, 4), normal(4, 5)], {}),
    "BatchNormalization": (
        "BatchNormalization",
        [IMAGE, normal(3), normal(3), normal(3), np.abs(normal(3)) + 1],
        {"epsilon": 1e-3},
    ),
    "LayerNormalization along a negative axis": (
        "LayerNormalization",
        [normal(2, 3, 4), normal(4)],
        {"axis": -1},
    ),
    "Softmax of opset 13 along an axis": ("Softmax", [normal(2, 3, 4)], {"axis": 1}, 1, 13),
    "Split into equal parts": ("Split", [normal(6, 2)], {"axis": 0, "num_outputs": 3}, 3),
    "Split of opset 11 by attribute": ("Split", [normal(6, 2)], {"axis": 0, "split": [1, 5]}, 2, 11),
    "Clip with the minimum left out": ("Clip", [normal(3, 4), None, np.float32(0.5)], {}),
    "Reshape with an inferred size": ("Reshape", [normal(2, 6), np.int64([3, -1])], {}),
    "Reshape of nothing": ("Reshape", [normal(0, 6), np.int64([2, 0])], {"allowzero": 1}),
    "Transpose": ("Transpose", [normal(2, 3, 4)], {"perm": [2, 0, 1]}),
    "Concat along the last axis": ("Concat", [normal(2, 1), normal(2, 3), normal(2, 0)], {"axis": -1}),
    "Squeeze of no axes": ("Squeeze", [normal(1, 2, 1), np.int64([])], {}),
    "Slice backwards": (
        "Slice",
        [normal(5, 6), np.int64([4]), np.int64([0]), np.int64([1]), np.int64([-2])],
        {},
    ),
    "Gather with negative indices": ("Gather", [normal(5, 3), np.int64([[0, -1], [2, 2]])], {}),
    "GatherND": ("GatherND", [normal(2, 3, 4), np.int64([[0, 1], [1, 2]])], {}),
    "ScatterElements that adds": (
        "ScatterElements",
        [normal(3, 3), np.int64([[0, 1, 2]]), normal(1, 3)],
        {"reduction": "add"},
    ),
    "Pad by reflection": ("Pad", [normal(3, 4), np.int64([0, 2, 0, 1])], {"mode": "reflect"}),
    "Resize with scales, region left out": (
        "Resize",
        [IMAGE, None, np.float32([1, 1, 2, 2])],
        {"mode": "nearest"},
    ),
    "ReduceMean over axes given as input": (
        "ReduceMean",
        [normal(2, 3, 4), np.int64([0, -1])],
        {"keepdims": 0},
    ),
    "ReduceSum over everything": ("ReduceSum", [normal(2, 3)], {}),
    "ArgMax, the last of equals": ("ArgMax", [np.float32([[1, 2, 2]])], {"axis": 1, "select_last_index": 1}),
    "TopK": ("TopK", [normal(3, 7), np.int64([2])], {"axis": 1}, 2),
    "Where broadcasts": ("Where", [np.array([[True], [False]]), normal(2, 3), normal(3)], {}),
    "Cast to integers": ("Cast", [4 * normal(3, 4)], {"to": INT64}),
    "Cast to bfloat16, which onnxruntime does not hand out": (
        "Cast",
        [normal(3)],
        {"to": TensorProto.BFLOAT16},
    ),
    "Cast to an 8-bit float keeps its dtype": ("Cast", [normal(3)], {"to": TensorProto.FLOAT8E4M3FN}, 1, 21),
    "Expand": ("Expand", [normal(3, 1), np.int64([2, 1, 4])], {}),
    "Tile": ("Tile", [normal(2, 3), np.int64([2, 1])], {}),
    "OneHot": ("OneHot", [np.int64([0, 2]), np.int64(3), np.float32([0, 1])], {}),
    "ConstantOfShape with a tensor attribute": (
        "ConstantOfShape",
        [np.int64([2, 3])],
        {"value": helper.make_tensor("v", INT64, [1], [7])},
    ),
    "Einsum": ("Einsum", [normal(2, 3), normal(3, 4)], {"equation": "ij,jk->ki"}),
    "LSTM with all outputs": (
        "LSTM",
        [normal(5, 2, 3), 0.3 * normal(1, 16, 3), 0.3 * normal(1, 16, 4)],
        {"hidden_size": 4},
        3,
    ),
    "GRU": ("GRU", [normal(5, 2, 3), normal(1, 12, 3), normal(1, 12, 4)], {"hidden_size": 4}, 2),
    "Unique has as many results as there are values": ("Unique", [np.float32([2, 1, 2])], {}, 4),
    "NonZero": ("NonZero", [np.float32([[0, 1], [2, 0]])], {}),
    "StringConcat": ("StringConcat", [STRINGS, STRINGS], {}, 1, 20),
    "StringNormalizer": ("StringNormalizer", [STRINGS], {"case_change_action": "UPPER"}),
    "Equal of strings": ("Equal", [STRINGS, np.array(["b", "b", "c"], object)], {}, 1, 19),
    "SequenceConstruct": ("SequenceConstruct", [normal(2), normal(3)], {}),
    "SequenceAt of a sequence": ("SequenceAt", [[normal(2), normal(3)], np.int64(-1)], {}),
    "SequenceLength of a sequence": ("SequenceLength", [[normal(2), normal(3)]], {}),
    "ConcatFromSequence": ("ConcatFromSequence", [[normal(2), normal(3)]], {"axis": 0}),
    "SplitToSequence": ("SplitToSequence", [normal(4, 3)], {"axis": 0}),
    "OptionalHasElement of a tensor": ("OptionalHasElement", [normal(2)], {}),
    "LabelEncoder of ai.onnx.ml": (
        "LabelEncoder",
        [STRINGS],
        {"keys_strings": ["a", "b"], "values_int64s": [1, 2], "default_int64": -1},
        1,
        ("ai.onnx.ml", 2),
    ),
    "ArrayFeatureExtractor of ai.onnx.ml": (
        "ArrayFeatureExtractor",
        [normal(2, 4), np.int64([0, 3])],
        {},
        1,
        ("ai.onnx.ml", 1),
    ),
    "Gelu of opset 20": ("Gelu", [normal(3, 4)], {"approximate": "tanh"}, 1, 20),
    "GroupNormalization of bfloat16": (
        "GroupNormalization",
        [normal(1, 4, 2).astype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))] * 1
        + [np.ones(4, helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))] * 2,
        {"num_groups": 2},
        1,
        21,
    ),
    "Relu in an opset newer than onnxruntime": ("Relu", [normal(3)], {}, 1, onnx.defs.onnx_opset_version()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_operators_agree_with_onnx_reference(case):
    op_type, values, attributes, n_outputs, opset = (*case, *(1, 18)[len(case) - 3 :])
    domain, version = opset if isinstance(opset, tuple) else ("", opset)
    opsets = {"": 18, domain: version}
    op = op_of(op_type, values, n_outputs, domain, **attributes)
    actual = compile_op(op, opsets)(*values)
    expected = expected_of(op, opsets, values)
    assert len(actual) == len(expected) == n_outputs
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("provider", ["onnxruntime", "reference"])
def test_an_optional_output_left_out_is_none(provider):
    op = Op(0, "it", "LSTM", ("x", "w", "r"), ("", "h", ""), attributes={"hidden_size": 2})
    values = normal(3, 1, 2), normal(1, 8, 2), normal(1, 8, 2)
    sequence, hidden, cell = compile_op(op, {"": 18}, [provider])(*values)
    assert sequence is None
    assert cell is None
    assert hidden.shape == (1, 1, 2)


# ---------------------------------------------------------------- sub-graphs


def loop_body() -> onnx.GraphProto:
    """Doubles a value, adds the captured `step`, and collects it."""
    nodes = [
        helper.make_node("Add", ["v", "v"], ["twice"]),
        helper.make_node("Add", ["twice", "step"], ["v_out"]),
        helper.make_node("Identity", ["v_out"], ["seen"]),
        helper.make_node("Identity", ["c"], ["c_out"]),
    ]
    info = helper.make_tensor_value_info
    return helper.make_graph(
        nodes,
        "body",
        [info("i", INT64, []), info("c", BOOL, []), info("v", FLOAT, [2])],
        [info("c_out", BOOL, []), info("v_out", FLOAT, [2]), info("seen", FLOAT, [2])],
    )


@pytest.mark.parametrize("provider", ["onnxruntime", "reference"])
@pytest.mark.parametrize(
    ("trips", "condition", "final", "seen"),
    [
        pytest.param(2, None, [6, 6], [[2, 2], [6, 6]], id="no condition means go on"),
        pytest.param(2, True, [6, 6], [[2, 2], [6, 6]], id="a true condition"),
        pytest.param(2, False, [0, 0], np.empty((0, 2)), id="a false condition runs nothing"),
        pytest.param(0, True, [0, 0], np.empty((0, 2)), id="no trips leave an empty scan"),
    ],
)
def test_loops_read_captured_values_and_stack_what_they_scan(provider, trips, condition, final, seen):
    op = Op(
        0, "it", "Loop", ("n", "" if condition is None else "c0", "x"), ("y", "ys"),
        attributes={"body": loop_body()}, captured=("step",),
    )  # fmt: skip
    values = np.int64(trips), None if condition is None else np.array(condition), np.zeros(2, np.float32)
    y, ys = compile_op(op, {"": 18}, [provider])(*values, np.float32([2, 2]))
    assert_same(y, np.float32(final))
    assert_same(ys, np.asarray(seen, np.float32))


@pytest.mark.parametrize("provider", ["onnxruntime", "reference"])
def test_both_branches_of_an_if_read_captured_values(provider):
    def branch(operator: str) -> onnx.GraphProto:
        node = helper.make_node(operator, ["a", "b"], ["r"])
        return helper.make_graph([node], operator, [], [helper.make_tensor_value_info("r", FLOAT, None)])

    attributes = {"then_branch": branch("Add"), "else_branch": branch("Sub")}
    op = Op(0, "it", "If", ("c",), ("y",), attributes=attributes, captured=("a", "b"))
    kernel = compile_op(pickle.loads(pickle.dumps(op)), {"": 18}, [provider])
    a, b = np.float32([5]), np.float32([3])
    assert kernel(np.array(True), a, b)[0] == 8
    assert kernel(np.array(False), a, b)[0] == 2
