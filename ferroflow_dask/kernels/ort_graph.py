"""Whole graphs in one session of onnxruntime."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.mapped import in_file
from ferroflow_dask.graph.to_onnx import to_onnx
from ferroflow_dask.kernels.op_model import name_omitted_outputs
from ferroflow_dask.kernels.ort_borders import Dtypes, with_stand_ins
from ferroflow_dask.kernels.ort_values import CPU, NOT_NUMPY, OPEN_ERRORS, feed_of, session_options
from ferroflow_dask.kernels.provider import ExecutionProvider
from ferroflow_dask.kernels.session_settings import SessionSettings

#: Weights of more than this stay inputs of the session, which would copy them to make them its own [B].
_OWN_MOST = 2**30
#: Option of a session: where the files are that a model without a file of its own refers to.
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"


class GraphSession:
    """A whole graph in one session."""

    def __init__(self, graph: Graph, session: Any, given: Dtypes, wanted: Dtypes) -> None:
        self.graph = graph
        self._session = session
        self._given, self._wanted = given, wanted
        self._inputs = tuple(entry.name for entry in session.get_inputs())

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name."""
        feeds = {
            name: inputs[name].astype(self._given[name]) if name in self._given else feed_of(inputs[name])
            for name in self._inputs
        }
        values = self._session.run(list(self.graph.outputs), feeds)
        found = dict(zip(self.graph.outputs, values, strict=True))
        return {**found, **{name: found[name].astype(dtype) for name, dtype in self._wanted.items()}}


def open_graph(
    graph: Graph,
    constants: Mapping[str, Any],
    settings: SessionSettings,
    execution: ExecutionProvider | None = None,
    types: Mapping[str, onnx.TypeProto] | None = None,
) -> GraphSession | str:
    """Return a session for a whole graph, or the reason why there is none.

    Parameters
    ----------
    graph : Graph
    constants : mapping of str to array
        Those that are inputs of the graph.
    settings : SessionSettings
    execution : ExecutionProvider, optional
        Computes what it can of the graph: the CPU's if left out.
    types : mapping of str to TypeProto, optional
        Of inputs of which the graph does not tell it.
    """
    if execution is not None and execution[0] not in onnxruntime.get_available_providers():
        return f"this onnxruntime has no {execution[0]}"
    options = session_options(settings)
    whole = graph
    # A device has its copy anyway, and would get another one in every run.
    if execution is not None or _copied_nbytes(constants) <= _OWN_MOST:
        sources = [
            replace(source, value=constants[source.name]) if source.name in constants else source
            for source in graph.sources
        ]
        whole = replace(graph, sources=tuple(sources))
    try:
        model = name_omitted_outputs(to_onnx(whole))
        for entry in model.graph.input:
            if types and entry.name in types:
                entry.type.CopyFrom(types[entry.name])
        given, wanted = with_stand_ins(model)
        session = _open(model, whole, options, execution)
    except (*OPEN_ERRORS, ValueError, TypeError, KeyError) as error:
        return str(error)
    if execution is not None and session.get_providers()[0] != execution[0]:
        return f"{execution[0]} cannot be loaded here"  # a library of CUDA's is missing, say
    types_there = [entry.type for entry in (*session.get_inputs(), *session.get_outputs())]
    strange = list(filter(NOT_NUMPY.search, types_there))
    return f"values of type {', '.join(strange)}" if strange else GraphSession(whole, session, given, wanted)


def _copied_nbytes(constants: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in constants.values() if in_file(value) is None)


def _refer_to_files(tensors: Sequence[onnx.TensorProto], graph: Graph, options: Any) -> set[str]:
    """Let onnxruntime read weights from the file that they are mapped from, as it does by itself.

    Their names are returned. So the weights are in memory once, and onnxruntime may arrange them as it likes.
    """
    files = {tensor.name: in_file(graph.constants[tensor.name]) for tensor in tensors}
    folders = {os.path.dirname(file.path) for file in files.values() if file is not None}
    if len(folders) != 1:
        return set()  # onnxruntime reads from one folder
    options.add_session_config_entry(_FOLDER_OF_WEIGHTS, folders.pop())
    for tensor in tensors:
        file = files[tensor.name]
        if file is not None:
            del tensor.external_data[:]
            nbytes = math.prod(file.shape) * file.dtype.itemsize
            facts = {"location": os.path.basename(file.path), "offset": file.offset, "length": nbytes}
            for key, value in facts.items():
                tensor.external_data.add(key=key, value=str(value))
    return {name for name, file in files.items() if file is not None}


def _open(model: onnx.ModelProto, graph: Graph, options: Any, execution: ExecutionProvider | None) -> Any:
    away = [entry for entry in model.graph.initializer if entry.data_location == onnx.TensorProto.EXTERNAL]
    in_files = _refer_to_files(away, graph, options)
    large = {
        entry.name: np.ascontiguousarray(graph.constants[entry.name])
        for entry in away
        if entry.name not in in_files
    }
    options.add_external_initializers(
        list(large), [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in large.values()]
    )
    providers = [*([execution] if execution else []), CPU]
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
