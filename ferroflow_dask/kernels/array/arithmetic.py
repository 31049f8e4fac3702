"""Arithmetic of several values, element by element with broadcasting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.operator import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    Operator,
    in_single,
    of_values,
)
from ferroflow_dask.kernels.provider import DeclinedError


def _div(_: Op, a: Any, b: Any) -> Any:
    """Divide; quotients of integers are cut, not rounded down (ONNX Div, opset 7 on)."""
    if a.dtype.kind == "f":
        return np.divide(a, b)
    down = np.floor_divide(a, b)
    if a.dtype.kind == "u":
        return down
    zero = a.dtype.type(0)
    is_inexact = np.not_equal(np.remainder(a, b), zero)
    is_negative = np.not_equal(np.less(a, zero), np.less(b, zero))
    return down + np.logical_and(is_inexact, is_negative).astype(a.dtype)


def _pow(_: Op, base: Any, exponent: Any) -> Any:
    """Raise to a power; the result has the base's dtype (ONNX Pow, opset 7 on, of floats).

    Bases that are integers are declined: NumPy refuses negative powers of them, whatever the values.
    """
    if exponent.dtype == base.dtype:
        return np.power(base, exponent)
    return np.power(base.astype(np.float64), exponent.astype(np.float64)).astype(base.dtype)


def _prelu(_: Op, x: Any, slope: Any) -> Any:
    """Multiply what is negative by a slope that broadcasts to x (ONNX PRelu, opset 7 on)."""
    try:
        fits = np.broadcast_shapes(x.shape, slope.shape) == x.shape
    except ValueError:
        fits = False
    if not fits:
        raise DeclinedError(f"a slope of shape {slope.shape} for {x.shape}")
    return np.where(np.less(x, x.dtype.type(0)), x * slope, x)


def _variadic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that combines one or more values from the left."""

    def kernel(_: Op, *values: Any) -> Any:
        return functools.reduce(function, values)

    return kernel


def _mean(_: Op, *values: Any) -> Any:
    """Average of values that broadcast (ONNX Mean, opset 8 on)."""
    return functools.reduce(np.add, values) / values[0].dtype.type(len(values))


OPERATORS = (
    # Before opset 7, attributes asked for broadcasting, along other axes than NumPy's.
    Operator("Add", (7, 13, 14), of_values(np.add), NUMBERS, is_first=True),
    Operator("Sub", (7, 13, 14), of_values(np.subtract), NUMBERS),
    Operator("Mul", (7, 13, 14), of_values(np.multiply), NUMBERS),
    Operator("Div", (7, 13, 14), _div, NUMBERS),
    Operator("Pow", (7, 12, 13, 15), _pow, FLOATS, apart={1: NUMBERS}),
    Operator("PRelu", (7, 9, 16), _prelu, FLOATS | INTEGERS),
    Operator("Max", (8, 12, 13), _variadic(np.maximum), NUMBERS),
    Operator("Min", (8, 12, 13), _variadic(np.minimum), NUMBERS),
    Operator("Sum", (8, 13), _variadic(np.add), FLOATS),
    Operator("Mean", (8, 13), in_single(_mean), FLOATS),
)
