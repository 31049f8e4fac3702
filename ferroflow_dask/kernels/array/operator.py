"""What one kernel is: its function, and the versions, dtypes and operands that it is right for.

Functions call only what dispatches on the array's library: ufuncs, NumPy's functions, a few methods. They
never look at values that may be on a device, but for the operands that are named as read on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.provider import DeclinedError

FLOATS = frozenset({"float16", "float32", "float64"})
SIGNED = frozenset({"int8", "int16", "int32", "int64"})
UNSIGNED = frozenset({"uint8", "uint16", "uint32", "uint64"})
INTEGERS = SIGNED | UNSIGNED
NUMBERS = FLOATS | INTEGERS
#: What ONNX multiplies and adds up, beside what it adds in pairs.
WIDE_NUMBERS = FLOATS | {"int32", "int64", "uint32", "uint64"}
BOOL = frozenset({"bool"})
PLAIN = NUMBERS | BOOL
INDICES = frozenset({"int32", "int64"})

#: ONNX's element types that these are. The other way round, older releases of onnx take bfloat16 for float32.
ELEMENT_TYPES: Mapping[int, np.dtype[Any]] = {
    onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)): np.dtype(name) for name in PLAIN
}


def _always(_: Op) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Operator:
    """A kernel of one operator.

    Parameters
    ----------
    op_type : str
    versions : tuple of int
        Of the operator, as its schemas count them, that the function is right for.
    function : callable
        Takes the op, then one value per operand (None for one left out); returns the result, or a tuple.
    dtypes : frozenset of str
        What the operands may be; all must be the same.
    apart : mapping of int to frozenset of str, optional
        Positions of operands whose dtype is another matter, with what it may be.
    host : frozenset of int, optional
        Positions of operands whose values are read: NumPy arrays, wherever the others are.
    takes : callable, optional
        Tells by the op's attributes whether the function is right for it.
    n_outputs : int, optional
        How many it has at most; None for any number.
    is_first : bool, optional
        Whether it is asked in its provider's own place, and not after onnxruntime.
    domain : str, optional
    """

    op_type: str
    versions: tuple[int, ...]
    function: Callable[..., Any]
    dtypes: frozenset[str]
    apart: Mapping[int, frozenset[str]] = field(default_factory=dict)
    host: frozenset[int] = frozenset()
    takes: Callable[[Op], bool] = _always
    n_outputs: int | None = 1
    is_first: bool = False
    domain: str = ""


def in_single(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with half precision computed in single; the first operand tells the dtype."""

    @functools.wraps(function)
    def kernel(op: Op, *values: Any) -> Any:
        if values[0].dtype != np.float16:
            return function(op, *values)
        wide = [
            value.astype(np.float32) if value is not None and value.dtype == np.float16 else value
            for value in values
        ]
        return function(op, *wide).astype(np.float16)

    return kernel


def of_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of values alone as one that is handed the op before them."""

    @functools.wraps(function)
    def kernel(_: Op, *values: Any) -> Any:
        return function(*values)

    return kernel


def text(op: Op, name: str, default: str) -> str:
    """Return an attribute that is a string; what ONNX stores are bytes."""
    value = op.attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def integers(value: Any) -> list[int]:
    """Return the values of an operand that is read on the host; a scalar is a list of one.

    Raises
    ------
    DeclinedError
        It is no NumPy array of integers.
    """
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.ndim > 1:
        raise DeclinedError("what steers an operator must be a list of integers on the host")
    return [int(item) for item in value.reshape(-1)]


def axis_of(axis: int, ndim: int) -> int:
    """Return an axis counted from the front.

    Raises
    ------
    ValueError
        There is no such axis.
    """
    if not -ndim <= axis < ndim:
        raise ValueError(f"there is no axis {axis} among {ndim}")
    return axis % ndim
