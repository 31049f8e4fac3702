"""What describes values or makes them of nothing: its results are on the host, to steer other operators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.operator import ELEMENT_TYPES, PLAIN, Operator, integers

#: Attributes of Constant, one of which gives its value, with their dtypes.
_CONSTANTS = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def _shape(op: Op, x: Any) -> Any:
    """Return the shape of x, or part of it (ONNX Shape, opset 1 on)."""
    return np.array(x.shape[op.attributes.get("start", 0) : op.attributes.get("end")], np.int64)


def _size(_: Op, x: Any) -> Any:
    """Return the number of elements of x (ONNX Size, opset 1 on)."""
    return np.array(math.prod(x.shape), np.int64)


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, onnx.TensorProto) and tensor.data_type in ELEMENT_TYPES


def _constant(op: Op) -> Any:
    """Return the value of an attribute (ONNX Constant, opset 1 on)."""
    ((name, value),) = op.attributes.items()
    return onnx.numpy_helper.to_array(value) if name == "value" else np.array(value, _CONSTANTS[name])


def _is_constant(op: Op) -> bool:
    names = list(op.attributes)
    return len(names) == 1 and (names[0] in _CONSTANTS or _is_plain(op.attributes.get("value")))


def _constant_of_shape(op: Op, shape: Any) -> Any:
    """Repeat one value (ONNX ConstantOfShape, opset 9 on)."""
    value = op.attributes.get("value")
    one = np.zeros(1, np.float32) if value is None else onnx.numpy_helper.to_array(value)
    return np.full(tuple(integers(shape)), one.reshape(-1)[0])


def _is_constant_of_shape(op: Op) -> bool:
    value = op.attributes.get("value")
    return value is None or (_is_plain(value) and math.prod(value.dims) == 1)


OPERATORS = (
    Operator("Shape", (1, 13, 15, 19, 21, 23, 24, 25), _shape, PLAIN),
    Operator("Size", (1, 13, 19, 21, 23, 24, 25), _size, PLAIN),
    Operator("Constant", (1, 9, 11, 12, 13, 19, 21, 23, 24, 25), _constant, PLAIN, takes=_is_constant),
    Operator(
        "ConstantOfShape",
        (9, 20, 21, 23, 24, 25),
        _constant_of_shape,
        PLAIN,
        host=frozenset({0}),
        takes=_is_constant_of_shape,
    ),
)
