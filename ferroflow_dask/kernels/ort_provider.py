"""ONNX's operators as onnxruntime has them: a session for each op and combination of dtypes.

The sessions of ops run on the calling thread alone: parallelism is Dask's, between ops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _state

from ferroflow_dask.graph import custom_ops
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op
from ferroflow_dask.graph.protos import node_from_op
from ferroflow_dask.kernels.deviations import check_operands, deviations, differs
from ferroflow_dask.kernels.op_model import (
    DRAWN,
    IR_VERSION,
    declared_opset,
    has_subgraph,
    is_seeded,
    name_omitted_outputs,
    one_node_model,
)
from ferroflow_dask.kernels.ort_values import (
    CPU,
    NOT_NUMPY,
    OPEN_ERRORS,
    RUN_ERRORS,
    feed_of,
    session_options,
    tensor_type,
)
from ferroflow_dask.kernels.provider import DeclinedError, Kernel, opset_version
from ferroflow_dask.kernels.session_settings import SessionSettings

#: Of an operand: its dtype, its rank where that matters, and whether it is a list of such.
_Type = tuple[np.dtype[Any], int | None, bool]

#: What ops that share a session may read, and the types of ONNX that they may name.
_PLAIN = frozenset(map(np.dtype, "?bhilqBHILQfd"))
_PLAIN_TYPES = frozenset(onnx.helper.np_dtype_to_tensor_dtype(dtype) for dtype in _PLAIN)

#: Ops of other providers whose results have the same bits.
_SAME_ELSEWHERE = frozenset(("Add", "Relu"))

#: Ops that share a session with none: operands are checked, types follow operands, numbers are drawn.
_ALONE = frozenset(("Gemm", "Unique", "CastLike", *DRAWN))


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
        if (op.domain, op.op_type) in self._own:
            return True
        if onnx.defs.has(op.op_type, opset_version(op, opsets), op.domain):
            return True
        # Of operators in libraries, only a session tells whether they exist.
        return op.domain not in ("", FERROFLOW_DOMAIN) and bool(custom_ops.libraries())

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
        feeds = {name: feed_of(value) for name, value in zip(self._names, values, strict=True) if name}
        if self._has_rules and not any(isinstance(feed, list) for feed in feeds.values()):
            check_operands(self._op, feeds)
        session = self._session(feeds)
        try:
            found = iter(session.run(self._wanted, feeds))
        except RUN_ERRORS as error:
            # Some valid inputs are refused only here: zero points per channel, empty sets of booleans, ….
            raise DeclinedError(str(error), failed=True) from error
        return tuple(next(found) if value else None for value in self._op.outputs)

    def _session(self, feeds: Mapping[str, Any]) -> Any:
        # What ops of a sub-graph make of their operands depends on ranks, too.
        types = {
            name: (feed[0].dtype, None, True)
            if isinstance(feed, list)
            else (feed.dtype, feed.ndim if self._has_subgraph else None, False)
            for name, feed in feeds.items()
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
        declared = {name: tensor_type(dtype, ndim) for name, (dtype, ndim, _) in types.items()}
        for name, (_, _, is_list) in types.items():
            if is_list:
                declared[name] = onnx.helper.make_sequence_type_proto(declared[name])
        # Some operators are functions, which onnxruntime writes in the operators of the declared version.
        versions = (declared_opset(self._op, self._opsets), opset_version(self._op, self._opsets))
        models = [one_node_model(self._op, self._opsets, declared, v) for v in dict.fromkeys(versions)]
        if self._has_rules and self._has_subgraph and (found := deviations(models[0])):
            return "; ".join(found.values())
        session = _open_first(models)
        if isinstance(session, str):
            return session
        strange = [output.type for output in session.get_outputs() if NOT_NUMPY.search(output.type)]
        return f"results of type {', '.join(strange)}" if strange else session


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
        Of what they read of others: types, and how many axes. By these, `deviations` tells what to leave out.
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
            [onnx.ValueInfoProto(name=name, type=tensor_type(*entry)) for name, entry in inputs.items()],
            [onnx.ValueInfoProto(name=name) for name in outputs],
        ),
        opset_imports=[onnx.helper.make_opsetid("", version)],
        ir_version=IR_VERSION,
    )
    if deviations(model):
        return None
    try:
        session = _open_plainly(model)
    except OPEN_ERRORS:
        return None
    if any(NOT_NUMPY.search(o.type) or not o.type.startswith("tensor") for o in session.get_outputs()):
        return None
    wanted = list(outputs)

    def compute(values: Sequence[Any]) -> list[Any]:
        found: list[Any] = session.run(wanted, dict(zip(names, map(np.asarray, values), strict=True)))
        return found

    return compute


def _open_first(models: Sequence[onnx.ModelProto]) -> Any:
    """Return the session of the first model that opens, or the reason why the first one does not."""
    reason = ""
    for model in models:
        try:
            return _open_plainly(model)
        except OPEN_ERRORS as error:
            reason = reason or str(error)
    return reason


def _open_plainly(model: onnx.ModelProto) -> Any:
    """Return a session on the calling thread that computes each op by itself, one after another.

    What is fused, folded or packed beforehand gives other results in the last places, and it would depend
    on which ops share the session.
    """
    options = session_options(SessionSettings(1))
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    # An arena keeps the largest memory a session ever needed, and there are hundreds of sessions.
    options.enable_cpu_mem_arena = False
    serialized = name_omitted_outputs(model).SerializeToString()
    return onnxruntime.InferenceSession(serialized, options, providers=[CPU])
