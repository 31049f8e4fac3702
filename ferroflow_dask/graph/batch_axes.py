"""Graphs whose rows are along another axis than the first: the axis is moved inside the graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import onnx

from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.inference import inferred
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.lifting import rename, unique
from ferroflow_dask.graph.nodes import Op, TensorSpec, with_specs

#: The axis of rows: of all inputs and outputs, or by name.
BatchAxis = int | Mapping[str, int]

#: `Transpose` is the same from this opset of ONNX on.
_OPSET = 1

#: Of each graph those with moved axes, the same for the same axes: workers know them open.
_made: WeakKeyDictionary[Graph, dict[tuple[tuple[str, int], ...], Graph]] = WeakKeyDictionary()


def with_rows_first(graph: Graph, batch_axis: BatchAxis) -> Graph:
    """Return a graph whose inputs and outputs have rows along the first axis; itself if they have.

    Parameters
    ----------
    graph : Graph
    batch_axis : int or mapping of str to int
        The axis of rows; names that a mapping leaves out have rows along the first axis.

    Raises
    ------
    UsageError
        `batch_axis` has another form or names another value.
    BindError
        A value has no such axis, or its number of axes is unknown.
    """
    axes = _axes(graph, batch_axis)
    key = tuple(sorted((name, axis) for name, (axis, _) in axes.items()))
    if not key:
        return graph
    made = _made.setdefault(graph, {})
    if key not in made:
        made[key] = _moved(graph, axes)
    return made[key]


def _axes(graph: Graph, batch_axis: BatchAxis) -> dict[str, tuple[int, TensorSpec]]:
    """Return by name the axes that must be moved, and what is known of the values."""
    found = inferred(graph, {})
    specs = {**{name: found.get(name, graph.spec(name)) for name in graph.outputs}, **graph.inputs}
    given = batch_axis if isinstance(batch_axis, Mapping) else dict.fromkeys(specs, batch_axis)
    axes = {}
    for name, axis in given.items():
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise UsageError(
                f"batch_axis must be an axis, or a dict like {{'state': 1}}, got {axis!r} for {name!r}"
            )
        if name not in specs:
            raise UsageError(f"batch_axis names {name!r}; the model has {with_specs(specs)}")
        shape = specs[name].shape
        if axis == 0:
            continue
        if shape is None:
            raise BindError(f"batch_axis is {axis} for {name!r}, whose number of axes is unknown")
        if not -len(shape) <= axis < len(shape):
            raise BindError(f"batch_axis is {axis} for {name!r}, which has {len(shape)} axes: {specs[name]}")
        if axis % len(shape):
            axes[name] = axis % len(shape), specs[name]
    return axes


def _moved(graph: Graph, axes: Mapping[str, tuple[int, TensorSpec]]) -> Graph:
    taken = {source.name for source in graph.sources} | set(graph.producers)
    names = {name: unique(f"{name}_in_model", taken) for name in axes}
    first_id = 1 + max([*(source.id for source in graph.sources), *(op.id for op in graph.ops)])
    op_names = {op.name for op in graph.ops}
    specs = {names.get(name, name): spec for name, spec in graph.specs.items()}
    ops, rows_first = [_renamed(op, names) for op in graph.ops], {}
    for i, (name, (axis, spec)) in enumerate(axes.items()):
        shape = spec.shape or ()
        rest = [at for at in range(len(shape)) if at != axis]
        rows_first[name] = TensorSpec(spec.dtype, (shape[axis], *(shape[at] for at in rest)))
        ends, order = (names[name], name), [axis, *rest]
        if name in graph.inputs:
            ends, order = (name, names[name]), list(range(1, len(shape)))
            order.insert(axis, 0)
        else:
            specs[name] = rows_first[name]
        op_name = unique(f"rows_of_{name}", op_names)
        ops.append(Op(first_id + i, op_name, "Transpose", ends[:1], ends[1:], attributes={"perm": order}))
    sources = tuple(
        replace(source, spec=rows_first[source.name]) if source.name in rows_first else source
        for source in graph.sources
    )
    opsets = {"": _OPSET, **graph.opsets}
    return replace(graph, sources=sources, ops=tuple(ops), specs=specs, opsets=opsets)


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    attributes = dict(op.attributes)
    read = [name for name in op.captured if name in names]
    for attribute, value in attributes.items() if read else ():
        attributes[attribute] = _renamed_bodies(value, {name: names[name] for name in read})
    inputs, outputs, captured = (
        tuple(names.get(name, name) for name in values) for values in (op.inputs, op.outputs, op.captured)
    )
    return replace(op, inputs=inputs, outputs=outputs, captured=captured, attributes=attributes)


def _renamed_bodies(value: Any, names: Mapping[str, str]) -> Any:
    """Return an attribute whose sub-graphs read other values."""
    if isinstance(value, list | tuple):
        return [_renamed_bodies(entry, names) for entry in value]
    if not isinstance(value, onnx.GraphProto):
        return value
    body = copy.deepcopy(value)
    for name, new in names.items():
        rename(body, name, new)
    return body
