"""Functions of one value, element by element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.libraries import erf
from ferroflow_dask.kernels.array.operator import (
    FLOATS,
    NUMBERS,
    SIGNED,
    Operator,
    in_single,
    of_values,
    text,
)


def _relu(_: Op, x: Any) -> Any:
    """Replace what is negative by zero (ONNX Relu, opset 1 on; integers from 14)."""
    return np.maximum(x.dtype.type(0), x)  # in this order a negative zero stays, as in onnxruntime


def _sigmoid(_: Op, x: Any) -> Any:
    """Return 1 / (1 + exp -x) (ONNX Sigmoid, opset 6 on); exp may overflow, which gives the right zero."""
    return np.reciprocal(np.exp(-x) + x.dtype.type(1))


def _leaky_relu(op: Op, x: Any) -> Any:
    """Multiply what is negative by alpha (ONNX LeakyRelu, opset 6 on)."""
    alpha = x.dtype.type(op.attributes.get("alpha", 0.01))
    return np.where(np.less(x, x.dtype.type(0)), x * alpha, x)


def _elu(op: Op, x: Any) -> Any:
    """Return alpha (exp x - 1) where x is negative (ONNX Elu, opset 6 on)."""
    alpha, zero = x.dtype.type(op.attributes.get("alpha", 1.0)), x.dtype.type(0)
    return np.where(np.less(x, zero), np.expm1(np.minimum(x, zero)) * alpha, x)


def _line_from_zero_to_one(x: Any, slope: float, offset: float) -> Any:
    of = x.dtype.type
    return np.minimum(np.maximum(x * of(slope) + of(offset), of(0)), of(1))


def _hard_sigmoid(op: Op, x: Any) -> Any:
    """Cut alpha x + beta to what is between 0 and 1 (ONNX HardSigmoid, opset 6 on)."""
    return _line_from_zero_to_one(x, op.attributes.get("alpha", 0.2), op.attributes.get("beta", 0.5))


def _hard_swish(_: Op, x: Any) -> Any:
    """Return x times its HardSigmoid of slope 1/6 (ONNX HardSwish, opset 14 on)."""
    return x * _line_from_zero_to_one(x, 1 / 6, 0.5)


def _softplus(_: Op, x: Any) -> Any:
    """Return log (exp x + 1), without overflow (ONNX Softplus, opset 1 on)."""
    return np.logaddexp(x, x.dtype.type(0))


def _gelu(op: Op, x: Any) -> Any:
    """Weigh x by the normal distribution, or by its approximation by tanh (ONNX Gelu, opset 20).

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    of = x.dtype.type
    if text(op, "approximate", "none") == "tanh":
        weight = np.tanh((x + x * x * x * of(0.044715)) * of(math.sqrt(2 / math.pi)))
    else:
        weight = erf(x * of(math.sqrt(0.5)))
    return x * (weight + of(1)) * of(0.5)


OPERATORS = (
    Operator("Relu", (1, 6, 13, 14), _relu, FLOATS | SIGNED, is_first=True),
    # Their versions before 6 differ by an attribute that asked to work in place.
    Operator("Neg", (6, 13), of_values(np.negative), FLOATS | SIGNED),
    Operator("Abs", (6, 13), of_values(np.abs), NUMBERS),
    Operator("Sqrt", (6, 13), of_values(np.sqrt), FLOATS),
    Operator("Exp", (6, 13), of_values(np.exp), FLOATS),
    Operator("Log", (6, 13), of_values(np.log), FLOATS),
    Operator("Reciprocal", (6, 13), of_values(np.reciprocal), FLOATS),
    Operator("Floor", (6, 13), of_values(np.floor), FLOATS),
    Operator("Ceil", (6, 13), of_values(np.ceil), FLOATS),
    Operator("Round", (11, 22), of_values(np.rint), FLOATS),
    Operator("Tanh", (6, 13), of_values(np.tanh), FLOATS),
    Operator("Sigmoid", (6, 13), in_single(_sigmoid), FLOATS),
    Operator("Erf", (9, 13), in_single(of_values(erf)), FLOATS),
    Operator("LeakyRelu", (6, 16), _leaky_relu, FLOATS),
    Operator("Elu", (6, 22), in_single(_elu), FLOATS),
    Operator("HardSigmoid", (6, 22), in_single(_hard_sigmoid), FLOATS),
    Operator("HardSwish", (14, 22), in_single(_hard_swish), FLOATS),
    Operator("Softplus", (1, 22), in_single(_softplus), FLOATS),
    Operator("Gelu", (20,), in_single(_gelu), FLOATS),
)
