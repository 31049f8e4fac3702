"""Reductions over axes; before opset 13 (sums) or 18 (others) axes were attributes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.operator import (
    BOOL,
    FLOATS,
    INTEGERS,
    WIDE_NUMBERS,
    Operator,
    axis_of,
    in_single,
    integers,
)
from ferroflow_dask.kernels.provider import DeclinedError


def _axes(op: Op, x: Any, given: Any) -> tuple[int, ...]:
    """Return the axes to reduce, counted from the front."""
    axes = op.attributes.get("axes")
    if axes is None:
        axes = [] if given is None else integers(given)
        if not axes:
            return () if op.attributes.get("noop_with_empty_axes", 0) else tuple(range(x.ndim))
    return tuple(_axis(x, axis) for axis in axes)


def _axis(x: Any, axis: int) -> int:
    if not x.ndim:
        raise DeclinedError("an axis of a scalar, which has none")  # to onnxruntime it has one
    return axis_of(axis, x.ndim)


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel; the function takes x, a tuple of axes and whether to keep them."""

    def kernel(op: Op, x: Any, given: Any = None) -> Any:
        return function(x, _axes(op, x, given), bool(op.attributes.get("keepdims", 1)))

    return kernel


def _sum(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """ONNX ReduceSum, opset 1 on."""
    return np.sum(x, axis=axes, dtype=x.dtype, keepdims=keepdims) if axes else x


def _prod(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """ONNX ReduceProd, opset 1 on."""
    return np.prod(x, axis=axes, dtype=x.dtype, keepdims=keepdims) if axes else x


def _l1(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """ONNX ReduceL1, opset 1 on."""
    return _sum(np.abs(x), axes, keepdims)


def _sum_square(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """ONNX ReduceSumSquare, opset 1 on."""
    return _sum(x * x, axes, keepdims)


def _l2(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """ONNX ReduceL2, opset 1 on."""
    return np.sqrt(_sum_square(x, axes, keepdims))


def _mean(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """ONNX ReduceMean, opset 1 on."""
    n = math.prod(x.shape[axis] for axis in axes)
    if not n:
        raise DeclinedError("a mean of nothing")
    if not axes:
        return x
    if x.dtype.kind == "f":
        return np.mean(x, axis=axes, keepdims=keepdims)
    # Sums of quotients and of what is left of them are exact where the sum itself would wrap around.
    wide = x.astype(np.int64 if x.dtype.kind == "i" else np.uint64)
    size = wide.dtype.type(n)
    quotients = np.floor_divide(wide, size)
    rest = _sum(wide - quotients * size, axes, keepdims)
    down = _sum(quotients, axes, keepdims) + np.floor_divide(rest, size)
    # Cut, not rounded down, as a conversion to integers does.
    is_cut = np.logical_and(np.less(down, wide.dtype.type(0)), np.remainder(rest, size).astype(np.bool_))
    return (down + is_cut.astype(wide.dtype)).astype(x.dtype)


def _extreme(reduce: Callable[..., Any], sign: int) -> Callable[..., Any]:
    """Return ONNX ReduceMax (sign 1) or ReduceMin (-1), opset 1 on; of nothing, what changes no other."""

    def extreme(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
        if not axes:
            return x
        if math.prod(x.shape[axis] for axis in axes):
            return reduce(x, axis=axes, keepdims=keepdims)
        if x.dtype.kind == "f":
            worst: Any = -sign * math.inf
        elif x.dtype.kind == "b":
            worst = sign < 0
        else:
            worst = np.iinfo(x.dtype).min if sign > 0 else np.iinfo(x.dtype).max
        kept = [1 if i in axes else size for i, size in enumerate(x.shape)]
        shape = kept if keepdims else [size for i, size in enumerate(x.shape) if i not in axes]
        # CuPy takes an empty shape for none given.
        return np.full_like(x, worst, shape=tuple(kept)).reshape(tuple(shape))

    return _reduction(extreme)


def _arg_extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ONNX ArgMax or ArgMin, opset 1 on: of several places the first, or on demand the last."""

    def kernel(op: Op, x: Any) -> Any:
        axis = _axis(x, op.attributes.get("axis", 0))
        if op.attributes.get("select_last_index", 0):
            backwards = x[(*(slice(None),) * axis, slice(None, None, -1))]
            places = np.subtract(x.shape[axis] - 1, function(backwards, axis=axis).astype(np.int64))
        else:
            places = function(x, axis=axis).astype(np.int64)
        kept = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        return places.reshape(kept) if op.attributes.get("keepdims", 1) else places

    return kernel


def _names_axes(op: Op) -> bool:
    # Of an attribute that names no axes, nothing says whether it means none or all.
    return op.attributes.get("axes") != []


_SUM_VERSIONS = (1, 11, 13)
_VERSIONS = (1, 11, 13, 18)
_EXTREME_VERSIONS = (1, 11, 12, 13, 18, 20)
_AXES = frozenset({1})

OPERATORS = (
    *(
        Operator(op_type, versions, in_single(_reduction(function)), dtypes, host=_AXES, takes=_names_axes)
        for op_type, versions, function, dtypes in (
            ("ReduceSum", _SUM_VERSIONS, _sum, WIDE_NUMBERS),
            ("ReduceProd", _VERSIONS, _prod, WIDE_NUMBERS),
            ("ReduceL1", _VERSIONS, _l1, WIDE_NUMBERS),
            ("ReduceSumSquare", _VERSIONS, _sum_square, WIDE_NUMBERS),
            ("ReduceL2", _VERSIONS, _l2, FLOATS),
            ("ReduceMean", _VERSIONS, _mean, WIDE_NUMBERS),
        )
    ),
    *(
        Operator(
            op_type, _EXTREME_VERSIONS, function, FLOATS | INTEGERS | BOOL, host=_AXES, takes=_names_axes
        )
        for op_type, function in (("ReduceMax", _extreme(np.max, 1)), ("ReduceMin", _extreme(np.min, -1)))
    ),
    *(
        Operator(op_type, (1, 11, 12, 13), _arg_extreme(function), FLOATS | INTEGERS)
        for op_type, function in (("ArgMax", np.argmax), ("ArgMin", np.argmin))
    ),
)
