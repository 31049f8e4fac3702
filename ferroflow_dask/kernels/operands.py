"""Which operands ONNX allows together, where it says so by types alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.provider import opset_version


def mixed_types(op: Op, opsets: Mapping[str, int], values: Sequence[Any]) -> str:
    """Return what is wrong where operands that must be of one type are of two; nothing if all is well.

    Parameters
    ----------
    op : Op
    opsets : mapping of str to int
        Versions of the graph that the op comes from.
    values : sequence
        Of the op's inputs; what comes behind them is not looked at, nor is what is no tensor.
    """
    version = opset_version(op, opsets)
    if not onnx.defs.has(op.op_type, version, op.domain):
        return ""
    declared = onnx.defs.get_schema(op.op_type, version, op.domain).inputs
    first: dict[str, tuple[str, np.dtype[Any]]] = {}
    for i, value in enumerate(values[: len(op.inputs)]):
        dtype = getattr(value, "dtype", None)
        # The last parameter may stand for any number of operands.
        parameter = declared[min(i, len(declared) - 1)] if declared else None
        if parameter is None or dtype is None or not parameter.is_homogeneous:
            continue
        if dtype.kind in "SU":  # strings, as objects are
            dtype = np.dtype(object)
        name, expected = first.setdefault(parameter.type_str, (parameter.name, dtype))
        if dtype != expected:
            return f"ONNX takes one type for {name} and {parameter.name}, these are {expected} and {dtype}"
    return ""
