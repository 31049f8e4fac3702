"""Splits of products: matrix products, convolutions, attention, recurrent layers."""

from __future__ import annotations

import numpy as np

from ferroflow_dask.strategy.spaces import CONTRACTED, Change, Part, Space
from ferroflow_dask.strategy.view import (
    Entry,
    Key,
    View,
    WholeError,
    aligned,
    interval_of,
    sizes_of,
    space,
)


def matmul(view: View) -> Space:
    """Split rows, columns, stacked matrices, and the contracted dimension."""
    left, right, result = view.shape(0), view.shape(1), view.one_output()
    n_stacked = len(result) - (len(left) > 1) - (len(right) > 1)
    rows: list[Entry] = [n_stacked] if len(left) > 1 else []
    columns: list[Entry] = [len(result) - 1] if len(right) > 1 else []
    stacked = result[:n_stacked]
    sizes: dict[Key, int] = {**sizes_of(result), CONTRACTED: left[-1]}
    return space(
        view,
        sizes,
        [
            [*aligned(left[:-2], stacked), *rows, CONTRACTED],
            [*aligned(right[:-2], stacked), CONTRACTED, *columns],
        ],
        [list(range(len(result)))],
    )


def gemm(view: View) -> Space:
    """Split rows, columns, and the contracted dimension; the first part of that adds C."""
    result = view.one_output()
    left: list[Entry] = [0, CONTRACTED]
    right: list[Entry] = [CONTRACTED, 1]
    n = view.shape(0)[0 if view.get("transA", 0) else 1]
    inputs: list[list[Entry] | None] = [
        left[::-1] if view.get("transA", 0) else left,
        right[::-1] if view.get("transB", 0) else right,
    ]
    if view.has(2):
        inputs.append(aligned(view.shape(2), result))

    def change(part: Part) -> Change:
        if not (view.has(2) and part.get(CONTRACTED, (0, n))[0]):
            return Change()
        return Change(dropped=(2,)) if view.opset >= 11 else Change({"beta": 0.0})

    sizes: dict[Key, int] = {**sizes_of(result), CONTRACTED: n}
    return space(view, sizes, inputs, [[0, 1]], change=change)


def head_matmul(view: View) -> Space:
    """Split attention by heads and by sequence."""
    heads = int(view.get("heads", 1))
    left, right, result = view.shape(0), view.shape(1), view.one_output()
    if right[1] % heads:
        raise WholeError("heads do not share the columns evenly")
    width = right[1] // heads

    def change(part: Part) -> Change:
        first, stop = interval_of(part, key) or (0, heads)
        return Change({"heads": stop - first})

    if view.get("trans_b", 0):
        key = 0
        by_head: Entry = (key, width, width, 0)
        inputs: list[list[Entry]] = [[1, by_head], [2, by_head]]
        return space(view, sizes_of(result), inputs, [[0, 1, 2]], change=change)
    key = 1
    by_head = (key, width, width, 0)
    sizes: dict[Key, int] = {0: left[1], 1: heads, CONTRACTED: left[2]}
    return space(view, sizes, [[1, 0, CONTRACTED], [CONTRACTED, by_head]], [[0, by_head]], change=change)


def attention(view: View) -> Space:
    """Split ONNX's Attention by samples, by heads, and by the sequence of queries."""
    if any(map(view.has, range(3, len(view.inputs)))) or len(view.outputs) > 1:
        raise WholeError("it has a mask, or keeps past keys")
    query, keys = view.shape(0), view.shape(1)
    is_flat = len(query) == 3
    heads = int(view.get("kv_num_heads", 0)) if is_flat else keys[1]
    n_queries = int(view.get("q_num_heads", 0)) if is_flat else query[1]
    if not heads or n_queries % heads:
        raise WholeError("heads do not share the queries evenly")
    shared = n_queries // heads
    by_head, sequence = (2, 1) if is_flat else (1, 2)
    sizes: dict[Key, int] = {0: query[0], by_head: heads}
    if not view.get("is_causal", 0):
        sizes[sequence] = query[sequence]

    def dims(shape: tuple[int, ...], n: int, along: Entry) -> list[Entry]:
        width = shape[2] // heads if is_flat else n
        split: Entry = (by_head, width, width, 0)
        return [0, along, split] if is_flat else [0, split, along, None]

    def change(part: Part) -> Change:
        first, stop = interval_of(part, by_head) or (0, heads)
        n = stop - first
        # The scale must not change: by default it is that of the width of a head, which stays.
        return Change({"kv_num_heads": n, "q_num_heads": n * shared} if is_flat else {})

    read = [
        dims(query, shared, sequence),
        dims(keys, 1, None),
        dims(view.shape(2), 1, None),
    ]
    return space(view, sizes, read, [dims(view.outputs[0], shared, sequence)], change=change)


def einsum(view: View) -> Space:
    """Split each index of the result, and the first one that is summed up."""
    equation = view.get("equation", b"")
    text = (equation.decode() if isinstance(equation, bytes) else str(equation)).replace(" ", "")
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    if not arrow or "." in text or any(len(set(term)) < len(term) for term in (*terms, result)):
        raise WholeError("its equation has no result, an ellipsis or a diagonal")
    sizes_by = {
        index: n for i, term in enumerate(terms) for index, n in zip(term, view.shape(i), strict=True)
    }
    keys: dict[str, Key] = {index: d for d, index in enumerate(result)}
    summed = [index for index in sizes_by if index not in keys]
    # An operand that is summed up on its own would be summed in each part.
    common = next((index for index in summed if all(index in term for term in terms)), None)
    if common is not None:
        keys[common] = CONTRACTED
    sizes = {key: sizes_by[index] for index, key in keys.items()}
    inputs = [[keys.get(index) for index in term] for term in terms]
    return space(view, sizes, inputs, [[keys[index] for index in result]])


def lstm(view: View) -> Space:
    """Split a recurrent layer by samples."""
    if int(view.get("layout", 0)):
        raise WholeError("its layout has the batch first")
    sizes: dict[Key, int] = {0: view.shape(0)[1]}
    inputs: list[list[Entry] | None] = [[None, 0, None], None, None, None]
    inputs += [[0]] if view.has(4) else [None]
    inputs += [[None, 0, None] if view.has(i) else None for i in (5, 6)]
    outputs: list[list[Entry]] = [[*[None] * (len(shape) - 2), 0, None] for shape in view.outputs]
    return space(view, sizes, inputs[: len(view.inputs)], outputs)


def embedding(view: View) -> Space:
    """Split the indices, and the dimensions of the table that are not looked up."""
    table, indices = view.shape(0), view.shape(1)
    axis = view.axis(0, len(table))
    behind = len(indices) - 1
    inputs: list[list[Entry]] = [
        [d if d < axis else None if d == axis else d + behind for d in range(len(table))],
        [axis + d for d in range(len(indices))],
    ]
    result = view.one_output()
    return space(view, sizes_of(result), inputs, [list(range(len(result)))])


def gather_elements(view: View) -> Space:
    """Split all dimensions but the one that is looked up."""
    result = view.one_output()
    axis = view.axis(0, len(result))
    everything: list[Entry] = list(range(len(result)))
    table: list[Entry] = [None if d == axis else d for d in range(len(result))]
    return space(view, sizes_of(result), [table, everything], [everything])


def as_shape(part_shape: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return a shape as operators take it."""
    return np.array(part_shape, np.int64)
