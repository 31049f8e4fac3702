"""ONNX's operators as onnxruntime has them: a session for each op and combination of dtypes, or for a graph.

The sessions of ops run on the calling thread alone: parallelism is Dask's, between ops.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _state

from ferroflow_dask.graph.ir import Graph, Op
from ferroflow_dask.graph.to_onnx import to_onnx
from ferroflow_dask.kernels.model import declared_opset, one_node_model
from ferroflow_dask.kernels.provider import DeclinedError, Kernel, opset_version

#: Domain of onnxruntime's own operators, which ONNX has no schemas of.
_CONTRIBUTED = "com.microsoft"

#: Weights of more than this stay inputs of the session, which would copy them to make them its own [B].
_OWN_MOST = 2**30

#: Only fatal messages: what else goes wrong is raised, or declined and done by another provider.
_LOG_FATAL = 4


_RUN_ERRORS = (_state.NotImplemented, _state.Fail, _state.RuntimeException, _state.InvalidArgument)

#: Whatever it objects to in a model without values: an operator, a type or an opset that it lacks.
_OPEN_ERRORS = (*_RUN_ERRORS, _state.InvalidGraph, _state.InvalidProtobuf, RuntimeError)

#: What it takes for an input; objects are strings. bfloat16 and smaller types (ml_dtypes) are not in it.
_DTYPES = frozenset(map(np.dtype, "?bhilqBHILQefdO"))

#: Results that the Python interface refuses, or hands out as raw bytes (8-bit floats become uint8).
_NOT_NUMPY = re.compile(r"bfloat16|float8|float4|int4|int2")


class OnnxRuntimeProvider:
    """onnxruntime's CPU kernels."""

    name = "onnxruntime"

    def __init__(self) -> None:
        schemas: list[Any] = getattr(_state, "get_all_operator_schema", list)()
        self._contributed = frozenset(s.name for s in schemas if s.domain == _CONTRIBUTED)

    def supports(self, op: Op, opsets: Mapping[str, int]) -> bool:
        """Return whether the operator exists; for some types there may be no kernel all the same."""
        if _means_other(op):
            return False
        if op.domain == _CONTRIBUTED:
            return op.op_type in self._contributed
        return onnx.defs.has(op.op_type, opset_version(op, opsets), op.domain)

    def compile(self, op: Op, opsets: Mapping[str, int]) -> Kernel:
        """Return a kernel that opens a session when it first meets a combination of dtypes."""
        return _SessionKernel(op, opsets)


def _means_other(op: Op) -> bool:
    """Return whether onnxruntime's results are not those that ONNX describes; `onnx.reference` has them."""
    if op.domain:
        return False
    match op.op_type:
        case "DFT" | "STFT":
            return True  # errors of 1e-4 where zeros belong
        case "Dropout":
            return len(op.inputs) > 2  # training: another generator of random numbers
        case "MaxUnpool":
            return len(op.inputs) > 2  # takes indices in the shape before padding
        case "Resize":
            # Aligns the rounded, not the exact size.
            return op.attributes.get("coordinate_transformation_mode") in ("align_corners", b"align_corners")
        case "Attention":
            return len(op.outputs) > 3 and bool(op.outputs[3])  # masks the products at another stage
    return False


class _SessionKernel:
    def __init__(self, op: Op, opsets: Mapping[str, int]) -> None:
        self._op = op
        self._opsets = dict(opsets)
        self._names = op.inputs + op.captured
        self._wanted = [value for value in op.outputs if value]
        self._sessions: dict[tuple[np.dtype[Any], ...], Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        feeds = {name: _tensor(value) for name, value in zip(self._names, values, strict=True) if name}
        if self._op.op_type == "Gemm" and any(feeds[name].ndim != 2 for name in self._op.inputs[:2]):
            raise ValueError("Gemm takes matrices")  # where shapes are not declared, vectors would pass
        session = self._session({name: array.dtype for name, array in feeds.items()})
        try:
            found = iter(session.run(self._wanted, feeds))
        except _RUN_ERRORS as error:
            # Some valid inputs are refused only here: zero points per channel, empty sets of booleans, ….
            raise DeclinedError(str(error), failed=True) from error
        return tuple(next(found) if value else None for value in self._op.outputs)

    def _session(self, dtypes: Mapping[str, np.dtype[Any]]) -> Any:
        key = tuple(dtypes.values())
        with self._lock:
            if key not in self._sessions:
                self._sessions[key] = self._open(dtypes)
            session = self._sessions[key]
        if isinstance(session, str):
            raise DeclinedError(session)
        return session

    def _open(self, dtypes: Mapping[str, np.dtype[Any]]) -> Any:
        """Return a session, or the reason why there is none."""
        types = {
            name: onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(dtype), None)
            for name, dtype in dtypes.items()
        }
        model = one_node_model(self._op, self._opsets, types, declared_opset(self._op, self._opsets))
        options = _options(1)
        # An arena keeps the largest memory a session ever needed, and there are hundreds of sessions.
        options.enable_cpu_mem_arena = False
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except _OPEN_ERRORS as error:
            return str(error)
        strange = [output.type for output in session.get_outputs() if _NOT_NUMPY.search(output.type)]
        return f"results of type {', '.join(strange)}" if strange else session


class _GraphSession:
    """A whole graph in one session."""

    def __init__(self, graph: Graph, session: Any) -> None:
        self._graph = graph
        self._session = session
        self._inputs = tuple(entry.name for entry in session.get_inputs())

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name."""
        feeds = {name: _tensor(inputs[name]) for name in self._inputs}
        found = self._session.run(list(self._graph.outputs), feeds)
        return dict(zip(self._graph.outputs, found, strict=True))


def open_graph(graph: Graph, constants: Mapping[str, Any], n_threads: int) -> _GraphSession | str:
    """Return a session for a whole graph, or the reason why there is none.

    Parameters
    ----------
    graph : Graph
    constants : mapping of str to array
        Those that are inputs of the graph.
    n_threads : int
        Threads that one run may use.
    """
    if other := [op.kind for op in graph.live_ops if _means_other(op)]:
        return f"{other[0]} is not what ONNX describes"
    whole = graph
    if sum(value.nbytes for value in constants.values()) <= _OWN_MOST:
        sources = [
            replace(source, value=constants[source.name]) if source.name in constants else source
            for source in graph.sources
        ]
        whole = replace(graph, sources=tuple(sources))
    try:
        model = to_onnx(whole)
        large = {
            entry.name: np.ascontiguousarray(whole.constants[entry.name])
            for entry in model.graph.initializer
            if entry.data_location == onnx.TensorProto.EXTERNAL
        }
        options = _options(n_threads)
        options.add_external_initializers(
            list(large), [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in large.values()]
        )
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except (*_OPEN_ERRORS, ValueError, TypeError, KeyError) as error:
        return str(error)
    strange = [
        entry.type
        for entry in (*session.get_inputs(), *session.get_outputs())
        if _NOT_NUMPY.search(entry.type) or not entry.type.startswith("tensor")
    ]
    return f"values of type {', '.join(strange)}" if strange else _GraphSession(whole, session)


def _options(n_threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = n_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_FATAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _tensor(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the value as an array that onnxruntime's Python interface takes, or decline."""
    if not isinstance(value, np.ndarray | np.generic):
        raise DeclinedError(f"{type(value).__name__} is no tensor")
    array = np.asarray(value)
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype not in _DTYPES:
        raise DeclinedError(f"onnxruntime's Python interface does not take {array.dtype}")
    return array
