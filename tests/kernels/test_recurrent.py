"""LSTM, GRU and RNN in types that onnxruntime has no kernels for, against those that it has."""

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

from ferroflow_dask.exceptions import KernelError
from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.kernels import compile_op, evaluate

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
