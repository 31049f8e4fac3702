"""Operators that `onnx.reference` computes differently from their specification, put right.

Handed to its evaluator as `new_ops`, so that they also hold inside sub-graphs. Seen in onnx
1.23; the tests hold each against onnxruntime too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from ferroflow_dask.kernels.recurrent import GRU, LSTM, RNN
from ferroflow_dask.kernels.windowed import AveragePool, ConvTranspose, LpPool, MaxPool

#: From this opset on, Softmax and its kin work along one axis.
_PER_AXIS = 13

#: From this opset on, an attribute of BatchNormalization asks for training.
_TRAINING_MODE = 14

#: Axes of a signal whose numbers have no axis for real and imaginary parts.
_NO_PARTS = 2


def _normalised(op: OpRun, x: Any) -> tuple[Any, Any]:
    """Return x and the axis to work along: before opset 13, x is first coerced to two dimensions.

    `onnx.reference` takes the default axis (-1, was 1) and the meaning of the newest opset for all.
    """
    given = {attribute.name: attribute.i for attribute in op.onnx_node.attribute}
    if op.run_params["opsets"][""] >= _PER_AXIS:
        return x, given.get("axis", -1)
    axis = given.get("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), 1


def _log_softmax(x: Any, axis: int) -> Any:
    shifted = x - x.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


class Softmax(OpRun):
    """Softmax, opset 1 on."""

    op_domain = ""

    def _run(self, x: Any, axis: int | None = None) -> tuple[Any, ...]:  # noqa: ARG002 - read from the node
        work, along = _normalised(self, x)
        return ((np.exp(_log_softmax(work, along)) if x.size else x).reshape(x.shape).astype(x.dtype),)


class LogSoftmax(OpRun):
    """LogSoftmax, opset 1 on; not the logarithm of a Softmax, which underflows to minus infinity."""

    op_domain = ""

    def _run(self, x: Any, axis: int | None = None) -> tuple[Any, ...]:  # noqa: ARG002
        work, along = _normalised(self, x)
        return ((_log_softmax(work, along) if x.size else x).reshape(x.shape).astype(x.dtype),)


class Hardmax(OpRun):
    """Hardmax, opset 1 on."""

    op_domain = ""

    def _run(self, x: Any, axis: int | None = None) -> tuple[Any, ...]:  # noqa: ARG002
        work, along = _normalised(self, x)
        result = np.zeros_like(work)
        if x.size:
            np.put_along_axis(result, np.expand_dims(work.argmax(axis=along), along), 1, axis=along)
        return (result.reshape(x.shape),)


class BatchNormalization(OpRun):
    """BatchNormalization, opset 1 on.

    `onnx.reference` mixes statistics of the batch into those given, before opset 14, though the model asks
    for none of the outputs that only exist in training.
    """

    op_domain = ""

    def _run(
        self,
        x: Any,
        *parameters: Any,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        training_mode: int = 0,
        is_test: int = 0,
        **_: Any,
    ) -> tuple[Any, ...]:
        scale, bias, mean, variance = parameters
        n_outputs = len(self.onnx_node.output)
        if self.run_params["opsets"][""] < _TRAINING_MODE:
            training_mode = n_outputs > 1 and not is_test
        outputs: tuple[Any, ...] = ()
        if training_mode:
            axes = (0, *range(2, x.ndim))
            seen = x.mean(axis=axes), x.var(axis=axes)
            running = (
                old * momentum + new * (1 - momentum) for old, new in zip((mean, variance), seen, strict=True)
            )
            outputs = (*running, *seen)
            mean, variance = seen
        # Statistics are per channel, (c), or in opsets before 9 also per activation, (c, …).
        scale, bias, mean, variance = (
            value.reshape(value.shape + (1,) * (x.ndim - 1 - value.ndim))
            for value in (scale, bias, mean, variance)
        )
        y = scale * (x - mean) / np.sqrt(variance + epsilon) + bias
        return tuple(value.astype(x.dtype) for value in (y, *outputs))[:n_outputs]


class LRN(OpRun):
    """LRN, opset 1 on.

    `onnx.reference` sums squares for as many channels as the batch has samples, and leaves out the others.
    """

    op_domain = ""

    def _run(
        self, x: Any, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int = 1
    ) -> tuple[Any, ...]:
        squares = np.square(x, dtype=np.float64)
        before, after = (size - 1) // 2, size // 2
        padded = np.pad(squares, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
        window = sum(padded[:, i : i + x.shape[1]] for i in range(size))
        return ((x / (bias + alpha / size * window) ** beta).astype(x.dtype),)


class STFT(OpRun):
    """STFT, opset 17 on, of signals (batch, samples), too, which onnxruntime takes.

    `onnx.reference` takes the samples of such a signal for the batch.
    """

    op_domain = ""

    def _run(
        self,
        signal: Any,
        frame_step: Any,
        window: Any = None,
        frame_length: Any = None,
        onesided: int | None = None,
    ) -> tuple[Any, ...]:
        step = int(np.asarray(frame_step).item())
        # Real ones are (batch, samples) or (batch, samples, 1), complex ones (batch, samples, 2).
        x = signal[..., None] if signal.ndim == _NO_PARTS else signal
        samples = x[..., 0] + 1j * x[..., 1] if x.shape[-1] > 1 else x[..., 0]
        length = samples.shape[-1] if window is None else len(window)
        if frame_length is not None:
            length = int(np.asarray(frame_length).item())
        n_frames = 1 + (samples.shape[-1] - length) // step
        places = np.arange(n_frames)[:, None] * step + np.arange(length)
        frames = samples[:, places].astype(np.complex128)
        if window is not None:
            frames = frames * window
        found = np.fft.fft(frames, axis=-1)
        if onesided is None or onesided:
            found = found[..., : length // 2 + 1]
        return (np.stack([found.real, found.imag], axis=-1).astype(signal.dtype),)


CORRECTIONS: tuple[type[OpRun], ...] = (
    *(Softmax, LogSoftmax, Hardmax, BatchNormalization, LRN, STFT),
    *(LSTM, GRU, RNN),
    *(AveragePool, LpPool, MaxPool, ConvTranspose),
)
