"""Kernels against `onnx.reference`, hand-written NumPy, and ONNX's own test suite."""

from __future__ import annotations

import fnmatch
import pickle
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import pytest
from models import model_of, reference
from onnx import TensorProto, helper

from ferroflow_dask.exceptions import BindError, KernelError, KernelNotFoundError, UnknownNameError
from ferroflow_dask.graph import FERROFLOW_DOMAIN, TOPOLOGIES, Graph, GraphBuilder, Op, generate
from ferroflow_dask.graph.from_onnx import load_onnx
from ferroflow_dask.kernels import check_supported, compile_op, evaluate, registry
from ferroflow_dask.kernels.provider import DeclinedError

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.asarray(RNG.standard_normal(shape), np.float32)


def op_of(op_type: str, inputs: Sequence[Any], n_outputs: int = 1, domain: str = "", **attributes: Any) -> Op:
    """An op whose i-th input is left out where the i-th value is None."""
    names = tuple("" if value is None else f"x{i}" for i, value in enumerate(inputs))
    return Op(0, "it", op_type, names, tuple(f"y{i}" for i in range(n_outputs)), domain, attributes)


def assert_same(actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Values agree, and types and shapes are equal; sequences item by item."""
    if isinstance(expected, list):
        assert isinstance(actual, list)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, rtol, atol)
        return
    expected = np.asarray(expected)
    assert isinstance(actual, np.ndarray)
    assert actual.shape == expected.shape
    if expected.dtype.kind in "OU":
        assert actual.tolist() == expected.tolist()
        return
    assert actual.dtype == expected.dtype
    if expected.dtype.kind in "fV":
        wide = actual.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_allclose(*wide, rtol=rtol, atol=atol)
    else:
        np.testing.assert_array_equal(actual, expected)


def expected_of(op: Op, opsets: dict[str, int], values: Sequence[Any]) -> list[Any]:
    """What `onnx.reference` makes of a node, without any code of ours."""
    node = helper.make_node(op.op_type, op.inputs, op.outputs, domain=op.domain, **op.attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), None)
        if isinstance(value, np.ndarray) and value.dtype.kind != "U"
        else helper.make_empty_tensor_value_info(name)
        for name, value in zip(op.inputs, values, strict=True)
        if name
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in op.outputs]
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=imports)
    feeds = {name: value for name, value in zip(op.inputs, values, strict=True) if name}
    return list(reference(model, feeds).values())


# ---------------------------------------------------------------- the contract of every provider

SHAPES = {
    "MatMul": {
        "matrix by matrix": ((3, 4), (4, 5)),
        "batch by matrix": ((2, 3, 4), (4, 5)),
        "batches broadcast": ((2, 1, 3, 4), (5, 4, 2)),
        "vector by vector is a scalar": ((4,), (4,)),
        "vector by matrix": ((4,), (4, 3)),
        "batch by vector": ((2, 3, 4), (4,)),
        "no rows": ((0, 4), (4, 3)),
        "nothing to sum is zero": ((3, 0), (0, 2)),
    },
    "Relu": {"a scalar": ((),), "a matrix": ((3, 4),), "an empty one": ((0, 3),)},
    "Add": {
        "equal shapes": ((2, 3), (2, 3)),
        "a row to a matrix": ((2, 3), (3,)),
        "both broadcast": ((2, 1, 3), (4, 1)),
        "a scalar": ((2, 3), ()),
        "two scalars": ((), ()),
        "empty broadcast": ((0, 1), (1, 3)),
    },
}
DTYPES = ("float16", "float32", "float64", "int32", "int64")

#: What a provider has no kernel for; all else it must compute itself.
HAS_NONE = {("onnxruntime", "Relu", "int64")}


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("op_type", "shapes"),
    [pytest.param(op, s, id=f"{op} of {name}") for op, table in SHAPES.items() for name, s in table.items()],
)
def test_providers_agree_with_onnx(provider, dtype, op_type, shapes):
    values = [np.asarray(4 * RNG.standard_normal(shape), dtype) for shape in shapes]
    for value in values:
        value.flags.writeable = False  # as they arrive from another worker
    op = op_of(op_type, values)
    kernel = compile_op(op, {"": 21}, [provider])
    expected = expected_of(op, {"": 21}, values)
    if (provider, op_type, dtype) in HAS_NONE:
        with pytest.raises(KernelNotFoundError):
            kernel(*values)
        kernel = compile_op(op, {"": 21})
    tolerance = 5e-3 if dtype == "float16" else 1e-5
    for _ in range(2):
        (actual,) = kernel(*values)
        assert_same(actual, expected[0], tolerance, tolerance)


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
def test_infinities_and_nan_are_results_without_a_warning(provider):
    big = np.float32([3e38, np.inf, np.nan, -0.0])
    (actual,) = compile_op(op_of("Add", [big, big]), {"": 21}, [provider])(big, big)
    np.testing.assert_array_equal(actual, np.float32([np.inf, np.inf, np.nan, 0.0]))


@pytest.mark.parametrize(
    ("op_type", "values"),
    [
        pytest.param("Add", (np.array([True]), np.array([True])), id="booleans have no sum in ONNX"),
        pytest.param("Add", (np.float32([1]), np.float64([1])), id="dtypes are never promoted"),
        pytest.param("Add", (np.array(["a"], object), np.array(["b"], object)), id="strings have no sum"),
        pytest.param("MatMul", (np.ones((2, 2), np.int8),) * 2, id="ONNX multiplies no bytes"),
        pytest.param("Relu", ([np.float32([1])],), id="a sequence is no array"),
    ],
)
def test_array_kernels_decline_what_numpy_would_do_but_onnx_does_not(op_type, values):
    kernel = compile_op(op_of(op_type, values), {"": 21}, ["array"])
    with pytest.raises(KernelNotFoundError, match="'it'"):
        kernel(*values)


def test_add_of_opset_6_is_left_to_others_since_it_does_not_broadcast():
    op = op_of("Add", [1, 2])
    with pytest.raises(KernelNotFoundError):
        compile_op(op, {"": 6}, ["array"])
    (actual,) = compile_op(op, {"": 6})(np.float32([1]), np.float32([2]))
    assert actual == 3


# ---------------------------------------------------------------- rounding of matrix products


def matmul_tolerance(a: Any, b: Any) -> Any:
    """Error bound of a product in single precision, that holds with a probability near 1 [units of a·b].

    4 √k u |a||b|, after Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019.
    """
    unit_roundoff = 2.0**-24
    wide = np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))
    return 4 * np.sqrt(a.shape[-1]) * unit_roundoff * (wide[0] @ wide[1])


def as_tf32(x: Any) -> Any:
    """Cut the mantissa to 10 bits, as tensor cores do to their operands."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("k", [16, 64, 512])
@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
def test_matmul_is_done_in_full_single_precision(provider, k):
    a, b = normal(24, k), normal(k, 20)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    (actual,) = compile_op(op_of("MatMul", [a, b]), {"": 21}, [provider])(a, b)
    assert (np.abs(actual - exact) <= matmul_tolerance(a, b)).all()
    assert not (np.abs(as_tf32(a) @ as_tf32(b) - exact) <= matmul_tolerance(a, b)).all()


# ---------------------------------------------------------------- operators of all sorts

IMAGE = normal(2, 3, 8, 8)
STRINGS = np.array(["b", "a", "c"], object)

CASES: dict[str, tuple[Any, ...]] = {
    # sentence: (op_type, values, attributes, number of outputs, opset or (domain, version))
    "Conv with bias and padding": ("Conv", [IMAGE, normal(4, 3, 3, 3), normal(4)], {"pads": [1, 1, 1, 1]}),
    "Conv in groups with strides": ("Conv", [IMAGE, normal(6, 1, 3, 3)], {"group": 3, "strides": [2, 2]}),
    "Conv dilated in one dimension": ("Conv", [normal(1, 2, 9), normal(3, 2, 2)], {"dilations": [3]}),
    "ConvTranspose": ("ConvTranspose", [IMAGE, normal(3, 2, 3, 3)], {"strides": [2, 2]}),
    "MaxPool with indices": ("MaxPool", [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2]}, 2),
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


# ---------------------------------------------------------------- where onnx.reference is not right


def coerced_softmax(x: Any, axis: int) -> Any:
    """Softmax up to opset 12, from its text: coerced to two dimensions, normalised along the second."""
    flat = x.reshape(int(np.prod(x.shape[:axis])), -1).astype(np.float64)
    e = np.exp(flat - flat.max(axis=1, keepdims=True))
    return (e / e.sum(axis=1, keepdims=True)).reshape(x.shape)


@pytest.mark.parametrize("provider", ["onnxruntime", "reference"])
@pytest.mark.parametrize("axis", [None, 1, 2, -1], ids=lambda axis: f"axis {axis}")
@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (1, 5, 1, 1)], ids=str)
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax_before_opset_13_works_on_two_dimensions(provider, op_type, shape, axis):
    x = normal(*shape)
    attributes = {} if axis is None else {"axis": axis}
    expected = coerced_softmax(x, 1 if axis is None else axis % len(shape))
    if op_type == "LogSoftmax":
        expected = np.log(expected)
    elif op_type == "Hardmax":
        flat = expected.reshape(int(np.prod(shape[: 1 if axis is None else axis % len(shape)])), -1)
        expected = (flat == flat.max(axis=1, keepdims=True)).reshape(shape)
    (actual,) = compile_op(op_of(op_type, [x], **attributes), {"": 9}, [provider])(x)
    assert_same(actual, expected.astype(np.float32))


@pytest.mark.parametrize("provider", ["onnxruntime", "reference"])
@pytest.mark.parametrize("opset", [7, 9, 13, 14, 15])
def test_batch_normalization_uses_the_given_statistics(provider, opset):
    x, scale, bias, mean, variance = normal(2, 3, 4), *(np.abs(normal(3)) + 1 for _ in range(4))
    op = op_of("BatchNormalization", [x, scale, bias, mean, variance], epsilon=0.1)
    (actual,) = compile_op(op, {"": opset}, [provider])(x, scale, bias, mean, variance)
    per_channel = (x.transpose(0, 2, 1) - mean) / np.sqrt(variance + 0.1) * scale + bias
    assert_same(actual, per_channel.transpose(0, 2, 1).astype(np.float32))


@pytest.mark.parametrize("provider", ["onnxruntime", "reference"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_lrn_sums_over_neighbouring_channels_of_every_sample(provider, size):
    x = normal(2, 5, 3, 4)
    expected = np.empty_like(x)
    for c in range(5):
        # From the operator's text: max(0, c - floor((size - 1) / 2)) to min(C - 1, c + ceil((size - 1) / 2)).
        near = slice(max(0, c - (size - 1) // 2), min(4, c + -(-(size - 1) // 2)) + 1)
        expected[:, c] = x[:, c] / (2 + 0.5 / size * (x[:, near] ** 2).sum(axis=1)) ** 0.7
    op = op_of("LRN", [x], alpha=0.5, beta=0.7, bias=2.0, size=size)
    (actual,) = compile_op(op, {"": 13}, [provider, "reference"])(x)  # onnxruntime declines even sizes
    assert_same(actual, expected)


@pytest.mark.parametrize("provider", ["onnxruntime", "reference"])
def test_logsoftmax_does_not_underflow(provider):
    (actual,) = compile_op(op_of("LogSoftmax", [1]), {"": 13}, [provider])(np.float32([[0, 200]]))
    np.testing.assert_allclose(actual, [[-200, 0]])


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


# ---------------------------------------------------------------- ONNX's own test suite

#: Node tests whose expectations our default kernels do not meet, with the reason.
DEVIATIONS = {
    "test_bernoulli*": "random",
    "test_training_dropout*": "random",
    "test_*bf16*": "rounded to bfloat16 at other places",
    "test_*fp16*": "rounded to half precision at other places",
    "test_dft*": "onnxruntime's error is above the tolerance of exact zeros",
    "test_stft*": "onnxruntime's error is above the tolerance of exact zeros",
    "test_maxunpool_export_with_output_shape": "onnxruntime takes indices in the shape before padding",
    "test_resize_downsample_scales_*_align_corners": "onnxruntime aligns the rounded, not the exact size",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_*_causal": "onnxruntime masks another stage",
}


def test_onnx_node_tests_pass_but_for_known_deviations():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases are generated, with overflows that they test
        from onnx.backend.test.loader import load_model_tests

        cases = [case for case in load_model_tests(kind="node") if case.model is not None]
    if not cases:
        pytest.skip("this release of onnx keeps its node tests in files")
    failed = []
    for case in cases:
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in DEVIATIONS):
            continue
        try:
            check_node_case(case)
        except (AssertionError, KernelError, KernelNotFoundError) as error:
            failed.append(f"{case.name}: {str(error).strip()[:200]}")
    assert not failed
    assert len(cases) > 1000


def check_node_case(case: Any) -> None:
    def array(value: Any) -> Any:
        return onnx.numpy_helper.to_array(value) if isinstance(value, TensorProto) else value

    names = [entry.name for entry in case.model.graph.input]
    graph = load_onnx(case.model)
    for inputs, outputs in case.data_sets:
        actual = evaluate(graph, dict(zip(names, map(array, inputs), strict=False)))
        for one, other in zip(actual.values(), map(array, outputs), strict=True):
            if isinstance(other, np.ndarray):
                assert_same(one, other, max(case.rtol, 1e-3), max(case.atol, 1e-6))


# ---------------------------------------------------------------- ferroflow's own operators


def composed(outputs: int, *nodes: onnx.NodeProto, **values: Any) -> Any:
    model = model_of(nodes, {}, ["y"], initializers=values)
    return reference(model, {})["y"]


@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 3, 8)], ids=str)
def test_layer_norm_is_layer_normalization_with_ones(shape):
    x = normal(*shape)
    node = helper.make_node("LayerNormalization", ["x", "ones"], ["y"], epsilon=1e-3)
    expected = composed(1, node, x=x, ones=np.ones(shape[-1], np.float32))
    op = op_of("LayerNorm", [x], domain=FERROFLOW_DOMAIN, epsilon=1e-3)
    assert_same(compile_op(op, {FERROFLOW_DOMAIN: 1})(x)[0], expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_layer_norm_keeps_its_dtype(dtype):
    x = np.asarray(1000 + normal(2, 64), dtype)
    (y,) = compile_op(op_of("LayerNorm", [x], domain=FERROFLOW_DOMAIN), {})(x)
    assert y.dtype == dtype
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y.astype(np.float64).std(axis=-1), 1, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("seq", "seq2", "heads"), [(3, 3, 1), (3, 5, 2), (4, 2, 8)])
def test_head_matmul_is_reshape_transpose_matmul(dtype, seq, seq2, heads):
    d, tolerance = 8, 1e-2 if dtype == "float16" else 1e-5
    q, k = normal(seq, d).astype(dtype), normal(seq2, d).astype(dtype)
    split = {"q": q, "k": k, "shape": np.int64([0, heads, d // heads]), "merged": np.int64([0, d])}
    make = helper.make_node
    heads_of_k = make("Reshape", ["k", "shape"], ["ks"])
    scores = composed(
        1, make("Reshape", ["q", "shape"], ["qs"]), heads_of_k,
        make("Transpose", ["qs"], ["qt"], perm=[1, 0, 2]), make("Transpose", ["ks"], ["kt"], perm=[1, 2, 0]),
        make("MatMul", ["qt", "kt"], ["y"]), **split,
    )  # fmt: skip
    op = op_of("MatMul", [q, k], domain=FERROFLOW_DOMAIN, heads=heads, trans_b=1)
    assert_same(compile_op(op, {})(q, k)[0], scores, tolerance, tolerance)

    mixed = composed(
        1, heads_of_k, make("Transpose", ["ks"], ["kt"], perm=[1, 0, 2]), make("MatMul", ["s", "kt"], ["m"]),
        make("Transpose", ["m"], ["mt"], perm=[1, 0, 2]), make("Reshape", ["mt", "merged"], ["y"]),
        **split, s=scores,
    )  # fmt: skip
    op = op_of("MatMul", [scores, k], domain=FERROFLOW_DOMAIN, heads=heads, trans_b=0)
    assert_same(compile_op(op, {})(scores, k)[0], mixed, tolerance, tolerance)


@pytest.mark.parametrize(
    ("a", "b", "trans_b"),
    [
        pytest.param((3, 7), (3, 7), 1, id="columns that heads cannot share"),
        pytest.param((4, 3, 3), (3, 8), 0, id="scores of other heads"),
        pytest.param((2, 3, 4), (3, 8), 0, id="scores of another length"),
    ],
)
def test_head_matmul_refuses(a, b, trans_b):
    op = op_of("MatMul", [1, 2], domain=FERROFLOW_DOMAIN, heads=2, trans_b=trans_b)
    with pytest.raises(KernelError, match=r"'it' \(ferroflow.MatMul\) failed on \(float32\["):
        compile_op(op, {})(normal(*a), normal(*b))


def test_slow_sleeps_for_its_duration_and_passes_its_input_through(monkeypatch):
    slept = []
    monkeypatch.setattr("ferroflow_dask.kernels.synthetic.time.sleep", slept.append)
    x = normal(16)
    (y,) = compile_op(op_of("Slow", [x], domain=FERROFLOW_DOMAIN, duration=0.25), {})(x)
    assert y is x
    assert slept == [0.25]


# ---------------------------------------------------------------- finding kernels, and failing


def test_an_operator_that_nobody_has_is_named_with_its_opset_and_who_was_asked():
    op = op_of("Frobnicate", [1], domain="acme")
    message = (
        r"^no kernel for op 'it' \(acme.Frobnicate, opset 3\); "
        r"asked: synthetic, array, onnxruntime, reference$"
    )
    with pytest.raises(KernelNotFoundError, match=message):
        compile_op(op, {"acme": 3})
    with pytest.raises(KernelNotFoundError, match=r"asked: array$"):
        compile_op(op_of("Conv", [1, 2]), {"": 18}, ["array"])
    with pytest.raises(KernelNotFoundError, match=r"asked: nobody$"):
        compile_op(op, {}, [])


def test_check_supported_names_the_first_op_without_a_kernel():
    x, y, z = ("x", "y", "z")
    ops = (
        Op(0, "fine", "Relu", (), (x,)),
        Op(1, "odd", "Foo", (x,), (y,), "acme"),
        Op(2, "b", "Bar", (y,), (z,)),
    )
    graph = Graph("g", (), ops, ("z",), opsets={"": 18, "acme": 1})
    with pytest.raises(KernelNotFoundError, match="'odd'"):
        check_supported(graph)
    check_supported(generate("transformer", seq_len=2, d_model=4, n_heads=2))


def test_an_unknown_provider_is_answered_with_those_there_are():
    with pytest.raises(UnknownNameError, match=r"'numpyy'; choose one of: array, onnxruntime"):
        compile_op(op_of("Relu", [1]), {"": 18}, ["numpyy"])


def test_a_kernel_that_fails_names_op_kind_and_operands_in_one_line():
    values = normal(2, 3), np.int64([4, 5])
    with pytest.raises(
        KernelError, match=r"^op 'it' \(Reshape\) failed on \(float32\[2, 3\], int64\[2\]\): "
    ) as error:
        compile_op(op_of("Reshape", values), {"": 18})(*values)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None


def test_bad_attributes_fail_when_the_op_is_compiled():
    with pytest.raises(KernelError, match=r"'it' \(ferroflow.Slow\) cannot be compiled"):
        compile_op(op_of("Slow", [1], domain=FERROFLOW_DOMAIN, duration="long"), {})


class Recording:
    """A provider of `acme` ops that counts what it compiles; declines integers, fails on strings."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.compiled: list[Op] = []

    def supports(self, op: Op, opsets: Any) -> bool:
        return op.domain == "acme"

    def compile(self, op: Op, opsets: Any) -> Any:
        self.compiled.append(op)

        def kernel(x: Any) -> tuple[str, Any]:
            if isinstance(x, int):
                raise DeclinedError("integers are not for me")
            if isinstance(x, str):
                raise DeclinedError("tried in vain", failed=True)
            return (f"{self.name}: {x}",)

        return kernel


@pytest.fixture
def provide(monkeypatch):
    """Add a provider under a name of its own, with an empty cache of kernels."""
    monkeypatch.setattr(registry, "_CACHE", registry._KernelCache(2))
    monkeypatch.setattr(registry, "PROVIDERS", dict(registry.PROVIDERS))
    registry._provider.cache_clear()

    def add(name: str, factory: Any = Recording) -> Any:
        provider = factory(name)
        registry.PROVIDERS[name] = lambda: provider
        return provider

    yield add
    registry._provider.cache_clear()


def test_equal_ops_share_one_kernel_whatever_their_names_and_however_many_threads(provide):
    recording = provide("one")
    barrier = threading.Barrier(8)
    results: list[Any] = []

    def work(index: int) -> None:
        op = Op(
            index, f"op{index}", "Foo", (f"in{index}",), (f"out{index}",), "acme", {"axis": 1, "xs": [1.0]}
        )
        op = pickle.loads(pickle.dumps(op))
        barrier.wait()
        results.append(compile_op(op, {"acme": 1}, ["one"])(1.5))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [("one: 1.5",)] * 8
    assert len(recording.compiled) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: (op_of("Foo", [1], domain="acme", axis=2), {}), id="another attribute"),
        pytest.param(
            lambda: (op_of("Foo", [1], domain="acme", axis=1.0), {}), id="a float instead of an integer"
        ),
        pytest.param(lambda: (op_of("Foo", [1], domain="acme"), {}), id="no attribute"),
        pytest.param(
            lambda: (op_of("Foo", [1, 1], domain="acme", axis=1), {}), id="another number of inputs"
        ),
        pytest.param(lambda: (op_of("Foo", [1, None], domain="acme", axis=1), {}), id="an input left out"),
        pytest.param(lambda: (op_of("Foo", [1], 2, "acme", axis=1), {}), id="another number of outputs"),
        pytest.param(lambda: (op_of("Foo", [1], domain="acme", axis=1), {"acme": 2}), id="another opset"),
        pytest.param(
            lambda: (op_of("Foo", [1], domain="acme", axis=helper.make_tensor("t", FLOAT, [1], [1])), {}),
            id="a tensor",
        ),
    ],
)
def test_ops_that_differ_have_kernels_of_their_own(provide, other):
    recording = provide("one")
    compile_op(op_of("Foo", [1], domain="acme", axis=1), {}, ["one"])
    op, opsets = other()
    compile_op(op, opsets, ["one"])
    assert len(recording.compiled) == 2


def test_kernels_used_least_recently_are_dropped(provide):
    recording = provide("one")  # and room for two kernels
    for axis in (1, 2, 1, 3, 1, 2):
        compile_op(op_of("Foo", [1], domain="acme", axis=axis), {}, ["one"])
    assert [op.attributes["axis"] for op in recording.compiled] == [1, 2, 3, 2]


def test_what_one_provider_declines_the_next_one_does(provide):
    provide("one")
    two = provide("two")
    two.compile = lambda op, opsets: lambda x: ("two",)
    kernel = compile_op(op_of("Foo", [1], domain="acme"), {}, ["one", "two"])
    assert [kernel(x)[0] for x in (1, 1.5, 1, "s")] == ["two", "one: 1.5", "two", "two"]


def test_when_all_decline_it_is_no_kernel_but_when_one_tried_it_is_a_failure(provide):
    provide("one")
    kernel = compile_op(op_of("Foo", [1], domain="acme"), {}, ["one"])
    with pytest.raises(KernelNotFoundError, match="integers are not for me"):
        kernel(1)
    with pytest.raises(KernelError, match="tried in vain"):
        kernel("s")


def test_a_provider_whose_library_is_missing_is_passed_over(provide):
    provide("one")

    def absent() -> Any:
        raise ImportError("no such library")

    registry.PROVIDERS["absent"] = absent
    kernel = compile_op(op_of("Foo", [1], domain="acme"), {}, ["absent", "one"])
    assert kernel(1.5) == ("one: 1.5",)


def test_importing_the_package_does_not_import_onnxruntime():
    import subprocess

    code = "import sys, ferroflow_dask.kernels; sys.exit('onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- whole graphs

SMALL: dict[str, dict[str, Any]] = {
    "imbalanced": {"n_heavy": 1, "heavy_ms": 0.1, "n_fast": 3, "fast_ms": 0.0},
    "wide": {"width": 2, "depth": 2, "skew": 0.0},
    "large-wide": {"width": 3, "skew": 0.0},
    "xlarge-wide": {"width": 3, "skew": 0.0},
    "skewed": {"n": 4, "factor": 0.0},
    "transformer": {"seq_len": 5, "d_model": 8, "n_heads": 2},
    "large-transformer": {"layers": 2, "seq_len": 3, "d_model": 8, "n_heads": 4},
    "xlarge-transformer": {"layers": 3, "seq_len": 3, "d_model": 4, "n_heads": 1},
    "resnet": {"channels": 6},
    "matmul-chain": {"n_ops": 4, "m": 5},
    "matmul-parallel": {"n_branches": 2, "ops_per_branch": 3, "m": 4},
    "uniform": {"n": 3, "dim": 4},
}


def plainly(op: Op, values: list[Any]) -> Any:
    """One op of a built-in graph, in double precision and one head at a time."""
    values = [value.astype(np.float64) for value in values]
    if op.op_type == "Slow":
        return values[0]
    if op.op_type == "Relu":
        return np.where(values[0] > 0, values[0], 0)
    if op.op_type == "LayerNorm":
        x = values[0]
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + op.attributes["epsilon"])
    assert op.op_type == "MatMul"
    a, b = values
    if not op.domain:
        return a @ b
    heads = op.attributes["heads"]
    width = b.shape[1] // heads
    parts = [slice(h * width, (h + 1) * width) for h in range(heads)]
    if op.attributes["trans_b"]:
        return np.stack([a[:, part] @ b[:, part].T for part in parts])
    return np.concatenate([a[h] @ b[:, part] for h, part in enumerate(parts)], axis=1)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_generated_graphs_are_what_plain_numpy_computes(name):
    graph = generate(name, seed=3, **SMALL[name])
    values = dict(graph.constants)
    for op in graph.topological_order:
        values[op.outputs[0]] = plainly(op, [values[v] for v in op.inputs])
    actual = evaluate(graph)
    assert list(actual) == list(graph.outputs)
    for output, value in actual.items():
        assert_same(value, values[output].astype(np.float32), rtol=1e-3, atol=1e-4)


def test_every_op_runs_once_inside_the_hook():
    graph = generate("transformer", seq_len=2, d_model=4, n_heads=2)
    entered: Counter[str] = Counter()
    left: Counter[str] = Counter()

    @contextmanager
    def count(op: Op) -> Any:
        entered[op.name] += 1
        yield
        left[op.name] += 1

    evaluate(graph, on_op=count)
    assert entered == left == {op.name: 1 for op in graph.ops}


def test_values_are_dropped_after_their_last_reader(monkeypatch):
    alive: list[Any] = []
    most = 0

    def recording(op: Op, *rest: Any) -> Any:
        kernel = compile_op(op, *rest)

        def run(*values: Any) -> Any:
            nonlocal most
            (result,) = kernel(*values)
            alive.append(weakref.ref(result))
            most = max(most, sum(ref() is not None for ref in alive))
            return (result,)

        return run

    monkeypatch.setattr(sys.modules["ferroflow_dask.kernels.evaluate"], "compile_op", recording)
    evaluate(generate("matmul-chain", n_ops=10, m=3))
    assert len(alive) == 10
    assert most == 2  # the one being read and the one being made


def test_an_output_that_other_ops_read_survives():
    builder = GraphBuilder()
    x = builder.input("x", "float32", (2,))
    y = builder.op("Relu", x)
    builder.output(x=x, y=y, z=builder.op("Add", y, y))
    actual = evaluate(builder.build(), {"x": np.float32([-1, 2])})
    assert {name: value.tolist() for name, value in actual.items()} == {
        "x": [-1, 2],
        "y": [0, 2],
        "z": [0, 4],
    }


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        pytest.param({}, r"input 'x' of graph 'g' is missing; it takes x: float32\[2\]", id="missing"),
        pytest.param({"x": 1, "w": 2}, r"graph 'g' has no input 'w'; it takes x", id="unknown"),
    ],
)
def test_inputs_must_be_those_of_the_graph(inputs, message):
    builder = GraphBuilder("g")
    builder.output(y=builder.op("Relu", builder.input("x", "float32", (2,))))
    with pytest.raises(BindError, match=message):
        evaluate(builder.build(), inputs)
