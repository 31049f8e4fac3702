"""Ops of ONNX's nodes, and the sub-graphs of control flow as graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.lifting import unique
from ferroflow_dask.graph.nodes import Op, Source, TensorSpec
from ferroflow_dask.graph.protos import captured, domain_from_name, spec_from_type, subgraphs_of_node
from ferroflow_dask.graph.weights import WeightReader, is_constant


def ops_of(nodes: Iterable[onnx.NodeProto], first_id: int) -> tuple[Op, ...]:
    """Return the ops of nodes that are no constants; names are made unique.

    Parameters
    ----------
    nodes : iterable of NodeProto
    first_id : int
        Of the first op.
    """
    nodes = [node for node in nodes if not is_constant(node)]
    # Names that the model gives come first, so that those we make up give way.
    taken: set[str] = set()
    names = [unique(node.name, taken) if node.name else "" for node in nodes]
    ops = []
    for op_id, (node, name) in enumerate(zip(nodes, names, strict=True), first_id):
        op = Op(
            op_id,
            name or unique(f"{node.op_type.lower()}_{op_id}", taken),
            node.op_type,
            tuple(node.input),
            tuple(node.output),
            domain_from_name(node.domain),
            {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute},
            captured(subgraphs_of_node(node)),
        )
        ops.append(op)
    return tuple(ops)


def graph_of_body(body: onnx.GraphProto, opsets: Mapping[str, int], outside: Sequence[str] = ()) -> Graph:
    """Return a sub-graph as a graph, whose inputs are its own, then the values that it reads from outside.

    Parameters
    ----------
    body : GraphProto
    opsets : mapping of str to int
        Versions of the model that it comes from.
    outside : sequence of str
        Values that it may read; those that it does not read are left out.
    """
    reader = WeightReader(None)
    constants: dict[str, Any] = {tensor.name: reader.array(tensor) for tensor in body.initializer}
    constants.update((sparse.values.name, reader.dense(sparse)) for sparse in body.sparse_initializer)
    constants.update((node.output[0], reader.constant(node)) for node in body.node if is_constant(node))
    own = {entry.name: spec_from_type(entry.type) for entry in body.input if entry.name not in constants}
    read = set(captured([body]))
    inputs = {**own, **{name: TensorSpec() for name in outside if name in read}}
    sources = [Source(i, name, spec) for i, (name, spec) in enumerate(inputs.items())]
    for name, value in constants.items():
        sources.append(Source(len(sources), name, TensorSpec.of(value.dtype, value.shape), value))
    return Graph(
        name=body.name or "body",
        sources=tuple(sources),
        ops=ops_of(body.node, len(sources)),
        outputs=tuple(dict.fromkeys(entry.name for entry in body.output)),
        opsets=opsets,
    )
