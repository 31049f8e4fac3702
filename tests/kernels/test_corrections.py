"""Operators that `onnx.reference` gets wrong, against hand-written NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agreement import assert_same
from kernel_cases import normal_from, op_of

from ferroflow_dask.kernels import compile_op

normal = normal_from(seed=0)


def coerced_softmax(x: Any, axis: int) -> Any:
    """Softmax up to opset 12, from its text: coerced to two dimensions, normalised along the second."""
    flat = x.reshape(int(np.prod(x.shape[:axis])), -1).astype(np.float64)
    e = np.exp(flat - flat.max(axis=1, keepdims=True))
    return (e / e.sum(axis=1, keepdims=True)).reshape(x.shape)


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
@pytest.mark.parametrize("axis", [None, 1, 2, -1], ids=lambda axis: f"axis {axis}")
@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (1, 5, 1, 1)], ids=str)
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax_before_opset_13_works_on_two_dimensions(provider, op_type, shape, axis):
    x = normal(*shape)
    attributes = {} if axis is None else {"axis": axis}
    expected = coerced_softmax(x, 1 if axis is None else axis % len(shape))
    if op_type == "LogSoftmax":
        expected = np.log(expected)
    elif op_type == "Hardmax":
        flat = expected.reshape(int(np.prod(shape[: 1 if axis is None else axis % len(shape)])), -1)
        expected = (flat == flat.max(axis=1, keepdims=True)).reshape(shape)
    # `array` has no Hardmax.
    (actual,) = compile_op(op_of(op_type, [x], **attributes), {"": 9}, [provider, "reference"])(x)
    assert_same(actual, expected.astype(np.float32))


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
@pytest.mark.parametrize("opset", [7, 9, 13, 14, 15])
def test_batch_normalization_uses_the_given_statistics(provider, opset):
    x, scale, bias, mean, variance = normal(2, 3, 4), *(np.abs(normal(3)) + 1 for _ in range(4))
    op = op_of("BatchNormalization", [x, scale, bias, mean, variance], epsilon=0.1)
    (actual,) = compile_op(op, {"": opset}, [provider])(x, scale, bias, mean, variance)
    per_channel = (x.transpose(0, 2, 1) - mean) / np.sqrt(variance + 0.1) * scale + bias
    assert_same(actual, per_channel.transpose(0, 2, 1).astype(np.float32))


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_lrn_sums_over_neighbouring_channels_of_every_sample(provider, size):
    x = normal(2, 5, 3, 4)
    expected = np.empty_like(x)
    for c in range(5):
        # From the operator's text: max(0, c - floor((size - 1) / 2)) to min(C - 1, c + ceil((size - 1) / 2)).
        near = slice(max(0, c - (size - 1) // 2), min(4, c + -(-(size - 1) // 2)) + 1)
        expected[:, c] = x[:, c] / (2 + 0.5 / size * (x[:, near] ** 2).sum(axis=1)) ** 0.7
    op = op_of("LRN", [x], alpha=0.5, beta=0.7, bias=2.0, size=size)
    (actual,) = compile_op(op, {"": 13}, [provider, "reference"])(x)  # onnxruntime declines even sizes
    assert_same(actual, expected)


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
def test_logsoftmax_does_not_underflow(provider):
    (actual,) = compile_op(op_of("LogSoftmax", [1]), {"": 13}, [provider])(np.float32([[0, 200]]))
    np.testing.assert_allclose(actual, [[-200, 0]])


@pytest.mark.parametrize("onesided", [None, 0, 1])
@pytest.mark.parametrize("window", [None, np.hanning(16).astype(np.float32)], ids=["", "with a window"])
@pytest.mark.parametrize("length", [None, np.array(16)], ids=["", "with a length"])
@pytest.mark.parametrize("shape", [(2, 64), (2, 64, 1)], ids=["samples", "samples as columns"])
@pytest.mark.parametrize("providers", [None, ["onnxruntime"], ["reference"]], ids=str)
def test_a_spectrum_is_computed_of_signals_with_or_without_an_axis_of_parts(
    shape, length, window, onesided, providers
):
    if window is None and length is None:
        length = np.array(20)
    signal = normal_from(seed=3)(*shape)
    values = [signal, np.array(8), window, length]
    attributes = {} if onesided is None else {"onesided": onesided}
    (found,) = compile_op(op_of("STFT", values, **attributes), {"": 17}, providers)(*values)
    n = len(window) if length is None else int(length)
    starts = range(0, 64 - n + 1, 8)
    frames = np.stack([signal.reshape(2, 64)[:, at : at + n] for at in starts], axis=1)
    frames = frames if window is None else frames * window
    expected = np.fft.fft(frames) if onesided == 0 else np.fft.rfft(frames)
    np.testing.assert_allclose(found[..., 0] + 1j * found[..., 1], expected, atol=1e-4)
    assert found.dtype == np.float32
