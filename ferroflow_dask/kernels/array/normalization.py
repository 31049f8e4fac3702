"""Normalisations: Softmax and its logarithm, by batch, layer, instance and neighbouring channels.

All are computed in single precision where values are half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.operator import FLOATS, Operator, axis_of, in_single
from ferroflow_dask.kernels.array.windows import Window, combine_windows, padded
from ferroflow_dask.kernels.provider import DeclinedError

_DEFAULT_EPSILON = 1e-5


def _softmax(x: Any, axis: int) -> Any:
    """ONNX Softmax along one axis, without overflow."""
    powers = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return powers / np.sum(powers, axis=axis, keepdims=True)


def _log_softmax(x: Any, axis: int) -> Any:
    """ONNX LogSoftmax along one axis; not the logarithm of a Softmax, which underflows."""
    shifted = x - np.max(x, axis=axis, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


def _along_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel from opset 13 on."""

    def kernel(op: Op, x: Any) -> Any:
        axis = axis_of(op.attributes.get("axis", -1), x.ndim)
        return function(x, axis) if math.prod(x.shape) else x

    return in_single(kernel)


def _coerced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel before opset 13: all axes from the given one on count as one."""

    def kernel(op: Op, x: Any) -> Any:
        if not math.prod(x.shape):
            return x
        axis = axis_of(op.attributes.get("axis", 1), x.ndim)
        flat = x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
        return function(flat, 1).reshape(x.shape)

    return in_single(kernel)


def _per_channel(value: Any, ndim: int) -> Any:
    """Give (c,) the axes to broadcast against (n, c, …)."""
    return value.reshape(value.shape + (1,) * (ndim - 2))


def _batch_normalization(op: Op, x: Any, *statistics: Any) -> Any:
    """Normalise (n, c, …) by the given statistics (c,) (ONNX BatchNormalization, opset 7 on, inference)."""
    scale, bias, mean, variance = statistics
    shape = (x.shape[1],) if x.ndim > 1 else None
    if any(value.shape != shape for value in statistics):
        raise DeclinedError(f"statistics of {scale.shape} for {x.shape}")
    epsilon = x.dtype.type(op.attributes.get("epsilon", _DEFAULT_EPSILON))
    factor = scale / np.sqrt(variance + epsilon)
    centred = x - _per_channel(mean, x.ndim)
    return centred * _per_channel(factor, x.ndim) + _per_channel(bias, x.ndim)


def _standardized(op: Op, x: Any, axes: tuple[int, ...]) -> Any:
    centred = x - np.mean(x, axis=axes, keepdims=True)
    variance = np.mean(centred * centred, axis=axes, keepdims=True)
    return centred / np.sqrt(variance + x.dtype.type(op.attributes.get("epsilon", _DEFAULT_EPSILON)))


def _layer_normalization(op: Op, x: Any, scale: Any, bias: Any = None) -> Any:
    """Normalise over the axes from the given one on (ONNX LayerNormalization, opset 17)."""
    axis = axis_of(op.attributes.get("axis", -1), x.ndim)
    y = _standardized(op, x, tuple(range(axis, x.ndim))) * scale
    y = y if bias is None else y + bias
    if y.shape != x.shape:
        raise ValueError(f"scale and bias do not broadcast to {x.shape}")
    return y


def _instance_normalization(op: Op, x: Any, scale: Any, bias: Any) -> Any:
    """Normalise each channel of each sample of (n, c, …) (ONNX InstanceNormalization, opset 6 on)."""
    y = _standardized(op, x, tuple(range(2, x.ndim)))
    return y * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim)


def _lrn(op: Op, x: Any) -> Any:
    """Divide by what neighbouring channels sum up to (ONNX LRN, opset 1 on).

    Krizhevsky, Sutskever and Hinton, "ImageNet Classification with Deep CNNs", 2012.
    """
    size = op.attributes["size"]
    channels = x.shape[1]
    window = Window(channels, size, 1, 1, (size - 1) // 2, size // 2, channels)
    sums = combine_windows(padded(x * x, [window], 0, first=1), [window], np.add, first=1)
    of, get = x.dtype.type, op.attributes.get
    total = sums * of(get("alpha", 1e-4) / size) + of(get("bias", 1.0))
    return x / np.power(total, of(get("beta", 0.75)))


def _is_inference(op: Op) -> bool:
    # More outputs than one were what asked for training before opset 14.
    return not op.attributes.get("training_mode", 0) and bool(op.attributes.get("spatial", 1))


def _is_computed_in_single(op: Op) -> bool:
    return bool(op.attributes.get("stash_type", 1) == 1)


OPERATORS = (
    Operator("Softmax", (1, 11), _coerced(_softmax), FLOATS),
    Operator("Softmax", (13,), _along_axis(_softmax), FLOATS),
    Operator("LogSoftmax", (1, 11), _coerced(_log_softmax), FLOATS),
    Operator("LogSoftmax", (13,), _along_axis(_log_softmax), FLOATS),
    Operator(
        "BatchNormalization", (7, 9, 14, 15), in_single(_batch_normalization), FLOATS, takes=_is_inference
    ),
    Operator(
        "LayerNormalization", (17,), in_single(_layer_normalization), FLOATS, takes=_is_computed_in_single
    ),
    Operator("InstanceNormalization", (6, 22), in_single(_instance_normalization), FLOATS),
    Operator("LRN", (1, 13), in_single(_lrn), FLOATS),
)
