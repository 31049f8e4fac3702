"""Comparisons, logic, what is chosen by them, and conversion between dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.operator import (
    BOOL,
    ELEMENT_TYPES,
    FLOATS,
    NUMBERS,
    PLAIN,
    Operator,
    of_values,
)
from ferroflow_dask.kernels.provider import DeclinedError

#: Default bounds of Clip before opset 11, whatever the dtype.
_LARGEST_SINGLE = 3.4028234663852886e38


def _where(_: Op, condition: Any, a: Any, b: Any) -> Any:
    """Take a where the condition holds, else b (ONNX Where, opset 9 on)."""
    return np.where(condition, a, b)


def _clip_by_attributes(op: Op, x: Any) -> Any:
    """Bound x (ONNX Clip, opsets 6 to 10)."""
    low = x.dtype.type(op.attributes.get("min", -_LARGEST_SINGLE))
    high = x.dtype.type(op.attributes.get("max", _LARGEST_SINGLE))
    return np.minimum(np.maximum(x, low), high)


def _clip(_: Op, x: Any, low: Any = None, high: Any = None) -> Any:
    """Bound x; by the largest numbers of its dtype where no bounds are given (ONNX Clip, opset 11 on)."""
    if any(bound is not None and bound.ndim for bound in (low, high)):
        raise DeclinedError("bounds of Clip that are no scalars")
    if x.dtype.kind == "f":
        limits = np.finfo(x.dtype)
        low = limits.min if low is None else low
        high = limits.max if high is None else high
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


def _cast(op: Op, x: Any) -> Any:
    """Convert between plain dtypes (ONNX Cast, opset 6 on)."""
    return x.astype(ELEMENT_TYPES[op.attributes["to"]])


def _is_to_plain(op: Op) -> bool:
    return op.attributes.get("to") in ELEMENT_TYPES


OPERATORS = (
    Operator("Equal", (7, 11, 13, 19), of_values(np.equal), PLAIN),
    Operator("Less", (7, 9, 13), of_values(np.less), NUMBERS),
    Operator("Greater", (7, 9, 13), of_values(np.greater), NUMBERS),
    Operator("LessOrEqual", (12, 16), of_values(np.less_equal), NUMBERS),
    Operator("GreaterOrEqual", (12, 16), of_values(np.greater_equal), NUMBERS),
    Operator("And", (7,), of_values(np.logical_and), BOOL),
    Operator("Or", (7,), of_values(np.logical_or), BOOL),
    Operator("Xor", (7,), of_values(np.logical_xor), BOOL),
    Operator("Not", (1,), of_values(np.logical_not), BOOL),
    Operator("Where", (9, 16), _where, PLAIN, apart={0: BOOL}),
    Operator("Clip", (6,), _clip_by_attributes, FLOATS),
    Operator("Clip", (11, 12, 13), _clip, NUMBERS),
    Operator("Cast", (6, 9, 13, 19, 21, 23, 24, 25, 28), _cast, PLAIN, takes=_is_to_plain),
)
