"""Take large weights out of sub-graphs: ops would carry them wherever they go, and be told apart by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from numpy.typing import NDArray

from ferroflow_dask.graph.protos import nested_graphs, subgraphs_of_node
from ferroflow_dask.graph.weights import WeightReader, is_constant


def lift_weights(
    graph: onnx.GraphProto, reader: WeightReader, is_large: Callable[[NDArray[Any]], bool]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the large weights in the sub-graphs of a graph, which then read them from it; it is changed.

    Parameters
    ----------
    graph : GraphProto
    reader : WeightReader
    is_large : callable
        Tells it of a weight's value.

    Yields
    ------
    str
        Name that the weight has from now on: its own, with a number behind it if others have that, too.
    array
    """
    _, *inner = nested_graphs([graph])
    if not inner:
        return
    defined = Counter(name for one in (graph, *inner) for name in _defined(one))
    taken = set(defined)
    for sub in inner:
        bound = {entry.name for entry in (*sub.input, *sub.output)}
        for name, value in list(_weights(sub, reader)):
            if name in bound or not is_large(value):
                continue
            _remove(sub, name)
            outside = name
            if defined[name] > 1:
                outside = unique(name, taken)
                rename(sub, name, outside)
            yield outside, value


def unique(name: str, taken: set[str]) -> str:
    """Return the name, with a number behind it if it is taken, and mark it taken."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken.add(candidate)
    return candidate


def _defined(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of the values that a graph itself defines."""
    for entry in (*graph.input, *graph.initializer):
        yield entry.name
    for sparse in graph.sparse_initializer:
        yield sparse.values.name
    for node in graph.node:
        yield from node.output


def _weights(graph: onnx.GraphProto, reader: WeightReader) -> Iterator[tuple[str, NDArray[Any]]]:
    for tensor in graph.initializer:
        yield tensor.name, reader.array(tensor)
    for node in graph.node:
        if is_constant(node):
            yield node.output[0], reader.constant(node)


def _remove(graph: onnx.GraphProto, name: str) -> None:
    for entries, names in (
        (graph.initializer, [tensor.name for tensor in graph.initializer]),
        (graph.node, [node.output[0] if is_constant(node) else "" for node in graph.node]),
    ):
        if name in names:
            del entries[names.index(name)]
            return


def rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Have a graph, and those inside of it, read another value from outside."""
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == old:
                node.input[i] = new
        for sub in subgraphs_of_node(node):
            rename(sub, old, new)
    for entry in graph.output:
        if entry.name == old:
            entry.name = new
