"""Splits of element-wise operators, normalisations, reductions and changes of layout."""

from __future__ import annotations

import math
from collections.abc import Callable

from ferroflow_dask.strategy.products import as_shape
from ferroflow_dask.strategy.spaces import CONTRACTED, Change, Part, Space, region_of, shape_of
from ferroflow_dask.strategy.view import (
    Entry,
    Key,
    Shape,
    View,
    WholeError,
    aligned,
    every,
    sizes_of,
    space,
)


def elementwise(view: View) -> Space:
    """Split all dimensions; inputs may be broadcast."""
    result = view.one_output()
    if "broadcast" in view.op.attributes or "axis" in view.op.attributes:
        raise WholeError("it broadcasts by an attribute, as operator sets before 7 do")
    inputs = [None if shape is None else aligned(shape, result) for shape in view.inputs]
    return space(view, sizes_of(result), inputs, [every(result)])


def dropout(view: View) -> Space:
    """Split all dimensions, unless it may drop something."""
    if view.has(2):
        raise WholeError("it may draw random numbers")
    return elementwise(view)


def batch_normalization(view: View) -> Space:
    """Split all dimensions; statistics are given."""
    x = view.one_output()
    if view.get("training_mode", 0):
        raise WholeError("it computes statistics of the batch")
    channel: list[Entry] = [1]
    return space(view, sizes_of(x), [every(x), channel, channel, channel, channel], [every(x)])


def instance_normalization(view: View) -> Space:
    """Split samples and channels."""
    x = view.one_output()
    dims = every(x, *range(2, len(x)))
    return space(view, {0: x[0], 1: x[1]}, [dims, [1], [1]], [dims])


def layer_normalization(view: View) -> Space:
    """Split the dimensions before those that are normalised."""
    x = view.shape(0)
    inside = range(view.axis(-1, len(x)), len(x))
    dims = every(x, *inside)
    return space(view, sizes_of(x, *inside), [dims], [dims] * len(view.outputs))


def lrn(view: View) -> Space:
    """Split all dimensions but the channels, whose neighbours it reads."""
    x = view.one_output()
    return space(view, sizes_of(x, 1), [every(x, 1)], [every(x, 1)])


def softmax(view: View) -> Space:
    """Split all dimensions but those that are normalised."""
    x = view.one_output()
    # Before, all dimensions from the axis on were normalised together.
    first = view.axis(-1 if view.opset >= 13 else 1, len(x))
    inside = range(first, first + 1 if view.opset >= 13 else len(x))
    return space(view, sizes_of(x, *inside), [every(x, *inside)], [every(x, *inside)])


def along_axis(default: int) -> Callable[[View], Space]:
    """Return a rule that splits all dimensions but that of the attribute `axis`."""

    def rule(view: View) -> Space:
        x = view.shape(0)
        axis = view.axis(default, len(x))
        dims = every(x, axis)
        return space(view, sizes_of(x, axis), [dims], [dims] * len(view.outputs))

    return rule


def reduce(combine: str | None) -> Callable[[View], Space]:
    """Return a rule that splits the dimensions that stay, and a lost one if results can be combined."""

    def rule(view: View) -> Space:
        x = view.shape(0)
        axes = view.integers(1, "axes")
        if view.op.op_type in ("ArgMax", "ArgMin"):
            axes = [int(view.get("axis", 0))]
        if not axes:
            axes = [] if view.get("noop_with_empty_axes", 0) else list(range(len(x)))
        gone = sorted({axis % len(x) for axis in axes}) if x else []
        is_kept = bool(view.get("keepdims", 1))
        keys: dict[int, Key] = {}
        for d in range(len(x)):
            if d not in gone:
                keys[d] = d if is_kept else d - sum(axis < d for axis in gone)
        sizes = {key: x[d] for d, key in keys.items()}
        if combine is not None and gone:
            keys[gone[0]] = CONTRACTED
            sizes[CONTRACTED] = x[gone[0]]
        result = view.one_output()
        stays = [d if d in sizes else None for d in range(len(result))]
        return space(view, sizes, [[keys.get(d) for d in range(len(x))]], [stays], combine=combine or "Add")

    return rule


def concat(view: View) -> Space:
    """Split all dimensions but the joined one."""
    result = view.one_output()
    axis = view.axis(0, len(result))
    dims = every(result, axis)
    return space(view, sizes_of(result, axis), [dims] * len(view.inputs), [dims])


def split(view: View) -> Space:
    """Split all dimensions but the divided one."""
    x = view.shape(0)
    axis = view.axis(0, len(x))
    dims = every(x, axis)
    return space(view, sizes_of(x, axis), [dims], [dims] * len(view.outputs))


def same_dims(view: View) -> Space:
    """Split the dimensions that a slice, a pad or a tile leaves as they are."""
    x, result = view.shape(0), view.one_output()
    if view.op.op_type == "Slice":
        touched = view.integers(3, "axes")
        if touched is None:
            touched = list(range(len(view.integers(1, "starts") or ())))
    elif view.op.op_type == "Pad":
        if view.has(3):
            raise WholeError("it pads given axes")
        pads = view.integers(1, "pads") or []
        touched = [d for d in range(len(x)) if pads[d] or pads[len(x) + d]]
    else:
        repeats = view.integers(1, "repeats") or []
        touched = [d for d, n in enumerate(repeats) if n != 1]
    touched = [axis % len(x) for axis in touched]
    dims = every(x, *touched)
    return space(view, sizes_of(result, *touched), [dims], [dims])


def transpose(view: View) -> Space:
    """Split all dimensions."""
    result = view.one_output()
    order = view.get("perm", None) or list(range(len(result)))[::-1]
    read: list[Entry] = [None] * len(result)
    for d, source in enumerate(order):
        read[int(source)] = d
    return space(view, sizes_of(result), [read], [every(result)])


def expand(view: View) -> Space:
    """Split all dimensions; a part has its own shape."""
    result = view.one_output()
    return _shaped(view, sizes_of(result), aligned(view.shape(0), result), every(result))


def reshape(view: View) -> Space:
    """Split dimensions that stay leading: those before which nothing is merged or divided."""
    x, result = view.shape(0), view.one_output()
    sizes: dict[Key, int] = {}
    read: list[Entry] = [None] * len(x)
    yielded: list[Entry] = [None] * len(result)
    for before, after in _groups(x, result):
        i = next((d for d in before if x[d] > 1), None)
        o = next((d for d in after if result[d] > 1), None)
        if i is None or o is None:
            continue
        n = math.gcd(x[i], result[o])
        sizes[o] = n
        read[i] = (o, x[i] // n, x[i] // n, 0)
        yielded[o] = (o, result[o] // n, result[o] // n, 0)
    if view.op.op_type != "Reshape":
        return space(view, sizes, [read], [yielded])
    return _shaped(view, sizes, read, yielded)


def _shaped(view: View, sizes: dict[Key, int], read: list[Entry], yielded: list[Entry]) -> Space:
    """Return the space of an operator that is given the shape of its result."""

    def change(part: Part) -> Change:
        shape = as_shape(shape_of(region_of(found.outputs[0], part, view.outputs[0])))
        if "shape" in view.op.attributes:
            return Change({"shape": shape.tolist()})
        return Change(constants={1: shape})

    found = space(view, sizes, [read], [yielded], change=change)
    return found


def _groups(x: Shape, result: Shape) -> list[tuple[list[int], list[int]]]:
    """Return dimensions of two shapes that hold the same elements, the least ones together."""
    groups = []
    i = o = 0
    while i < len(x) and o < len(result):
        before, after = [i], [o]
        n_before, n_after = x[i], result[o]
        i, o = i + 1, o + 1
        while n_before != n_after:
            if n_before < n_after:
                n_before *= x[i]
                before.append(i)
                i += 1
            else:
                n_after *= result[o]
                after.append(o)
                o += 1
        groups.append((before, after))
    return groups
