"""Import ONNX models: every node becomes an op, every weight a source that carries its value.

ONNX's own checker and shape inference run first, on a copy of the model without its large weights: they
need none of those, and cannot take a model of more than 2 GiB. `validity` has the last word. This module
knows ONNX and files, but neither kernels nor Dask.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
import onnx.checker
from numpy.typing import NDArray

from ferroflow_dask.exceptions import GraphError, ModelError
from ferroflow_dask.graph import validity
from ferroflow_dask.graph.bodies import ops_of
from ferroflow_dask.graph.functions import add_defaults, expand
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.lifting import lift_weights
from ferroflow_dask.graph.model_files import label_of, read_model
from ferroflow_dask.graph.nodes import Source, TensorSpec
from ferroflow_dask.graph.protos import (
    domain_from_name,
    nested_nodes,
    spec_from_type,
    tensors_of_node,
)
from ferroflow_dask.graph.weights import WeightReader, is_constant

#: Weights above this size [B] are not shown to checker and shape inference; what these read (shapes,
#: axes, pads, scales) is smaller.
_LARGE = 4096

#: Kinds of values that may enter a graph; sparse tensors, maps and opaque types have no array.
_INPUT_KINDS = frozenset({"tensor_type", "sequence_type", "optional_type"})


def graph_from_onnx(
    model: Any, name: str | None = None, folder: str | os.PathLike[str] | None = None
) -> Graph:
    """Import an ONNX model with its weights as a graph.

    The parameters and errors are those of `ferroflow_dask.load_onnx`.

    Returns
    -------
    Graph
        Sources are the inputs, then initializers, then `Constant` nodes. Initializers that are listed as
        inputs, too, are the `Graph.defaults` of these. Functions of the model are
        expanded; sub-graphs (`If`, `Loop`, `Scan`) stay attributes of their ops, with the outer values
        they read in `Op.captured`, among them what were their own large weights.
    """
    label = label_of(model)
    try:
        with read_model(model, folder) as file:
            importer = _Importer(file.proto, file.folder)
            return importer.graph(name or file.name or file.proto.graph.name or "model")
    except ModelError as error:
        raise ModelError(f"{label}: {error}") from error.__cause__
    except GraphError as error:
        raise ModelError(f"{label}: is not a valid graph: {error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{label}: is damaged: it has a text that is not UTF-8") from error


class _Importer:
    """Takes the weights out of a model, has the rest checked and inferred, and translates it."""

    def __init__(self, proto: onnx.ModelProto, folder: Path | None) -> None:
        self._reader = WeightReader(folder)
        self._values: dict[str, NDArray[Any]] = {}
        self._listed = {entry.name: entry.type for entry in proto.graph.input}
        initializers = (*proto.graph.initializer, *(entry.values for entry in proto.graph.sparse_initializer))
        self._defaults = {tensor.name for tensor in initializers} & self._listed.keys()
        self._model = onnx.ModelProto()
        if proto.HasField("ir_version"):  # onnxruntime takes 0, not its absence
            self._model.ir_version = proto.ir_version
        self._model.opset_import.extend(proto.opset_import)
        self._model.functions.extend(proto.functions)
        self._copy_graph(proto.graph)
        self._clean()
        self._check()
        if add_defaults(self._model):
            self._clean()
            self._check()  # it has not seen the defaults before

    def graph(self, name: str) -> Graph:
        model = self._infer()
        self._take_constants(model.graph.node)
        sources = self._sources()
        ops = ops_of(model.graph.node, len(sources))
        typed = {value.name: value.type for value in (*model.graph.value_info, *model.graph.output)}
        produced = {value for op in ops for value in op.outputs}
        opsets = {domain_from_name(entry.domain): entry.version for entry in model.opset_import}
        return Graph(
            name=name,
            sources=sources,
            ops=ops,
            outputs=tuple(dict.fromkeys(value.name for value in model.graph.output)),
            specs={value: _spec(value, typed[value]) for value in typed if value in produced},
            opsets=opsets,
        )

    def _copy_graph(self, source: onnx.GraphProto) -> None:
        """Copy everything but large weights, in whose stead the copy has inputs."""
        graph = self._model.graph
        graph.name = source.name or "graph"
        graph.input.extend(source.input)
        graph.output.extend(source.output)
        graph.value_info.extend(source.value_info)
        for tensor in source.initializer:
            self._keep(tensor.name, self._reader.array(tensor))
        for sparse in source.sparse_initializer:
            self._keep(sparse.values.name, self._reader.dense(sparse))
        for node in source.node:
            if is_constant(node) and self._is_large(value := self._reader.constant(node)):
                self._keep(node.output[0], value)
            else:
                copy = graph.node.add()
                copy.CopyFrom(node)
        for name, value in lift_weights(graph, self._reader, self._is_large):
            self._keep(name, value)

    def _clean(self) -> None:
        """Bring external data of tensors inside nodes into the copy, and give domains one name each."""
        model = self._model
        for importing in (model, *model.functions):
            for entry in importing.opset_import:
                entry.domain = domain_from_name(entry.domain)
        for function in model.functions:
            function.domain = domain_from_name(function.domain)
        for nodes in (model.graph.node, *(function.node for function in model.functions)):
            for node in nested_nodes(nodes):
                node.domain = domain_from_name(node.domain)
                for tensor in tensors_of_node(node):
                    if tensor.data_location == onnx.TensorProto.EXTERNAL:
                        tensor.CopyFrom(self._reader.loaded(tensor))

    def _keep(self, name: str, value: NDArray[Any]) -> None:
        if not name or name in self._values:
            raise ModelError(
                f"has two initializers named {name!r}" if name else "has an initializer without name"
            )
        self._values[name] = value
        graph = self._model.graph
        if not self._is_large(value):
            graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        elif name not in self._listed:
            element = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            graph.input.append(onnx.helper.make_tensor_value_info(name, element, value.shape))

    @staticmethod
    def _is_large(value: NDArray[Any]) -> bool:
        return value.nbytes > _LARGE

    def _check(self) -> None:
        if self._model.ByteSize() > onnx.checker.MAXIMUM_PROTOBUF:
            raise ModelError(
                "has more than 2 GiB of weights inside functions or sub-graphs, which ONNX cannot check"
            )
        validity.check(self._model)
        for entry in self._model.graph.input:
            kind = entry.type.WhichOneof("value")
            if kind not in _INPUT_KINDS:
                raise ModelError(
                    f"input {entry.name!r} is a {kind}; only tensors, sequences and optionals can enter"
                )

    def _infer(self) -> onnx.ModelProto:
        """Return the model with functions expanded and types of all values that ONNX can infer."""
        model = self._model
        if model.functions:
            model = expand(model)
        return validity.infer(model)

    def _take_constants(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            if is_constant(node):
                self._values[node.output[0]] = self._reader.constant(node)
            elif node.op_type == "Constant" and not node.domain:
                raise ModelError(f"a Constant node with the outputs {list(node.output)} has no value")

    def _sources(self) -> tuple[Source, ...]:
        sources = [
            Source(i, entry.name, _spec(entry.name, entry.type))
            for i, entry in enumerate(e for e in self._model.graph.input if e.name not in self._values)
        ]
        for name, value in self._values.items():
            declared = _spec(name, self._listed[name]) if name in self._defaults else None
            spec = TensorSpec.of(value.dtype, value.shape)
            sources.append(Source(len(sources), name, spec, value, declared=declared))
        return tuple(sources)


def _spec(value: str, type_proto: onnx.TypeProto) -> TensorSpec:
    try:
        return spec_from_type(type_proto)
    except KeyError as error:
        raise ModelError(f"value {value!r} has the unknown element type {error}") from error
