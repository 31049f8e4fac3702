"""Convolution as products of matrices, one for each sample and group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.libraries import sliding_windows
from ferroflow_dask.kernels.array.operator import FLOATS, Operator
from ferroflow_dask.kernels.array.windows import Window, padded, windows_of
from ferroflow_dask.kernels.provider import DeclinedError

#: Samples are unrolled together up to this size of the columns, and at least one at a time [B].
_COLUMNS_MOST = 2**28


def _columns(x: Any, windows: Sequence[Window], groups: int) -> Any:
    """Unroll a padded (n, c, …) to (n, groups, c / groups · kernel, positions).

    Chellapilla, Puri and Simard, "High Performance Convolutional Neural Networks for Document
    Processing", 2006.
    """
    n_axes = len(windows)
    views = sliding_windows(x, [window.span for window in windows])
    steps = [slice(0, (one.positions - 1) * one.stride + 1, one.stride) for one in windows]
    taps = [slice(None, None, one.dilation) for one in windows]
    views = views[(slice(None), slice(None), *steps, *taps)]
    spatial = range(2, 2 + n_axes)
    views = views.transpose((0, 1, *(axis + n_axes for axis in spatial), *spatial))
    samples, channels = x.shape[:2]
    depth = channels // groups * math.prod(window.kernel for window in windows)
    return views.reshape(samples, groups, depth, math.prod(window.positions for window in windows))


def _conv(op: Op, x: Any, weight: Any, bias: Any = None) -> Any:
    """Convolve (n, c, …) with (m, c / group, …) (ONNX Conv, opset 1 on, one to three spatial axes)."""
    groups = op.attributes.get("group", 1)
    if not 3 <= x.ndim <= 5:
        raise DeclinedError(f"a convolution over {x.ndim - 2} axes")
    samples, channels, *sizes = x.shape
    maps, depth, *kernel = weight.shape
    if weight.ndim != x.ndim or depth * groups != channels or maps % groups:
        raise ValueError(f"weights {weight.shape} in {groups} groups do not fit {x.shape}")
    if list(op.attributes.get("kernel_shape") or kernel) != kernel:
        raise ValueError(f"weights {weight.shape} do not have the kernel that the attribute says")
    windows = windows_of(op, sizes, kernel)
    positions = [window.positions for window in windows]
    rows = weight.reshape(groups, maps // groups, depth * math.prod(kernel))
    if all(window.is_point for window in windows):
        y = np.matmul(rows, x.reshape(samples, groups, depth, math.prod(sizes)))
    else:
        wide = padded(x, windows, 0)
        nbytes = channels * math.prod(kernel) * math.prod(positions) * x.dtype.itemsize
        step = max(1, _COLUMNS_MOST // max(1, nbytes))
        parts = [
            np.matmul(rows, _columns(wide[start : start + step], windows, groups))
            for start in range(0, max(1, samples), step)
        ]
        y = parts[0] if len(parts) == 1 else np.concatenate(parts)
    y = y.reshape(samples, maps, *positions)
    return y if bias is None else y + bias.reshape((maps,) + (1,) * len(sizes))


OPERATORS = (Operator("Conv", (1, 11, 22), _conv, FLOATS),)
