"""Write a graph as an ONNX model, its large constants left out: what runs it gets them beside it.

Constants that are on a cluster become inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Source, TensorSpec
from ferroflow_dask.graph.protos import node_from_op, type_from_spec

#: Knows every type up to 4-bit integers, and every onnxruntime that we allow (1.20 on) reads it.
IR_VERSION = 10
#: Where a model says that the constants are which it does not have: a name only, there is no such file.
_ELSEWHERE = "constants"


def to_onnx(graph: Graph, inputs: Mapping[str, TensorSpec] | None = None) -> onnx.ModelProto:
    """Return a graph as an ONNX model.

    Constants of more than `graph.nodes.SMALL` bytes are initializers whose data are in `Graph.constants`
    only.

    Parameters
    ----------
    graph : Graph
        Of ONNX's operators, with its constants.
    inputs : mapping of str to TensorSpec, optional
        What is known of inputs beyond the graph's own specs.
    """
    away = {
        source.name: source.spec for source in graph.sources if source.is_scattered and not source.is_small
    }
    specs = {**graph.inputs, **away, **(inputs or {})}
    made = onnx.helper.make_graph(
        [node_from_op(op, graph.opsets.get(op.domain, 1)) for op in graph.live_ops],
        graph.name or "graph",
        [onnx.ValueInfoProto(name=name, type=type_from_spec(spec)) for name, spec in specs.items()],
        [onnx.ValueInfoProto(name=name, type=_element_type(graph.spec(name))) for name in graph.outputs],
    )
    read = {value for op in graph.live_ops for value in op.operands} | set(graph.outputs)
    for source in graph.sources:
        if source.name in read and source.name not in specs:
            made.initializer.append(_initializer(source))
    opsets = {domain: version for domain, version in graph.opsets.items() if domain != FERROFLOW_DOMAIN}
    return onnx.helper.make_model(
        made,
        opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        ir_version=IR_VERSION,
    )


def _initializer(source: Source) -> onnx.TensorProto:
    name, value = source.name, np.asarray(source.array)
    if source.is_small:
        return onnx.numpy_helper.from_array(value, name)
    tensor = onnx.TensorProto(
        name=name,
        dims=value.shape,
        data_type=onnx.helper.np_dtype_to_tensor_dtype(value.dtype),
        data_location=onnx.TensorProto.EXTERNAL,
    )
    tensor.external_data.add(key="location", value=_ELSEWHERE)
    return tensor


def _element_type(spec: TensorSpec) -> onnx.TypeProto:
    # Not the shape: it is inferred, and may be wrong for other inputs than those of the model.
    return type_from_spec(TensorSpec(spec.dtype))
