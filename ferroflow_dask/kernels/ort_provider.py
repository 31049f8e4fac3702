"""ONNX's operators as onnxruntime has them: a session for each op and combination of dtypes, or for a graph.

The sessions of ops run on the calling thread alone: parallelism is Dask's, between ops.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _state

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.graph.protos import node_from_op
from ferroflow_dask.graph.to_onnx import to_onnx
from ferroflow_dask.kernels.deviations import check_operands, deviation, differs
from ferroflow_dask.kernels.op_model import (
    DRAWN,
    IR_VERSION,
    declared_opset,
    has_subgraph,
    is_seeded,
    name_omitted_outputs,
    one_node_model,
)
from ferroflow_dask.kernels.provider import DeclinedError, ExecutionProvider, Kernel, opset_version

_CPU = "CPUExecutionProvider"

#: Weights of more than this stay inputs of the session, which would copy them to make them its own [B].
_OWN_MOST = 2**30

#: Only fatal messages: what else goes wrong is raised, or declined and done by another provider.
_LOG_FATAL = 4


_RUN_ERRORS = (_state.NotImplemented, _state.Fail, _state.RuntimeException, _state.InvalidArgument)

#: Whatever it objects to in a model without values: an operator, a type or an opset that it lacks.
_OPEN_ERRORS = (*_RUN_ERRORS, _state.InvalidGraph, _state.InvalidProtobuf, RuntimeError)

#: What it takes for an input; objects are strings. bfloat16 and smaller types (ml_dtypes) are not in it.
_DTYPES = frozenset(map(np.dtype, "?bhilqBHILQefdO"))

#: Of an operand: its dtype, and its rank where that matters.
_Type = tuple[np.dtype[Any], int | None]

#: What ops that share a session may read, and the types of ONNX that they may name.
_PLAIN = frozenset(map(np.dtype, "?bhilqBHILQfd"))
_PLAIN_TYPES = frozenset(onnx.helper.np_dtype_to_tensor_dtype(dtype) for dtype in _PLAIN)

#: Ops of other providers whose results have the same bits.
_SAME_ELSEWHERE = frozenset(("Add", "Relu"))

#: Ops that share a session with none: operands are checked, types follow operands, numbers are drawn.
_ALONE = frozenset(("Gemm", "Unique", "CastLike", *DRAWN))

#: Results that the Python interface refuses, or hands out as raw bytes (8-bit floats become uint8).
_NOT_NUMPY = re.compile(r"bfloat16|float8|float4|int4|int2")


class OnnxRuntimeProvider:
    """onnxruntime's CPU kernels.

    Parameters
    ----------
    has_rules : bool, optional
        Whether it declines what it does not compute as ONNX describes.
    """

    name = "onnxruntime"

    def __init__(self, has_rules: bool = True) -> None:
        self._has_rules = has_rules
        schemas: list[Any] = getattr(_state, "get_all_operator_schema", list)()
        self._own = frozenset((s.domain, s.name) for s in schemas)

    def supports(self, op: Op, opsets: Mapping[str, int]) -> bool:
        """Return whether the operator exists; for some types there may be no kernel all the same."""
        if self._has_rules and differs(op):
            return False
        is_known = (op.domain, op.op_type) in self._own
        return is_known or onnx.defs.has(op.op_type, opset_version(op, opsets), op.domain)

    def compile(self, op: Op, opsets: Mapping[str, int]) -> Kernel:
        """Return a kernel that opens a session when it first meets a combination of dtypes."""
        return _SessionKernel(op, opsets, self._has_rules)


class _SessionKernel:
    def __init__(self, op: Op, opsets: Mapping[str, int], has_rules: bool) -> None:
        self._op = op
        self._has_rules = has_rules
        self._opsets = dict(opsets)
        self._names = op.inputs + op.captured
        self._wanted = [value for value in op.outputs if value]
        self._has_subgraph = has_subgraph(op)
        self._is_seeded = is_seeded(op)
        self._sessions: dict[tuple[_Type, ...], Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        feeds = {name: _tensor(value) for name, value in zip(self._names, values, strict=True) if name}
        if self._has_rules:
            check_operands(self._op, feeds)
        session = self._session(feeds)
        try:
            found = iter(session.run(self._wanted, feeds))
        except _RUN_ERRORS as error:
            # Some valid inputs are refused only here: zero points per channel, empty sets of booleans, ….
            raise DeclinedError(str(error), failed=True) from error
        return tuple(next(found) if value else None for value in self._op.outputs)

    def _session(self, feeds: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> Any:
        # What ops of a sub-graph make of their operands depends on ranks, too.
        types = {
            name: (array.dtype, array.ndim if self._has_subgraph else None) for name, array in feeds.items()
        }
        key = tuple(types.values())
        with self._lock:
            session = self._sessions.get(key)
            if session is None:
                session = self._open(types)
                # The next run of a session would draw other numbers.
                if isinstance(session, str) or not self._is_seeded:
                    self._sessions[key] = session
        if isinstance(session, str):
            raise DeclinedError(session)
        return session

    def _open(self, types: Mapping[str, _Type]) -> Any:
        """Return a session, or the reason why there is none."""
        declared = {name: _tensor_type(*entry) for name, entry in types.items()}
        model = one_node_model(self._op, self._opsets, declared, declared_opset(self._op, self._opsets))
        if self._has_rules and self._has_subgraph and (other := deviation(model)):
            return _not_onnx(other)
        try:
            session = _open_plainly(model)
        except _OPEN_ERRORS as error:
            return str(error)
        strange = [output.type for output in session.get_outputs() if _NOT_NUMPY.search(output.type)]
        return f"results of type {', '.join(strange)}" if strange else session


def _not_onnx(kind: str) -> str:
    return f"{kind} is not what ONNX describes"


def may_join(op: Op, provider: str) -> bool:
    """Return whether an op, computed by a provider so far, may share a session with its neighbours.

    Not those whose values could be checked or converted between two ops only: half precision, which
    onnxruntime computes in single precision and then rounds less often, `Gemm`'s vectors, axes of `Squeeze`.
    """
    if provider != OnnxRuntimeProvider.name and op.op_type not in _SAME_ELSEWHERE:
        return False
    if op.domain or op.captured or op.op_type in _ALONE or (op.op_type == "Squeeze" and len(op.inputs) > 1):
        return False
    types = [op.attributes[name] for name in ("to", "dtype", "output_dtype") if name in op.attributes]
    plain = all(element in _PLAIN_TYPES for element in types)
    return plain and all(_is_plain(value) for value in op.attributes.values())


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype in _PLAIN
    items = value if isinstance(value, list | tuple) else (value,)
    return all(isinstance(item, bool | int | float | str | bytes) for item in items)


def open_segment(
    ops: Sequence[Op],
    opsets: Mapping[str, int],
    inputs: Mapping[str, tuple[np.dtype[Any], int]],
    outputs: Sequence[str],
) -> Callable[[Sequence[Any]], list[Any]] | None:
    """Return what computes some ops as their own sessions would, bit by bit; None where there is none.

    Parameters
    ----------
    ops : sequence of Op
        In an order in which they can run; all `may_join`.
    opsets : mapping of str to int
        Versions of the graph that they come from.
    inputs : mapping of str to (dtype, int)
        Of what they read of others: types, and how many axes. By these, `deviation` tells what to leave out.
    outputs : sequence of str
        The values that are wanted.
    """
    if not all(dtype in _PLAIN for dtype, _ in inputs.values()):
        return None
    version = opset_version(ops[0], opsets)
    names = list(inputs)
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node_from_op(op, version) for op in ops],
            "segment",
            [onnx.ValueInfoProto(name=name, type=_tensor_type(*entry)) for name, entry in inputs.items()],
            [onnx.ValueInfoProto(name=name) for name in outputs],
        ),
        opset_imports=[onnx.helper.make_opsetid("", version)],
        ir_version=IR_VERSION,
    )
    if deviation(model):
        return None
    try:
        session = _open_plainly(model)
    except _OPEN_ERRORS:
        return None
    if any(_NOT_NUMPY.search(o.type) or not o.type.startswith("tensor") for o in session.get_outputs()):
        return None
    wanted = list(outputs)

    def compute(values: Sequence[Any]) -> list[Any]:
        found: list[Any] = session.run(wanted, dict(zip(names, map(np.asarray, values), strict=True)))
        return found

    return compute


def _open_plainly(model: onnx.ModelProto) -> Any:
    """Return a session on the calling thread that computes each op by itself, one after another.

    What is fused, folded or packed beforehand gives other results in the last places, and it would depend
    on which ops share the session.
    """
    options = _options(1)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    # An arena keeps the largest memory a session ever needed, and there are hundreds of sessions.
    options.enable_cpu_mem_arena = False
    serialized = name_omitted_outputs(model).SerializeToString()
    return onnxruntime.InferenceSession(serialized, options, providers=[_CPU])


def _tensor_type(dtype: np.dtype[Any], ndim: int | None = None) -> onnx.TypeProto:
    shape = None if ndim is None else [None] * ndim
    return onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(dtype), shape)


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


def open_graph(
    graph: Graph,
    constants: Mapping[str, Any],
    n_threads: int,
    execution: ExecutionProvider | None = None,
) -> _GraphSession | str:
    """Return a session for a whole graph, or the reason why there is none.

    Parameters
    ----------
    graph : Graph
    constants : mapping of str to array
        Those that are inputs of the graph.
    n_threads : int
        Threads that one run may use.
    execution : ExecutionProvider, optional
        Computes what it can of the graph: the CPU's if left out.
    """
    if execution is not None and execution[0] not in onnxruntime.get_available_providers():
        return f"this onnxruntime has no {execution[0]}"
    if other := next((op.kind for op in graph.live_ops if differs(op)), ""):
        return _not_onnx(other)
    if seeded := next((op.kind for op in graph.live_ops if is_seeded(op)), ""):
        return f"{seeded} has a seed, and would yield other numbers in each run"
    whole = graph
    # A device has its copy anyway, and would get another one in every run.
    if execution is not None or sum(value.nbytes for value in constants.values()) <= _OWN_MOST:
        sources = [
            replace(source, value=constants[source.name]) if source.name in constants else source
            for source in graph.sources
        ]
        whole = replace(graph, sources=tuple(sources))
    try:
        model = name_omitted_outputs(to_onnx(whole))
        if other := deviation(model, {**graph.constants, **constants}):
            return _not_onnx(other)
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
            model.SerializeToString(), options, providers=[*([execution] if execution else []), _CPU]
        )
    except (*_OPEN_ERRORS, ValueError, TypeError, KeyError) as error:
        return str(error)
    if execution is not None and session.get_providers()[0] != execution[0]:
        return f"{execution[0]} cannot be loaded here"  # a library of CUDA's is missing, say
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
