"""What ONNX's shape inference can say of the values in a graph."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.graph.protos import spec_from_type
from ferroflow_dask.graph.to_onnx import to_onnx

#: What writing a graph as a model raises where ONNX cannot hold it, and inference where it gives up.
_UNTOLD = (onnx.shape_inference.InferenceError, RuntimeError, ValueError, TypeError, KeyError)


def inferred(graph: Graph, inputs: Mapping[str, TensorSpec] | None = None) -> dict[str, TensorSpec]:
    """Return what ONNX can say of values that ops produce, and of outputs; nothing where it cannot.

    Parameters
    ----------
    graph : Graph
    inputs : mapping of str to TensorSpec, optional
        What is known of inputs beyond the graph's own specs.
    """
    try:
        model = onnx.shape_inference.infer_shapes(to_onnx(graph, inputs), data_prop=True).graph
    except _UNTOLD:
        return {}
    return {entry.name: spec_from_type(entry.type) for entry in (*model.value_info, *model.output)}
