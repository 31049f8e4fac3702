"""What ONNX's inference tells of the values of a model before it runs: types, ranks, constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ferroflow_dask.graph.protos import domain_from_name, subgraphs_of_node


@dataclass(frozen=True, slots=True)
class Types:
    """What is known of the values that ops of a graph may read, those of enclosing graphs among them.

    Parameters
    ----------
    known : dict of str to TypeProto
    constants : dict of str to array
    producers : dict of str to NodeProto
    """

    known: dict[str, onnx.TypeProto]
    constants: dict[str, Any]
    producers: dict[str, onnx.NodeProto]

    @classmethod
    def of(cls, graph: onnx.GraphProto, constants: Mapping[str, Any]) -> Types:
        """Return what is known in a graph that is in no other.

        Parameters
        ----------
        graph : GraphProto
            Of a model whose types are inferred.
        constants : mapping of str to array
            Those that the graph does not have itself.
        """
        arrays = {name: value for name, value in constants.items() if isinstance(value, np.ndarray)}
        return cls({}, arrays, {}).within(graph)

    def within(self, graph: onnx.GraphProto) -> Types:
        """Return what is known in a graph, which may be a sub-graph here."""
        known = dict(self.known)
        for tensor in graph.initializer:
            known[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        for entry in (*graph.input, *graph.value_info, *graph.output):
            # Outputs of a model may be declared with less than is inferred of what makes them.
            if entry.name not in known or _rank(entry.type) is not None:
                known[entry.name] = entry.type
        constants, producers = dict(self.constants), dict(self.producers)
        for name in {entry.name for entry in graph.input}:
            producers.pop(name, None)
        for tensor in graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                constants[tensor.name] = onnx.numpy_helper.to_array(tensor)
        for node in graph.node:
            producers.update(dict.fromkeys(filter(None, node.output), node))
            if node.op_type == "Constant":
                value = _constant(node)
                if value is not None:
                    constants[node.output[0]] = value
        return Types(known, constants, producers)

    def constant(self, name: str) -> Any:
        """Return the value of a constant, None for others."""
        return self.constants.get(name)

    def producer(self, name: str) -> onnx.NodeProto | None:
        """Return the node that makes a value, None for what no node makes."""
        return self.producers.get(name)

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """Return the dtype of a tensor, None where it is unknown."""
        if name in self.constants:
            dtype: np.dtype[Any] = self.constants[name].dtype
            return dtype
        element = self.known[name].tensor_type.elem_type if name in self.known else 0
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element)) if element else None

    def rank(self, name: str) -> int | None:
        """Return how many axes a tensor has, None where it is unknown."""
        if name in self.constants:
            return int(self.constants[name].ndim)
        return _rank(self.known[name]) if name in self.known else None

    def sizes(self, name: str) -> list[int | None]:
        """Return the sizes of a tensor, None for those that are unknown; nothing where the rank is."""
        if name in self.constants:
            return list(self.constants[name].shape)
        dims = self.known[name].tensor_type.shape.dim if name in self.known else ()
        return [int(dim.dim_value) if dim.HasField("dim_value") else None for dim in dims]

    def length(self, name: str) -> int | None:
        """Return how many elements a list has, None where it is unknown."""
        if name in self.constants:
            return int(self.constants[name].size)
        if self.rank(name) != 1:
            return None
        (dim,) = self.known[name].tensor_type.shape.dim
        return int(dim.dim_value) if dim.HasField("dim_value") else None


def _rank(type_proto: onnx.TypeProto) -> int | None:
    tensor = type_proto.tensor_type
    return len(tensor.shape.dim) if type_proto.HasField("tensor_type") and tensor.HasField("shape") else None


def _constant(node: onnx.NodeProto) -> Any:
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.t.data_location != onnx.TensorProto.EXTERNAL:
            return onnx.numpy_helper.to_array(attribute.t)
        if attribute.name in ("value_int", "value_ints"):
            return np.array(onnx.helper.get_attribute_value(attribute), np.int64)
    return None


def infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model with what ONNX can infer of its values' types; the same where it cannot."""
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        return copy


def pin_ranks(graph: onnx.GraphProto, types: Types) -> bool:
    """Write down ranks that ONNX does not infer, though operators tell them; return whether there were any.

    Parameters
    ----------
    graph : GraphProto
        Changed in place, its sub-graphs too: the results' types get shapes of unknown dimensions.
    types : Types
        Of the graph.
    """
    entries = {entry.name: entry for entry in (*graph.value_info, *graph.output)}
    is_changed = False
    for node in graph.node:
        for inner in subgraphs_of_node(node):
            is_changed |= pin_ranks(inner, types.within(inner))
        if domain_from_name(node.domain) or not node.output or types.rank(node.output[0]) is not None:
            continue
        rank, entry = _told_rank(node, types), entries.get(node.output[0])
        if rank is not None and entry is not None and entry.type.tensor_type.elem_type:
            entry.type.tensor_type.shape.SetInParent()
            for _ in range(rank):
                entry.type.tensor_type.shape.dim.add()
            is_changed = True
    return is_changed


def _told_rank(node: onnx.NodeProto, types: Types) -> int | None:
    """Return the rank of a node's result where it fails for any other."""
    match node.op_type:
        case "Transpose":
            return next((len(entry.ints) for entry in node.attribute if entry.name == "perm"), None)
        case "Flatten" | "Gemm":
            return 2
        case "Conv" | "ConvTranspose":
            return types.rank(node.input[1])
        case "Reshape":
            return types.length(node.input[1]) if len(node.input) > 1 else None
    return None
