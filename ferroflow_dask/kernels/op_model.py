"""The ONNX model that consists of one op, as libraries that run models want it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import onnx

from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op
from ferroflow_dask.graph.protos import nested_graphs, node_from_op, subgraphs
from ferroflow_dask.kernels.provider import opset_version

#: IR version of the models made here: knows every type up to 4-bit integers, and every onnxruntime that we
#: allow (1.20 on) reads it.
IR_VERSION = 10

#: The oldest opset that onnxruntime promises to run.
_OLDEST_OPSET = 7

#: Operators that draw random numbers.
DRAWN = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")

_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional


def has_subgraph(op: Op) -> bool:
    """Return whether an attribute holds a graph, which may read values of the op's own graph by name."""
    return next(subgraphs(op.attributes), None) is not None


def is_seeded(op: Op) -> bool:
    """Return whether an op, or a node in its sub-graphs, draws random numbers from a seed that the model has.

    Such an op yields the same whenever it runs, as `onnx.reference` has it. A session of onnxruntime goes on
    with its numbers from run to run.
    """
    if not op.domain and op.op_type in DRAWN and "seed" in op.attributes:
        return True
    return any(
        not node.domain and node.op_type in DRAWN and any(given.name == "seed" for given in node.attribute)
        for graph in nested_graphs(subgraphs(op.attributes))
        for node in graph.node
    )


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


def name_omitted_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Name the outputs that nodes leave out, in sub-graphs too; return the model, which is changed in place.

    onnxruntime takes those for outputs that are there, and ends the process: where an operator has any
    number of them (`Loop`, `Split`), or where others come behind them. Optional ones at the end are taken
    away instead, which means the same.
    """
    graphs = list(nested_graphs([model.graph]))
    nodes = [node for graph in graphs for node in graph.node]
    if not any("" in node.output for node in nodes):
        return model
    taken = {name for node in nodes for name in (*node.input, *node.output)}
    for graph in graphs:
        taken.update(entry.name for entry in (*graph.input, *graph.initializer))
        taken.update(sparse.values.name for sparse in graph.sparse_initializer)
    free = (name for name in map("omitted_{}".format, itertools.count()) if name not in taken)
    versions = {entry.domain: entry.version for entry in model.opset_import}
    for node in nodes:
        version = versions.get(node.domain, 1)
        if "" not in node.output or not onnx.defs.has(node.op_type, version, node.domain):
            continue
        declared = onnx.defs.get_schema(node.op_type, version, node.domain).outputs
        options = [declared[min(i, len(declared) - 1)].option for i in range(len(node.output))]
        while node.output and not node.output[-1] and options[len(node.output) - 1] == _OPTIONAL:
            del node.output[-1]
        for i, name in enumerate(node.output):
            node.output[i] = name or next(free)
    return model
