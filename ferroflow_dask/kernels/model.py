"""The ONNX model that consists of one op, as libraries that run models want it."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op
from ferroflow_dask.graph.protos import node_from_op, subgraphs
from ferroflow_dask.kernels.provider import opset_version

#: IR version of the models made here: knows every type up to 4-bit integers, and every onnxruntime that we
#: allow (1.20 on) reads it.
IR_VERSION = 10

#: The oldest opset that onnxruntime promises to run.
_OLDEST_OPSET = 7


def has_subgraph(op: Op) -> bool:
    """Return whether an attribute holds a graph, which may read values of the op's own graph by name."""
    return next(subgraphs(op.attributes), None) is not None


def declared_opset(op: Op, opsets: Mapping[str, int]) -> int:
    """Return the oldest opset version in which the op means the same.

    A library may not know the newest opset, yet know most operators in it, since few change each time.
    """
    version = opset_version(op, opsets)
    if has_subgraph(op) or not onnx.defs.has(op.op_type, version, op.domain):
        return version
    since = onnx.defs.get_schema(op.op_type, version, op.domain).since_version
    return since if op.domain else max(since, min(version, _OLDEST_OPSET))


def one_node_model(
    op: Op, opsets: Mapping[str, int], types: Mapping[str, onnx.TypeProto], version: int | None = None
) -> onnx.ModelProto:
    """Return a model that reads the op's operands and yields its outputs.

    Parameters
    ----------
    op : Op
        Captured values become inputs too, so that sub-graphs find them in the enclosing graph.
    opsets : mapping of str to int
        Versions of the graph that the op comes from.
    types : mapping of str to TypeProto
        Types of the operands; those left out stay open.
    version : int, optional
        Version of the op's own domain to declare instead of the graph's.
    """
    version = opset_version(op, opsets) if version is None else version
    imports = {op.domain: version}
    if has_subgraph(op):
        imports = {**{name: v for name, v in opsets.items() if name != FERROFLOW_DOMAIN}, **imports}
    inputs = [
        onnx.ValueInfoProto(name=value, type=types.get(value, onnx.TypeProto()))
        for value in dict.fromkeys(op.operands)
    ]
    outputs = [onnx.ValueInfoProto(name=value) for value in op.outputs if value]
    return onnx.helper.make_model(
        onnx.helper.make_graph([node_from_op(op, version)], "op", inputs, outputs),
        opset_imports=[onnx.helper.make_opsetid(name, v) for name, v in imports.items()],
        ir_version=IR_VERSION,
    )
