"""Arithmetic of several values, element by element with broadcasting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.operator import (
    FLOATS,
    INDICES,
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


def _mod(op: Op, a: Any, b: Any) -> Any:
    """Return what is left of a division: its sign is the divisor's, or with `fmod` the dividend's.

    ONNX Mod, opset 10 on, of integers.
    """
    # CuPy has `fmod` in double precision.
    return a - b * _div(op, a, b) if op.attributes.get("fmod", 0) else np.remainder(a, b)


def _pow(_: Op, base: Any, exponent: Any) -> Any:
    """Raise to a power; the result has the base's dtype (ONNX Pow, opset 7 on)."""
    if base.dtype.kind == "i":
        return _integer_power(base, exponent)
    if exponent.dtype == base.dtype:
        return np.power(base, exponent)
    return np.power(base.astype(np.float64), exponent.astype(np.float64)).astype(base.dtype)


def _integer_power(base: Any, exponent: Any) -> Any:
    """Raise integers to powers that wrap around; what a negative one makes of others than 1 and -1 is 0."""
    if exponent.dtype.kind == "f":
        raise DeclinedError("a power of integers that is no integer")
    wide, times = base.astype(np.int64), exponent.astype(np.int64)
    is_unit = np.equal(np.abs(wide), 1)
    # NumPy refuses negative powers of integers, whatever the values.
    inverse = np.where(is_unit, np.power(wide, np.remainder(times, np.int64(2))), np.int64(0))
    power = np.power(wide, np.maximum(times, np.int64(0)))
    return np.where(np.less(times, np.int64(0)), inverse, power).astype(base.dtype)


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
    Operator("Mod", (10, 13), _mod, INTEGERS),
    Operator("Pow", (7, 12, 13, 15), _pow, FLOATS | INDICES, apart={1: NUMBERS}),
    Operator("PRelu", (7, 9, 16), _prelu, FLOATS | INTEGERS),
    Operator("Max", (8, 12, 13), _variadic(np.maximum), NUMBERS),
    Operator("Min", (8, 12, 13), _variadic(np.minimum), NUMBERS),
    Operator("Sum", (8, 13), _variadic(np.add), FLOATS),
    Operator("Mean", (8, 13), in_single(_mean), FLOATS),
)
