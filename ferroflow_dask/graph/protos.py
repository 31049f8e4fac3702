"""Translate between our specs and attributes and ONNX's messages; nothing else knows both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx

from ferroflow_dask.graph.nodes import UNKNOWN, Dim, Op, TensorSpec


def domain_from_name(name: str) -> str:
    """Return a domain of operators; ONNX's own, which has two names, as the empty one."""
    return "" if name == "ai.onnx" else name


def spec_from_type(type_proto: onnx.TypeProto) -> TensorSpec:
    """Return the spec of an ONNX type; unknown for anything but dense tensors and sequences."""
    if type_proto.HasField("optional_type"):
        held = spec_from_type(type_proto.optional_type.elem_type)
        return held if held.is_sequence else UNKNOWN
    if type_proto.HasField("sequence_type"):
        return TensorSpec(is_sequence=True)
    if not type_proto.HasField("tensor_type") or not type_proto.tensor_type.elem_type:
        return UNKNOWN
    tensor = type_proto.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if not tensor.HasField("shape"):
        return TensorSpec(dtype, None)
    return TensorSpec(dtype, tuple(_dim(dim) for dim in tensor.shape.dim))


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value") and dim.dim_value >= 0:  # some exporters write -1 for "any"
        return int(dim.dim_value)
    # Some exporters name every unknown dimension "?", however many there are.
    return None if dim.dim_param == "?" else dim.dim_param or None


def type_from_spec(spec: TensorSpec) -> onnx.TypeProto:
    """Return the ONNX type of a spec; an empty message where nothing is known."""
    if spec.dtype is None:
        return onnx.TypeProto()
    element = onnx.helper.np_dtype_to_tensor_dtype(spec.dtype)
    return onnx.helper.make_tensor_type_proto(element, None if spec.shape is None else list(spec.shape))


def node_from_op(op: Op, version: int) -> onnx.NodeProto:
    """Return the ONNX node of an op.

    Attribute types come from the operator's schema, since Python's values do not tell an empty
    list of integers from one of floats.
    """
    node = onnx.helper.make_node(op.op_type, op.inputs, op.outputs, op.name, domain=op.domain)
    declared: dict[str, Any] = {}
    if onnx.defs.has(op.op_type, version, op.domain):
        declared = dict(onnx.defs.get_schema(op.op_type, version, op.domain).attributes)
    for name, value in op.attributes.items():
        kind = int(declared[name].type.value) if name in declared else None
        node.attribute.append(onnx.helper.make_attribute(name, value, attr_type=kind))
    return node


def subgraphs(attributes: Mapping[str, Any]) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in an op's attributes, alone or in lists; not those inside of them."""
    for value in attributes.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, onnx.GraphProto):
                yield item


def subgraphs_of_node(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in a node's attributes; not those inside of them."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def tensors_of_node(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors in a node's attributes, and the initializers of its sub-graphs."""
    sparse: list[onnx.SparseTensorProto] = []
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            sparse.append(attribute.sparse_tensor)
        sparse.extend(attribute.sparse_tensors)
    for graph in subgraphs_of_node(node):
        yield from graph.initializer
        sparse.extend(graph.sparse_initializer)
    for entry in sparse:
        yield from (entry.values, entry.indices)


def nested_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those in their sub-graphs, however deep."""
    for node in nodes:
        yield node
        for graph in subgraphs_of_node(node):
            yield from nested_nodes(graph.node)


def nested_graphs(graphs: Iterable[onnx.GraphProto]) -> Iterator[onnx.GraphProto]:
    """Yield graphs and those inside of them, however deep."""
    for graph in graphs:
        yield graph
        for node in graph.node:
            yield from nested_graphs(subgraphs_of_node(node))


def captured(graphs: Iterable[onnx.GraphProto]) -> tuple[str, ...]:
    """Return the names that the sub-graphs of an op read from outside it, however deep, each once."""
    return tuple(dict.fromkeys(name for graph in graphs for name in _read_outside(graph)))


def _read_outside(graph: onnx.GraphProto) -> Iterator[str]:
    local = {entry.name for entry in (*graph.input, *graph.initializer)}
    local.update(sparse.values.name for sparse in graph.sparse_initializer)
    local.update(name for inner in graph.node for name in inner.output)
    for inner in graph.node:
        names = (*inner.input, *captured(subgraphs_of_node(inner)))
        yield from (name for name in names if name and name not in local)
    yield from (entry.name for entry in graph.output if entry.name not in local)
