"""Pooling, transposed convolution, LSTM, GRU and RNN of `reference`, against onnxruntime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from agreement import assert_same
from kernel_cases import normal_from, op_of
from models import model_of
from onnx.helper import make_graph, make_node, make_tensor_value_info

from ferroflow_dask.exceptions import KernelError, KernelNotFoundError
from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.kernels import compile_op, evaluate

normal = normal_from(seed=1)
IMAGE = normal(2, 3, 5, 6)
OPSETS = {"MaxPool": 12, "AveragePool": 19, "LpPool": 18, "ConvTranspose": 11}
DTYPES = pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name
)

POOLINGS: dict[str, dict[str, Any]] = {
    "no padding": {},
    "pads that differ": {"pads": [1, 0, 1, 2]},
    "pads that differ, and strides": {"pads": [1, 0, 1, 2], "strides": [2, 3]},
    "more padding at the end": {"auto_pad": "SAME_UPPER"},
    "more padding at the beginning": {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
    "no padding by name": {"auto_pad": "VALID", "strides": [2, 1]},
    "dilations": {"dilations": [2, 1]},
    "a last window beyond the end": {"ceil_mode": 1, "strides": [3, 2]},
    "a last window beyond the padding": {"ceil_mode": 1, "strides": [2, 2], "pads": [1, 1, 1, 1]},
}


def check(op: Any, opset: int, values: list[Any], dtype: Any) -> None:
    given = [value.astype(dtype) for value in values]
    expected = compile_op(op, {"": opset}, ["onnxruntime"])(*(value.astype(np.float32) for value in given))
    tolerance = {np.float16: 2e-3, ml_dtypes.bfloat16: 2**-7}.get(dtype, 1e-5)
    for actual, want in zip(compile_op(op, {"": opset}, ["reference"])(*given), expected, strict=True):
        assert_same(actual, want if want.dtype == np.int64 else want.astype(dtype), tolerance, tolerance)


@DTYPES
@pytest.mark.parametrize("attributes", POOLINGS.values(), ids=POOLINGS)
@pytest.mark.parametrize(
    ("op_type", "more", "n_outputs"),
    [
        pytest.param("MaxPool", {}, 1, id="largest"),
        pytest.param("MaxPool", {}, 2, id="largest, and where"),
        pytest.param("MaxPool", {"storage_order": 1}, 2, id="largest, and where by columns"),
        pytest.param("AveragePool", {}, 1, id="average"),
        pytest.param("AveragePool", {"count_include_pad": 1}, 1, id="average with padding"),
        pytest.param("LpPool", {}, 1, id="norm"),
        pytest.param("LpPool", {"p": 3}, 1, id="norm of order 3"),
    ],
)
def test_pooling(op_type, more, n_outputs, attributes, dtype):
    op = op_of(op_type, [IMAGE], n_outputs, kernel_shape=[2, 3], **attributes, **more)
    check(op, OPSETS[op_type], [IMAGE], dtype)


@pytest.mark.parametrize("shape", [(2, 2, 7), (2, 1, 5, 4, 6)], ids=str)
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool"])
def test_pooling_along_other_numbers_of_axes(op_type, shape):
    n = len(shape) - 2
    pads = [0, 1, 1][:n] + [1, 0, 1][:n]
    n_outputs = 2 if op_type == "MaxPool" else 1
    x = normal(*shape)
    op = op_of(op_type, [x], n_outputs, kernel_shape=[2, 3, 2][:n], pads=pads, strides=[2, 1, 2][:n])
    check(op, OPSETS[op_type], [x], np.float64)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_the_largest_of_bytes_and_where_it_is(dtype):
    x = np.random.default_rng(0).integers(0, 100, (1, 2, 5, 5)).astype(dtype)
    op = op_of("MaxPool", [x], 2, kernel_shape=[2, 2], pads=[1, 0, 0, 1])
    expected = compile_op(op, {"": 12}, ["onnxruntime"])(x)
    for actual, want in zip(compile_op(op, {"": 12}, ["reference"])(x), expected, strict=True):
        assert_same(actual, want)


def test_what_is_no_number_is_passed_over_unless_there_is_nothing_else():
    x = np.float64([[[np.nan, 1, np.nan, -np.inf, np.nan, np.nan]]])
    op = op_of("MaxPool", [x], 2, kernel_shape=[2], strides=[2])
    y, at = compile_op(op, {"": 12}, ["reference"])(x)
    np.testing.assert_array_equal(y, [[[1, -np.inf, np.nan]]])
    np.testing.assert_array_equal(at, [[[1, 3, 4]]])


@pytest.mark.parametrize("providers", [None, ["reference"]], ids=["as usual", "reference"])
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool"])
def test_dilated_windows_that_pad_by_themselves_have_one_position_for_each_element(op_type, providers):
    x = np.abs(normal(1, 1, 6)) + 1  # onnxruntime would return four elements
    op = op_of(op_type, [x], kernel_shape=[2], dilations=[2], auto_pad="SAME_UPPER")
    before, after = np.pad(x, ((0, 0), (0, 0), (1, 0)))[..., :6], np.pad(x, ((0, 0), (0, 0), (0, 1)))[..., 1:]
    n_inside = np.float32([1, 2, 2, 2, 2, 1])
    expected = {
        "MaxPool": np.maximum(before, after),
        "AveragePool": (before + after) / n_inside,
        "LpPool": np.sqrt(before**2 + after**2),
    }[op_type]
    (actual,) = compile_op(op, {"": OPSETS[op_type]}, providers)(x)
    assert_same(actual, expected)


@pytest.mark.parametrize(
    "attributes",
    [
        pytest.param({"auto_pad": "SAME_UPPER", "kernel_shape": [1]}, id="elements passed over"),
        pytest.param({"auto_pad": "VALID", "ceil_mode": 1, "kernel_shape": [2]}, id="ceil_mode"),
    ],
)
def test_pooling_that_onnx_and_onnxruntime_mean_otherwise_is_declined(attributes):
    x = normal(1, 1, 6).astype(ml_dtypes.bfloat16)
    with pytest.raises(KernelNotFoundError, match="auto_pad"):
        compile_op(op_of("MaxPool", [x], strides=[3], **attributes), {"": 12})(x)


TRANSPOSED: dict[str, dict[str, Any]] = {
    "no padding": {},
    "pads that differ": {"pads": [1, 0, 1, 1]},
    "strides": {"strides": [2, 3]},
    "dilations": {"dilations": [2, 1]},
    "room at the end": {"strides": [3, 2], "output_padding": [1, 1]},
    "more padding at the end": {"auto_pad": "SAME_UPPER", "strides": [2, 1]},
    "more padding at the beginning": {"auto_pad": "SAME_LOWER", "strides": [2, 1]},
    "windows that leave gaps": {"auto_pad": "SAME_UPPER", "strides": [2, 3]},
    "windows that leave gaps, and room at the end": {
        "auto_pad": "SAME_LOWER", "strides": [2, 3], "output_padding": [0, 1]
    },
    "a given size": {"strides": [2, 2], "output_shape": [9, 10]},
    "a given size with more padding at the end": {
        "strides": [2, 2], "output_shape": [10, 10], "auto_pad": "SAME_UPPER"
    },
    "a given size beyond the windows": {"strides": [3, 3], "output_shape": [16, 18]},
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("attributes", TRANSPOSED.values(), ids=TRANSPOSED)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "a bias"])
def test_transposed_convolution(groups, has_bias, attributes, dtype):
    values = [IMAGE, normal(3, 2, 3, 2), *([normal(2 * groups)] if has_bias else [])]
    check(op_of("ConvTranspose", values, group=groups, **attributes), 11, values, dtype)


@pytest.mark.parametrize("n", [1, 3])
def test_transposed_convolution_along_other_numbers_of_axes(n):
    values = [normal(2, 4, *[3, 4, 5][:n]), normal(4, 2, *[2, 1, 3][:n]), normal(4)]
    op = op_of("ConvTranspose", values, group=2, strides=[2, 1, 3][:n], pads=[1, 0, 1][:n] + [0, 0, 1][:n])
    check(op, 11, values, np.float64)


def test_a_transposed_convolution_is_as_large_as_onnx_infers():
    values = [IMAGE.astype(np.float64), normal(3, 2, 3, 2).astype(np.float64)]
    attributes = {"auto_pad": "SAME_UPPER", "strides": [2, 3]}
    (y,) = compile_op(op_of("ConvTranspose", values, **attributes), {"": 11})(*values)
    inputs = {name: (onnx.TensorProto.DOUBLE, v.shape) for name, v in zip("xw", values, strict=True)}
    model = model_of([make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)], inputs, ["y"], opset=11)
    inferred = model.graph.output[0].type.tensor_type.shape  # as onnx infers it
    assert [dim.dim_value for dim in inferred.dim] == list(y.shape)


#: Gates, and the names of the activations for each direction.
CELLS = {
    "LSTM": (4, ["Sigmoid", "Relu", "Elu"]),
    "GRU": (3, ["HardSigmoid", "Softsign"]),
    "RNN": (1, ["Relu"]),
}
N_STEPS, BATCH, N_INPUTS, HIDDEN = 4, 3, 2, 3

CASES: dict[str, dict[str, Any]] = {
    # sentence: attributes, and which of the optional operands there are
    "nothing but weights": {},
    "a bias": {"operands": "b"},
    "sequences of several lengths": {"operands": "bl"},
    "sequences of several lengths from given states": {"operands": "blhc"},
    "given states": {"operands": "hc"},
    "peepholes": {"operands": "bhcp"},
    "bounded arguments of activations": {"operands": "bp", "clip": 0.2},
    "other activations": {"operands": "b", "activations": True},
    "activations with parameters": {
        "operands": "b",
        "activations": ["HardSigmoid", "LeakyRelu", "ScaledTanh"],
        "activation_alpha": [0.3, 0.1, 0.5],
        "activation_beta": [0.4, 0.7],
    },
    "coupled gates": {"operands": "bl", "input_forget": 1},
    "a reset behind the product": {"operands": "bl", "linear_before_reset": 1},
}
#: Which of those activations take one of such parameters each.
TAKERS = {
    "activation_alpha": ("HardSigmoid", "LeakyRelu", "ScaledTanh"),
    "activation_beta": ("HardSigmoid", "ScaledTanh"),
}
ONLY = {"input_forget": "LSTM", "linear_before_reset": "GRU"}


def case(cell: str, direction: str, sentence: str) -> tuple[Any, list[Any]]:
    """Return an op and its operands in single precision."""
    normal = normal_from(seed=3)
    n_gates, others = CELLS[cell]
    n = 2 if direction == "bidirectional" else 1
    attributes = {"hidden_size": HIDDEN, "direction": direction, **CASES[sentence]}
    there = attributes.pop("operands", "")
    names = attributes.get("activations")
    if names is True:
        attributes["activations"] = others * n
    elif names:
        attributes["activations"] = names[-len(others) :] * n
        for parameter, takers in TAKERS.items():
            n_taken = len([name for name in attributes["activations"] if name in takers])
            attributes[parameter] = (attributes[parameter] * 3)[:n_taken]
    optional = {
        "b": normal(n, 2 * n_gates * HIDDEN),
        "l": np.int32([4, 1, 3]),
        "h": normal(n, BATCH, HIDDEN),
        "c": normal(n, BATCH, HIDDEN),
        "p": normal(n, 3 * HIDDEN),
    }
    values = [normal(N_STEPS, BATCH, N_INPUTS), normal(n, n_gates * HIDDEN, N_INPUTS)]
    values += [normal(n, n_gates * HIDDEN, HIDDEN)]
    values += [optional[name] if name in there else None for name in ("blhcp" if cell == "LSTM" else "blh")]
    return op_of(cell, values, 3 if cell == "LSTM" else 2, **attributes), values


def cast(values: list[Any], dtype: Any) -> list[Any]:
    return [
        value.astype(dtype) if value is not None and value.dtype.kind in "fV" else value for value in values
    ]


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name
)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (cell, sentence)
        for cell in CELLS
        for sentence, attributes in CASES.items()
        if all(ONLY.get(name, cell) == cell for name in attributes)
    ],
)
def test_all_of_the_operator_counts(cell, sentence, direction, dtype):
    op, values = case(cell, direction, sentence)
    given = cast(values, dtype)
    expected = compile_op(op, {"": 14}, ["onnxruntime"])(*cast(given, np.float32))
    tolerance = 2**-8 if dtype is ml_dtypes.bfloat16 else 1e-4
    for actual, want in zip(compile_op(op, {"": 14}, ["reference"])(*given), expected, strict=True):
        assert_same(actual, want.astype(dtype), tolerance, tolerance / 10)


@pytest.mark.parametrize("cell", CELLS)
def test_the_batch_may_come_first(cell):
    op, values = case(cell, "bidirectional", "given states")
    y, *last = compile_op(op, {"": 14}, ["reference"])(*values)
    batch_first = op_of(cell, values, 3 if cell == "LSTM" else 2, **op.attributes, layout=1)
    # Operands 0, 5 and 6 are x and the states.
    moved = [
        value.swapaxes(0, 1) if i in (0, 5, 6) and value is not None else value
        for i, value in enumerate(values)
    ]
    y_moved, *last_moved = compile_op(batch_first, {"": 14}, ["reference"])(*moved)
    assert_same(y_moved, y.transpose(2, 0, 1, 3))
    for state_moved, state in zip(last_moved, last, strict=True):
        assert_same(state_moved, state.swapaxes(0, 1))


def test_in_a_sub_graph_too():
    op, values = case("LSTM", "forward", "sequences of several lengths")
    names = ("x", "w", "r", "b", "l")
    wide = dict(zip(names, cast(values[:5], np.float64), strict=True))
    node = make_node("LSTM", names, ["", "h"], hidden_size=HIDDEN)
    out = [make_tensor_value_info(name, onnx.TensorProto.DOUBLE, [1, BATCH, HIDDEN]) for name in ("h", "n")]
    then = make_graph([node], "then", [], out[:1])
    other = make_graph([make_node("LSTM", names[:3], ["", "n"], hidden_size=HIDDEN)], "other", [], out[1:])
    inputs = {**wide, "condition": np.array(True)}
    types = {k: (onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in inputs.items()}
    fork = make_node("If", ["condition"], ["y"], then_branch=then, else_branch=other)
    model = model_of([fork], types, ["y"], opset=14)
    _, expected, _ = compile_op(op, {"": 14}, ["onnxruntime"])(*values)
    assert_same(evaluate(graph_from_onnx(model), inputs)["y"], expected.astype(np.float64))


@pytest.mark.parametrize(
    ("sentence", "attributes", "lengths"),
    [
        ("activation 'Swish'; choose one of", {"activations": ["Swish"]}, [1, 2, 3]),
        ("activation 'Affine' needs", {"activations": ["Affine"]}, [1, 2, 3]),
        (
            "2 activations are needed, not 1",
            {"activations": ["Relu"], "direction": "bidirectional"},
            [1, 2, 3],
        ),
        ("do not fit 4 steps", {}, [1, 5, 3]),
    ],
)
def test_what_makes_no_sense_is_told(sentence, attributes, lengths):
    op, values = case("RNN", attributes.get("direction", "forward"), "sequences of several lengths")
    values[4] = np.int32(lengths)
    op = op_of("RNN", values, **{**op.attributes, **attributes})
    with pytest.raises(KernelError, match=sentence):
        compile_op(op, {"": 14}, ["reference"])(*cast(values, np.float64))
