"""Pooling: over windows, and over all of each channel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.operator import FLOATS, Operator, in_single
from ferroflow_dask.kernels.array.windows import Window, combine_windows, padded, windows_of
from ferroflow_dask.kernels.provider import DeclinedError


def _windows(op: Op, x: Any) -> list[Window]:
    if x.ndim < 3:
        raise ValueError(f"there are no spatial axes in {x.shape}")
    return windows_of(op, x.shape[2:], op.attributes["kernel_shape"])


def _max_pool(op: Op, x: Any) -> Any:
    """Return the largest element of each window (ONNX MaxPool, opset 1 on, without indices).

    What is no number is passed over, as `onnx.reference` and onnxruntime do.
    """
    windows = _windows(op, x)
    least = x.dtype.type(-math.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min)
    return combine_windows(padded(x, windows, least), windows, np.fmax)


def average_pool(op: Op, x: Any) -> Any:
    """Return the mean of each window, of what is padded only on demand (ONNX AveragePool, opset 7 on).

    What a last window looks at beyond the padding (`ceil_mode`) never counts.
    """
    windows = _windows(op, x)
    sums = combine_windows(padded(x, windows, 0), windows, np.add)
    counts_padding = bool(op.attributes.get("count_include_pad", 0))
    is_full = not any(one.overhang or (not counts_padding and (one.before or one.after)) for one in windows)
    if is_full:
        return sums / x.dtype.type(math.prod(window.kernel for window in windows))
    shape = [one.size + (one.before + one.after if counts_padding else 0) for one in windows]
    counted = padded(np.full_like(x, 1, shape=(1, 1, *shape)), _uncounted(windows, counts_padding), 0)
    return sums / combine_windows(counted, windows, np.add)


def _uncounted(windows: list[Window], counts_padding: bool) -> list[Window]:
    """Return the windows with what is padded and does not count as their only padding."""
    return [
        one._replace(before=0, after=0, size=one.size + one.before + one.after) if counts_padding else one
        for one in windows
    ]


def _spatial_axes(x: Any) -> tuple[int, ...]:
    if x.ndim < 3 or not math.prod(x.shape[2:]):
        raise DeclinedError(f"pooling all of {x.shape}")
    return tuple(range(2, x.ndim))


def _global_average_pool(_: Op, x: Any) -> Any:
    """Return the mean of each channel (ONNX GlobalAveragePool, opset 1 on)."""
    return np.mean(x, axis=_spatial_axes(x), keepdims=True)


def _global_max_pool(_: Op, x: Any) -> Any:
    """Return the largest element of each channel (ONNX GlobalMaxPool, opset 1 on)."""
    return np.max(x, axis=_spatial_axes(x), keepdims=True)


OPERATORS = (
    Operator("MaxPool", (1, 8, 10, 11, 12, 22), _max_pool, FLOATS | {"int8", "uint8"}),
    # Before opset 7 nothing said whether padding counts.
    Operator("AveragePool", (7, 10, 11, 19, 22), in_single(average_pool), FLOATS),
    Operator("GlobalAveragePool", (1, 22), in_single(_global_average_pool), FLOATS),
    Operator("GlobalMaxPool", (1, 22), _global_max_pool, FLOATS),
)
