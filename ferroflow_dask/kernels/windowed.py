"""Pooling and transposed convolution in all that they do, of which `onnx.reference` misses parts.

It mixes up pads that differ, numbers the largest elements otherwise, takes windows that go beyond the end
(`ceil_mode`) for whole ones, and reshapes the weights of groups to what they do not fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.pooling import average_pool
from ferroflow_dask.kernels.array.windows import Window, combine_windows, padded, windows_of
from ferroflow_dask.kernels.precision import wide
from ferroflow_dask.kernels.provider import DeclinedError

#: The place of the largest element of a window that has none.
_NOWHERE = -1


def _op(attributes: dict[str, Any], sizes: Sequence[int]) -> Op:
    """Return what `windows_of` takes, of the attributes of a pooling over axes of these sizes.

    Raises
    ------
    DeclinedError
        By the letter of `auto_pad`, elements between windows would be left out at the ends (negative
        padding); implementations differ there.
    """
    given = {name: value for name, value in attributes.items() if value is not None}
    if given.get("auto_pad") in ("SAME_UPPER", "SAME_LOWER"):
        given["ceil_mode"] = 0  # is rounded up anyway
        strides = given.get("strides") or [1] * len(sizes)
        dilations = given.get("dilations") or [1] * len(sizes)
        for size, kernel, stride, dilation in zip(
            sizes, given["kernel_shape"], strides, dilations, strict=True
        ):
            over = size - (-(-size // stride) - 1) * stride - (kernel - 1) * dilation - 1
            if over > 1:
                raise DeclinedError(
                    f"auto_pad {given['auto_pad']} where strides pass over {over} elements at the ends"
                )
    return Op(0, "", "", (), (), "", given)


class AveragePool(OpRun):
    """AveragePool, opset 1 on; padding counts on demand only, which opset 1 leaves open."""

    op_domain = ""

    def _run(self, x: Any, **attributes: Any) -> tuple[Any, ...]:
        return (average_pool(_op(attributes, x.shape[2:]), wide(x)).astype(x.dtype),)


class LpPool(OpRun):
    """LpPool, opset 1 on: padding adds nothing."""

    op_domain = ""

    def _run(self, x: Any, p: float = 2, **attributes: Any) -> tuple[Any, ...]:
        windows = windows_of(_op(attributes, x.shape[2:]), x.shape[2:], attributes["kernel_shape"])
        powers = padded(np.abs(wide(x)) ** p, windows, 0)
        return ((combine_windows(powers, windows, np.add) ** (1 / p)).astype(x.dtype),)


class MaxPool(OpRun):
    """MaxPool, opset 1 on, with indices; what is no number is passed over."""

    op_domain = ""

    def _run(self, x: Any, storage_order: int = 0, **attributes: Any) -> tuple[Any, ...]:
        values = wide(x)
        sizes = x.shape[2:]
        windows = windows_of(_op(attributes, sizes), sizes, attributes["kernel_shape"])
        with_room = padded(values, windows, 0)
        shape = (*x.shape[:2], *(window.positions for window in windows))
        least = -math.inf if values.dtype.kind == "f" else np.iinfo(values.dtype).min
        best = np.full(shape, least, values.dtype)
        place = np.full(shape, _NOWHERE, np.int64)
        for tap in itertools.product(*(range(window.kernel) for window in windows)):
            slices = [_positions(window, i) for window, i in zip(windows, tap, strict=True)]
            seen = with_room[(..., *slices)]
            is_inside, at = _places(windows, tap, bool(storage_order))
            is_better = (place == _NOWHERE) | (seen > best) | (np.isnan(best) & ~np.isnan(seen))
            best = np.where(is_inside & is_better, seen, best)
            place = np.where(is_inside & is_better, at, place)
        channels = np.arange(x.shape[0] * x.shape[1]) * math.prod(sizes)
        place += channels.reshape(*x.shape[:2], *[1] * len(sizes))
        return (best.astype(x.dtype), place)[: len(self.onnx_node.output)]


def _positions(window: Window, tap: int) -> slice:
    """Return where one element of a window is, along a padded axis, at all positions of the window."""
    start = tap * window.dilation
    return slice(start, start + (window.positions - 1) * window.stride + 1, window.stride)


def _places(windows: Sequence[Window], tap: Sequence[int], is_column_major: bool) -> tuple[Any, Any]:
    """Return whether one element of each window is inside of x, and its number in the channel there."""
    sizes = [window.size for window in windows]
    is_inside: Any = True
    place: Any = 0
    for axis, (window, i) in enumerate(zip(windows, tap, strict=True)):
        step = math.prod(sizes[:axis] if is_column_major else sizes[axis + 1 :])
        at = np.arange(window.positions) * window.stride + i * window.dilation - window.before
        at = at.reshape(-1, *[1] * (len(windows) - 1 - axis))
        is_inside = is_inside & (at >= 0) & (at < window.size)
        place = place + at * step
    return is_inside, place


class ConvTranspose(OpRun):
    """ConvTranspose, opset 1 on, in groups too.

    Where windows leave gaps that `auto_pad` should fill, the output is as large as what they cover: so do
    ONNX's shape inference and onnxruntime, though not the operator's text.
    """

    op_domain = ""

    def _run(
        self,
        x: Any,
        weight: Any,
        bias: Any = None,
        *,
        group: int = 1,
        auto_pad: str = "NOTSET",
        strides: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        output_padding: Sequence[int] | None = None,
        output_shape: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        n = x.ndim - 2
        axes = zip(
            x.shape[2:],
            weight.shape[2:],
            strides or [1] * n,
            dilations or [1] * n,
            *((pads[:n], pads[n:]) if pads and auto_pad != "VALID" else ([0] * n, [0] * n)),
            strict=True,
        )
        windows = [Window(*axis) for axis in axes]
        extra = output_padding or [0] * n
        wanted: Sequence[int | None] = [None] * n
        if output_shape:
            wanted = output_shape[-n:]  # some have those of the batch and the channels, too
        elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            wanted = [
                min(one.size * one.stride, _covered(one) + more)
                for one, more in zip(windows, extra, strict=True)
            ]
        ends = [_cut(*axis, auto_pad == "SAME_UPPER") for axis in zip(windows, extra, wanted, strict=True)]
        room = [(0, max(0, stop - _covered(one))) for one, (_, stop) in zip(windows, ends, strict=True)]
        y = np.pad(_spread(wide(x), wide(weight), group, windows), [(0, 0), (0, 0), *room])
        cuts: list[Any] = [slice(*one) for one in ends]
        y = y[(slice(None), slice(None), *cuts)]
        if bias is not None:
            y = y + wide(bias).reshape(-1, *[1] * n)
        return (y.astype(x.dtype),)


def _covered(window: Window) -> int:
    """Return over how many elements the windows of an axis spread."""
    return (window.size - 1) * window.stride + window.span


def _cut(window: Window, extra: int, wanted: int | None, is_upper: bool) -> tuple[int, int]:
    """Return from where to where the output is, of what windows spread over; behind that are zeros."""
    room = _covered(window) + extra
    if wanted is None:
        return window.before, room - window.after
    total = max(0, room - wanted)
    before = total // 2 if is_upper else total - total // 2
    return before, before + wanted


def _spread(x: Any, weight: Any, groups: int, windows: Sequence[Window]) -> Any:
    """Add up what each element of x spreads to its window, (n, maps, …); nothing is cut off."""
    samples, channels, *sizes = x.shape
    depth, kernel = weight.shape[1], weight.shape[2:]
    columns = x.reshape(samples, groups, channels // groups, math.prod(sizes))
    rows = weight.reshape(groups, channels // groups, depth * math.prod(kernel)).swapaxes(1, 2)
    parts = np.matmul(rows, columns).reshape(samples, groups * depth, *kernel, *sizes)
    y = np.zeros((samples, groups * depth, *map(_covered, windows)), x.dtype)
    back = [window._replace(positions=window.size) for window in windows]
    everything = slice(None), slice(None)
    for tap in itertools.product(*map(range, kernel)):
        slices = [_positions(window, i) for window, i in zip(back, tap, strict=True)]
        y[(*everything, *slices)] += parts[(*everything, *tap)]
    return y
