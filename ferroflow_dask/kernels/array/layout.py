"""Operators that put elements elsewhere and compute nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array.operator import (
    INDICES,
    PLAIN,
    Operator,
    axis_of,
    integers,
    text,
)
from ferroflow_dask.kernels.provider import DeclinedError


def _reshape(op: Op, x: Any, shape: Any) -> Any:
    """Give x another shape; zeros keep a size, unless they are allowed (ONNX Reshape, opset 5 on)."""
    target = integers(shape)
    if not op.attributes.get("allowzero", 0):
        target = [x.shape[i] if size == 0 else size for i, size in enumerate(target)]
    return x.reshape(tuple(target))


def _flatten(op: Op, x: Any) -> Any:
    """Turn x into a matrix: axes before the given one, and from it on (ONNX Flatten, opset 1 on)."""
    axis = op.attributes.get("axis", 1)
    if not -x.ndim <= axis <= x.ndim:
        raise ValueError(f"there is no axis {axis} among {x.ndim}")
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _transpose(op: Op, x: Any) -> Any:
    """Permute axes, backwards if no order is given (ONNX Transpose, opset 1 on)."""
    order = op.attributes.get("perm")
    return x.transpose(tuple(reversed(range(x.ndim)) if order is None else order))


def _axes(op: Op, given: Any) -> list[int] | None:
    """Return axes, which became operands in opset 13, None if there are none."""
    if given is not None:
        return integers(given)
    axes = op.attributes.get("axes")
    return None if axes is None else list(axes)


def _squeeze(op: Op, x: Any, given: Any = None) -> Any:
    """Drop axes of size one, all of them if none are given (ONNX Squeeze, opset 1 on)."""
    axes = _axes(op, given)
    if axes is None:
        gone = {i for i, size in enumerate(x.shape) if size == 1}
    else:
        gone = {axis_of(axis, x.ndim) for axis in axes}
    if any(x.shape[i] != 1 for i in gone):
        raise ValueError(f"axes {sorted(gone)} of {x.shape} are not all of size one")
    return x.reshape(tuple(size for i, size in enumerate(x.shape) if i not in gone))


def _unsqueeze(op: Op, x: Any, given: Any = None) -> Any:
    """Insert axes of size one at places in the result (ONNX Unsqueeze, opset 1 on)."""
    axes = _axes(op, given) or []
    ndim = x.ndim + len(axes)
    places = {axis_of(axis, ndim) for axis in axes}
    if len(places) != len(axes):
        raise ValueError(f"axes {axes} name one place twice")
    sizes = iter(x.shape)
    return x.reshape(tuple(1 if i in places else next(sizes) for i in range(ndim)))


def _concat(op: Op, *values: Any) -> Any:
    """Join along an axis (ONNX Concat, opset 4 on)."""
    return np.concatenate(values, axis=axis_of(op.attributes["axis"], values[0].ndim))


def _sliced(
    x: Any, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Any:
    # ONNX cuts starts and ends to size as Python does.
    where = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        where[axis_of(axis, x.ndim)] = slice(start, end, step)
    return x[tuple(where)]


def _slice_by_attributes(op: Op, x: Any) -> Any:
    """Cut out a part (ONNX Slice, opsets 1 to 9)."""
    starts, ends = op.attributes["starts"], op.attributes["ends"]
    axes = op.attributes.get("axes") or range(len(starts))
    return _sliced(x, starts, ends, axes, [1] * len(starts))


def _slice(_: Op, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    """Cut out a part (ONNX Slice, opset 10 on)."""
    first = integers(starts)
    along = range(len(first)) if axes is None else integers(axes)
    by = [1] * len(first) if steps is None else integers(steps)
    return _sliced(x, first, integers(ends), along, by)


def _parts(op: Op, size: int, given: Any) -> list[int]:
    """Return the sizes of the parts to split an axis into."""
    sizes = op.attributes.get("split") if given is None else integers(given)
    if sizes:
        return list(sizes)
    n = len(op.outputs)
    if op.attributes.get("num_outputs", n) != n:
        raise ValueError(f"{n} outputs, where the attribute says {op.attributes['num_outputs']}")
    each = -(-size // n)
    last = size - each * (n - 1)
    if last < 0 or (last != each and "num_outputs" not in op.attributes):
        raise DeclinedError(f"{size} elements in {n} parts", failed=True)
    return [each] * (n - 1) + [last]


def _split(op: Op, x: Any, given: Any = None) -> tuple[Any, ...]:
    """Cut an axis into parts (ONNX Split, opset 2 on)."""
    axis = axis_of(op.attributes.get("axis", 0), x.ndim)
    sizes = _parts(op, x.shape[axis], given)
    if sum(sizes) != x.shape[axis] or min(sizes) < 0 or len(sizes) != len(op.outputs):
        raise ValueError(f"parts of {sizes} do not make up {x.shape[axis]} in {len(op.outputs)} outputs")
    lead = (slice(None),) * axis
    ends = list(itertools.accumulate(sizes))
    return tuple(x[(*lead, slice(end - size, end))] for end, size in zip(ends, sizes, strict=True))


def _gather(op: Op, x: Any, indices: Any) -> Any:
    """Take elements along an axis by their places (ONNX Gather, opset 1 on)."""
    return np.take(x, indices, axis=axis_of(op.attributes.get("axis", 0), x.ndim))


def _expand(_: Op, x: Any, shape: Any) -> Any:
    """Broadcast to a shape, or what it and that of x broadcast to (ONNX Expand, opset 8 on)."""
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(integers(shape))))


def _tile(_: Op, x: Any, repeats: Any) -> Any:
    """Repeat x along its axes (ONNX Tile, opset 6 on)."""
    times = integers(repeats)
    if len(times) != x.ndim:
        raise ValueError(f"repeats for {len(times)} axes, where there are {x.ndim}")
    return np.tile(x, tuple(times))


def _padded(op: Op, x: Any, pads: Sequence[int], axes: Sequence[int], value: Any) -> Any:
    """Pad axes; widths below zero cut."""
    mode = text(op, "mode", "constant")
    if len(pads) != 2 * len(axes):
        raise ValueError(f"{len(pads)} pads for {len(axes)} axes")
    if not x.ndim:
        return x
    widths = [(0, 0)] * x.ndim
    for axis, before, after in zip(axes, pads, pads[len(axes) :], strict=False):
        widths[axis_of(axis, x.ndim)] = before, after
    if mode != "constant":
        longest = [size - 1 if mode == "reflect" else bool(size) * max(pads, default=0) for size in x.shape]
        if any(min(width) < 0 or max(width) > most for width, most in zip(widths, longest, strict=True)):
            raise DeclinedError(f"pads {list(pads)} of {x.shape} by {mode}")
        return np.pad(x, widths, mode=mode)  # type: ignore[call-overload]
    if min(pads, default=0) < 0:
        kept = [
            slice(max(0, -before), size - max(0, -after))
            for (before, after), size in zip(widths, x.shape, strict=True)
        ]
        if any(one.start > one.stop for one in kept):
            raise DeclinedError(f"pads {list(pads)} cut more than there is of {x.shape}")
        x = x[tuple(kept)]
        widths = [(max(0, before), max(0, after)) for before, after in widths]
    return np.pad(x, widths, constant_values=value)


def _pad_by_attributes(op: Op, x: Any) -> Any:
    """Pad by attributes (ONNX Pad, opsets 2 to 10)."""
    value = x.dtype.type(op.attributes.get("value", 0.0))
    return _padded(op, x, op.attributes["pads"], range(x.ndim), value)


def _pad(op: Op, x: Any, pads: Any, value: Any = None, axes: Any = None) -> Any:
    """Pad by operands (ONNX Pad, opset 11 on, without the mode wrap)."""
    fill = x.dtype.type(0)
    if value is not None:
        if value.dtype != x.dtype or value.size != 1:
            raise DeclinedError(f"padding of {value.dtype}{value.shape} for {x.dtype}")
        fill = value.reshape(())[()]
    return _padded(op, x, integers(pads), range(x.ndim) if axes is None else integers(axes), fill)


def _takes_mode(op: Op) -> bool:
    return text(op, "mode", "constant") in ("constant", "reflect", "edge")


def _identity(_: Op, x: Any) -> Any:
    """Return x (ONNX Identity, opset 1 on, of tensors)."""
    return x


def _dropout(op: Op, x: Any, *_: Any) -> Any:
    """Return x, and a mask that is all ones (ONNX Dropout, opsets 7 to 11: only for inference).

    Nothing says what is in the mask then; the newer versions fill it with ones.
    """
    if len(op.outputs) < 2 or not op.outputs[1]:
        return x
    return x, np.full_like(x, True, dtype=bool)


def _dropout_unless_training(op: Op, x: Any, _: Any = None, training: Any = None) -> Any:
    """Return x, and a mask that is all ones, unless training (ONNX Dropout, opset 12 on)."""
    if training is not None and np.any(training):
        raise DeclinedError("Dropout in training")
    return _dropout(op, x)


def _dropout_7(op: Op, x: Any) -> Any:
    found = _dropout(op, x)
    return (found[0], found[1].astype(x.dtype)) if isinstance(found, tuple) else found


_REDEFINED = (21, 23, 24, 25)  # the same operators for more dtypes


def _plain(op_type: str, versions: tuple[int, ...], function: Callable[..., Any], **more: Any) -> Operator:
    return Operator(op_type, versions, function, PLAIN, **more)


OPERATORS = (
    _plain("Identity", (1, 13, 14, 16, 19, *_REDEFINED), _identity),
    _plain("Dropout", (7,), _dropout_7, n_outputs=2),
    _plain("Dropout", (10,), _dropout, n_outputs=2),
    _plain(
        "Dropout", (12, 13, 22), _dropout_unless_training, n_outputs=2, host=frozenset({2}), apart={1: PLAIN}
    ),
    _plain("Reshape", (5, 13, 14, 19, *_REDEFINED), _reshape, host=frozenset({1})),
    _plain("Flatten", (1, 9, 11, 13, *_REDEFINED), _flatten),
    _plain("Transpose", (1, 13, *_REDEFINED), _transpose),
    _plain("Squeeze", (1, 11, 13, *_REDEFINED), _squeeze, host=frozenset({1})),
    _plain("Unsqueeze", (1, 11, 13, *_REDEFINED), _unsqueeze, host=frozenset({1})),
    _plain("Concat", (4, 11, 13), _concat),
    _plain("Slice", (1,), _slice_by_attributes),
    _plain("Slice", (10, 11, 13), _slice, host=frozenset({1, 2, 3, 4})),
    _plain("Split", (2, 11, 13, 18), _split, host=frozenset({1}), n_outputs=None),
    _plain("Gather", (1, 11, 13), _gather, apart={1: INDICES}),
    _plain("Expand", (8, 13), _expand, host=frozenset({1})),
    _plain("Tile", (6, 13), _tile, host=frozenset({1})),
    _plain("Pad", (2,), _pad_by_attributes, takes=_takes_mode),
    _plain("Pad", (11, 13, 18, 19, *_REDEFINED), _pad, takes=_takes_mode, host=frozenset({1, 2, 3})),
)
