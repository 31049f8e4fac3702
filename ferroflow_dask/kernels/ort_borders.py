"""Types that onnxruntime's Python interface has no arrays for: they cross the border of a session as others.

bfloat16 and 8-bit floating-point numbers are float32 there, integers of 4 bits and fewer are of 8 bits. Each
value has an exact counterpart, so nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import onnx

from ferroflow_dask.graph.protos import subgraphs_of_node

Dtypes = dict[str, np.dtype[Any]]

#: Element types by those that stand for them.
_STAND_INS = {
    getattr(onnx.TensorProto, name): stand_in
    for stand_in, names in {
        onnx.TensorProto.FLOAT: (
            "BFLOAT16",
            "FLOAT8E4M3FN",
            "FLOAT8E4M3FNUZ",
            "FLOAT8E5M2",
            "FLOAT8E5M2FNUZ",
        ),
        onnx.TensorProto.INT8: ("INT4", "INT2"),
        onnx.TensorProto.UINT8: ("UINT4", "UINT2"),
    }.items()
    for name in names
    if hasattr(onnx.TensorProto, name)
}

#: What is put behind the name of a value for the one that stands for it.
_SUFFIX = "__at_border"


def with_stand_ins(model: onnx.ModelProto) -> tuple[Dtypes, Dtypes]:
    """Let other types stand for those that have no arrays; inputs and outputs keep their names.

    Parameters
    ----------
    model : ModelProto
        Is changed.

    Returns
    -------
    dict of str to dtype
        What must be given in the place of inputs that are concerned.
    dict of str to dtype
        What the outputs that are concerned must become.
    """
    graph = model.graph
    given: Dtypes = {}
    wanted: Dtypes = {}
    before, behind = [], []
    for entry in graph.input:
        element = entry.type.tensor_type.elem_type
        if element in _STAND_INS:
            given[entry.name] = _dtype(_STAND_INS[element])
            before.append(onnx.helper.make_node("Cast", [entry.name], [entry.name + _SUFFIX], to=element))
            entry.type.tensor_type.elem_type = _STAND_INS[element]
    for entry in graph.output:
        element = entry.type.tensor_type.elem_type
        if element in _STAND_INS:
            wanted[entry.name] = _dtype(element)
            stand_in = _STAND_INS[element]
            behind.append(onnx.helper.make_node("Cast", [entry.name + _SUFFIX], [entry.name], to=stand_in))
            entry.type.tensor_type.elem_type = stand_in
    if before or behind:
        _rename(graph, {**given, **wanted})
        nodes = [*before, *graph.node, *behind]
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    return given, wanted


def _dtype(element: int) -> np.dtype[Any]:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element))


def _rename(graph: onnx.GraphProto, names: Container[str]) -> None:
    """Have the nodes of a graph, and of those inside of it, call values by what stands behind the border."""
    for node in graph.node:
        for values in (node.input, node.output):
            for i, name in enumerate(values):
                if name in names:
                    values[i] = name + _SUFFIX
        for inner in subgraphs_of_node(node):
            _rename(inner, names)
            for entry in inner.output:
                if entry.name in names:
                    entry.name += _SUFFIX
