"""What sessions of onnxruntime have in common: options, errors, and the values that go in and come out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _state

from ferroflow_dask.graph import custom_ops
from ferroflow_dask.kernels.provider import DeclinedError
from ferroflow_dask.kernels.session_settings import SessionSettings

CPU = "CPUExecutionProvider"

#: Only fatal messages: what else goes wrong is raised, or declined and done by another provider.
_LOG_FATAL = 4

RUN_ERRORS = (_state.NotImplemented, _state.Fail, _state.RuntimeException, _state.InvalidArgument)

#: Whatever it objects to in a model without values: an operator, a type or an opset that it lacks.
OPEN_ERRORS = (*RUN_ERRORS, _state.InvalidGraph, _state.InvalidProtobuf, RuntimeError)

#: What it takes for an input; objects are strings. bfloat16 and smaller types (ml_dtypes) are not in it.
_DTYPES = frozenset(map(np.dtype, "?bhilqBHILQefdO"))

#: Results that the Python interface refuses, or hands out as raw bytes (8-bit floats become uint8).
NOT_NUMPY = re.compile(r"bfloat16|float8|float4|int4|int2")


def session_options(settings: SessionSettings) -> Any:
    """Return options of a session that logs nothing, and on one thread runs one op after another."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_FATAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    custom_ops.register(options)
    settings.apply(options)
    return options


def feed_of(value: Any) -> Any:
    """Return a value, or a list of them, as onnxruntime's Python interface takes it, or decline."""
    if isinstance(value, list) and value:
        return list(map(feed_of, value))
    if not isinstance(value, np.ndarray | np.generic):
        raise DeclinedError(f"{type(value).__name__} is no tensor")
    array = np.asarray(value)
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype not in _DTYPES:
        raise DeclinedError(f"onnxruntime's Python interface does not take {array.dtype}")
    return array


def tensor_type(dtype: np.dtype[Any], ndim: int | None = None) -> onnx.TypeProto:
    """Return the type of tensors with unknown dimensions."""
    shape = None if ndim is None else [None] * ndim
    return onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(dtype), shape)


def type_of(value: Any, has_rank: bool = True) -> onnx.TypeProto:
    """Return the type of an array, or of a list of some."""
    if isinstance(value, list):
        return onnx.helper.make_sequence_type_proto(type_of(value[0], has_rank=False))
    dtype = np.dtype(object) if value.dtype.kind == "U" else value.dtype
    return tensor_type(dtype, value.ndim if has_rank else None)
