"""Splits of convolutions and pooling: parts read halos of their neighbours."""

from __future__ import annotations

from typing import NamedTuple

from ferroflow_dask.strategy.spaces import CONTRACTED, Along, Change, Part, Space
from ferroflow_dask.strategy.view import Entry, Key, View, WholeError, interval_of, sizes_of, space


class _Window(NamedTuple):
    """A window that moves along a dimension."""

    stride: int
    extent: int
    before: int
    after: int
    size: int

    def pads(self, interval: tuple[int, int]) -> tuple[int, int]:
        """Return the padding of a part."""
        first, stop = Along("", self.stride, self.extent, -self.before).unclipped(interval)
        # Positions behind the last window are not read; the whole operator may have padding there.
        return max(0, -first), max(0, stop - self.size)


def conv(view: View) -> Space:
    """Split samples, output channels, positions, and input channels as the contracted axis."""
    x, weight, result = view.shape(0), view.shape(1), view.one_output()
    group = int(view.get("group", 1))
    windows = _windows(view, weight[2:])
    spatial = _entries(windows)
    sizes: dict[Key, int] = {**_sizes(result, windows), 1: group if group > 1 else weight[0]}
    scale = weight[0] // group if group > 1 else 1
    channel: Entry = (1, scale, scale, 0)
    if group == 1:
        sizes[CONTRACTED] = x[1]
        read: Entry = CONTRACTED
    else:
        read = (1, x[1] // group, x[1] // group, 0)
    inputs: list[list[Entry] | None] = [
        [0, read, *spatial],
        [channel, CONTRACTED if group == 1 else None, *[None] * len(spatial)],
        [channel] if view.has(2) else None,
    ]

    def change(part: Part) -> Change:
        attributes = _pads(windows, part)
        channels = interval_of(part, 1)
        if group > 1 and channels is not None:
            attributes["group"] = channels[1] - channels[0]
        is_later = part.get(CONTRACTED, (0, 0))[0] > 0
        return Change(attributes, dropped=(2,) if is_later and view.has(2) else ())

    return space(
        view, sizes, inputs[: len(view.inputs)], [[0, channel, *range(2, len(result))]], change=change
    )


def conv_transpose(view: View) -> Space:
    """Split samples and output channels."""
    if int(view.get("group", 1)) > 1:
        raise WholeError("it has groups")
    result, rank = view.one_output(), len(view.shape(0)) - 2
    nothing: list[Entry] = [None] * rank
    inputs: list[list[Entry] | None] = [[0, None, *nothing], [None, 1, *nothing], [1]]
    sizes: dict[Key, int] = {0: result[0], 1: result[1]}
    return space(view, sizes, inputs[: len(view.inputs)], [[0, 1, *nothing]])


def pool(view: View) -> Space:
    """Split samples, channels and positions."""
    result = view.one_output()
    windows = _windows(view, tuple(int(n) for n in view.get("kernel_shape", ())))
    if int(view.get("ceil_mode", 0)):
        windows = [None for _ in windows]
    dims: list[Entry] = [0, 1, *_entries(windows)]
    results: list[Entry] = [0, 1, *(None if w is None else d for d, w in enumerate(windows, 2))]
    sizes = _sizes(result, windows)
    return space(view, sizes, [dims], [results], change=lambda part: Change(_pads(windows, part)))


def global_pool(view: View) -> Space:
    """Split samples and channels."""
    result = view.one_output()
    dims: list[Entry] = [0, 1, *[None] * (len(result) - 2)]
    return space(view, {0: result[0], 1: result[1]}, [dims], [dims])


def _sizes(result: tuple[int, ...], windows: list[_Window | None]) -> dict[Key, int]:
    return sizes_of(result, *(d for d, window in enumerate(windows, 2) if window is None))


def _entries(windows: list[_Window | None]) -> list[Entry]:
    return [
        None if window is None else (d, window.stride, window.extent, -window.before)
        for d, window in enumerate(windows, 2)
    ]


def _pads(windows: list[_Window | None], part: Part) -> dict[str, object]:
    """Return the attributes of a part's padding, all of it explicit; none if no position is split."""
    intervals = [interval_of(part, d) for d, _ in enumerate(windows, 2)]
    if not any(intervals):
        return {}
    pads = []
    for window, interval in zip(windows, intervals, strict=True):
        if window is None:
            raise WholeError("padding is not known")
        pads.append(window.pads(interval) if interval else (window.before, window.after))
    return {"auto_pad": None, "pads": [*(before for before, _ in pads), *(after for _, after in pads)]}


def _windows(view: View, kernel: tuple[int, ...]) -> list[_Window | None]:
    """Return the window along each position; None for all if one cannot be split."""
    x, result = view.shape(0), view.one_output()
    rank = len(x) - 2
    if len(kernel) != rank:
        raise WholeError("its kernel has another rank than its input")
    strides, dilations = view.get("strides", None) or [1] * rank, view.get("dilations", None) or [1] * rank
    pads = view.get("pads", None) or [0] * (2 * rank)
    auto = view.get("auto_pad", b"NOTSET")
    auto = auto.decode() if isinstance(auto, bytes) else auto
    found: list[_Window | None] = []
    for d in range(rank):
        stride, size, extent = int(strides[d]), x[2 + d], (kernel[d] - 1) * int(dilations[d]) + 1
        before, after = int(pads[d]), int(pads[rank + d])
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            total = max(0, (result[2 + d] - 1) * stride + extent - size)
            before = total // 2 if auto == "SAME_UPPER" else total - total // 2
            after = total - before
        elif auto == "VALID":
            before = after = 0
        found.append(_Window(stride, extent, before, after, size))
    # A window in padding alone would read nothing.
    is_safe = all(w is not None and w.before < w.extent and w.after < w.extent for w in found)
    return found if is_safe else [None] * rank
