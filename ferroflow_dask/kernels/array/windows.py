"""Windows that slide over axes: where convolution and pooling look, and what they look at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.operator import text
from ferroflow_dask.kernels.provider import DeclinedError


class Window(NamedTuple):
    """How a window slides along one axis."""

    size: int  #: of the axis
    kernel: int  #: elements of the window
    stride: int
    dilation: int
    before: int  #: padding
    after: int
    positions: int = 0  #: of the window, which is the size of the result

    @property
    def span(self) -> int:
        """The elements from the first to the last of a window."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def overhang(self) -> int:
        """How far the last window looks beyond the padding."""
        return max(0, (self.positions - 1) * self.stride + self.span - self.size - self.before - self.after)

    @property
    def is_point(self) -> bool:
        """Whether each element is looked at once, by itself."""
        return self.kernel == self.stride == 1 and not self.before and not self.after


def windows_of(op: Op, sizes: Sequence[int], kernel: Sequence[int]) -> list[Window]:
    """Return the windows that an op's attributes describe, one for each spatial axis.

    Parameters
    ----------
    op : Op
        A convolution or a pooling.
    sizes, kernel : sequence of int
        Of the spatial axes and of the window.
    """
    n = len(sizes)
    strides = op.attributes.get("strides") or [1] * n
    dilations = op.attributes.get("dilations") or [1] * n
    pads = op.attributes.get("pads") or [0] * (2 * n)
    if not n == len(kernel) == len(strides) == len(dilations) == len(pads) // 2:
        raise ValueError(f"kernel, strides, dilations and pads do not fit {n} spatial axes")
    if min(pads) < 0 or min(*kernel, *strides, *dilations) < 1:
        raise DeclinedError("padding below zero, or kernels, strides or dilations below one")
    how = text(op, "auto_pad", "NOTSET")
    round_up = bool(op.attributes.get("ceil_mode", 0))
    if round_up and how != "NOTSET":
        raise DeclinedError("auto_pad with ceil_mode")
    given = zip(sizes, kernel, strides, dilations, pads[:n], pads[n:], strict=True)
    found = [_placed(Window(*one), how, round_up) for one in given]
    if any(window.positions < 1 for window in found):
        raise ValueError(f"a window of {tuple(kernel)} does not fit into {tuple(sizes)}")
    return found


def _placed(window: Window, how: str, round_up: bool) -> Window:
    """Return a window with its number of positions, and the padding that `auto_pad` says."""
    size, stride, span = window.size, window.stride, window.span
    if how in ("SAME_UPPER", "SAME_LOWER"):
        positions = -(-size // stride)
        total = max(0, (positions - 1) * stride + span - size)
        less, more = total // 2, total - total // 2
        before, after = (less, more) if how == "SAME_UPPER" else (more, less)
        return window._replace(before=before, after=after, positions=positions)
    if how == "VALID":
        window = window._replace(before=0, after=0)
    elif how != "NOTSET":
        raise ValueError(f"auto_pad {how!r}; choose one of: NOTSET, SAME_UPPER, SAME_LOWER, VALID")
    room = size + window.before + window.after - span
    positions = room // stride + 1
    # Rounded up, but a window that would start in the padding at the end is left out.
    if round_up and room >= 0 and room % stride and positions * stride < size + window.before:
        positions += 1
    return window._replace(positions=positions)


def padded(x: Any, windows: Sequence[Window], value: Any, first: int = 2) -> Any:
    """Return x with padding and room for overhangs; the windows slide from axis `first` on."""
    widths = [(window.before, window.after + window.overhang) for window in windows]
    if not any(map(any, widths)):
        return x
    rest = x.ndim - first - len(windows)
    return np.pad(x, [(0, 0)] * first + widths + [(0, 0)] * rest, constant_values=value)


def combine_windows(x: Any, windows: Sequence[Window], combine: Callable[..., Any], first: int = 2) -> Any:
    """Combine the elements of each window of a padded x, one axis after the other.

    Takes kernel - 1 steps for each axis, each over as many elements as there are windows.
    """
    for axis, window in enumerate(windows, first):
        reach = (window.positions - 1) * window.stride + 1
        offsets = [i * window.dilation for i in range(window.kernel)]
        lead = (slice(None),) * axis
        parts = [x[(*lead, slice(start, start + reach, window.stride))] for start in offsets]
        x = functools.reduce(combine, parts)
    return x
