"""Kernels of the built-in graphs, written once for every library with NumPy's interface.

Only functions that CuPy's arrays also answer to (`__array_ufunc__`, methods) are called, so the same
source serves both. Values are taken only where NumPy means the same as ONNX; the rest is declined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ferroflow_dask.graph.ir import FERROFLOW_DOMAIN, Op
from ferroflow_dask.kernels.provider import DeclinedError, Kernel, opset_version

_FLOATS = frozenset({"float16", "float32", "float64"})
_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))

_Attributes = Mapping[str, Any]


def _matmul(_: _Attributes, a: Any, b: Any) -> Any:
    """Multiply matrices, batches of them by broadcasting (ONNX MatMul, opset 1 on)."""
    return np.matmul(a, b)


def _relu(_: _Attributes, x: Any) -> Any:
    """Replace what is negative by zero (ONNX Relu, opset 1 on; integers from 14)."""
    return np.maximum(x, x.dtype.type(0))


def _add(_: _Attributes, a: Any, b: Any) -> Any:
    """Add with broadcasting (ONNX Add, opset 7 on; before, an attribute asked for broadcasting)."""
    return np.add(a, b)


def _layer_norm(attributes: _Attributes, x: Any) -> Any:
    """Normalise the last axis of (…, n) (ONNX LayerNormalization, opset 17, scale 1 and no bias).

    Half precision is normalised in single, as ONNX does (`stash_type` 1).
    """
    wide = x.astype(np.float32) if x.dtype == np.float16 else x
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    epsilon = wide.dtype.type(attributes.get("epsilon", 1e-5))
    return (centred / np.sqrt(variance + epsilon)).astype(x.dtype, copy=False)


def _split_heads(x: Any, heads: int) -> Any:
    """Turn (seq, d) into (heads, seq, d / heads)."""
    seq, d = x.shape
    if d % heads:
        raise ValueError(f"{d} columns cannot be shared evenly by {heads} heads")
    return x.reshape(seq, heads, d // heads).transpose(1, 0, 2)


def _head_matmul(attributes: _Attributes, a: Any, b: Any) -> Any:
    """Multiply per attention head (Vaswani et al., "Attention Is All You Need", 2017, without scaling).

    With `trans_b`: (seq, d) and (seq2, d) to scores (heads, seq, seq2).
    Without: scores (heads, seq, seq2) and (seq2, d) to (seq, d), heads side by side.
    """
    heads = int(attributes["heads"])
    right = _split_heads(b, heads)
    if attributes.get("trans_b", 0):
        return np.matmul(_split_heads(a, heads), right.transpose(0, 2, 1))
    if a.shape[0] != heads:
        raise ValueError(f"scores of {a.shape[0]} heads, where the attribute says {heads}")
    mixed = np.matmul(a, right)
    return mixed.transpose(1, 0, 2).reshape(a.shape[1], math.prod(b.shape[1:]))


#: (domain, op_type) → first opset version, the dtypes that it takes, its function
_FUNCTIONS: Mapping[tuple[str, str], tuple[int, frozenset[str], Callable[..., Any]]] = {
    ("", "MatMul"): (1, _FLOATS | {"int32", "int64", "uint32", "uint64"}, _matmul),
    ("", "Relu"): (1, _FLOATS | {"int8", "int16", "int32", "int64"}, _relu),
    ("", "Add"): (7, _FLOATS | _INTEGERS, _add),
    (FERROFLOW_DOMAIN, "LayerNorm"): (1, _FLOATS, _layer_norm),
    (FERROFLOW_DOMAIN, "MatMul"): (1, _FLOATS, _head_matmul),
}


class ArrayProvider:
    """Kernels that are a line or two of array code."""

    name = "array"

    def supports(self, op: Op, opsets: Mapping[str, int]) -> bool:
        """Return whether the op is in the table above, at this opset version."""
        entry = _FUNCTIONS.get((op.domain, op.op_type))
        return entry is not None and opset_version(op, opsets) >= entry[0]

    def host_operands(self, op: Op) -> frozenset[int]:  # noqa: ARG002 -- others read some
        """Return the positions of operands that are read as NumPy arrays wherever the others are."""
        return frozenset()

    def compile(self, op: Op, opsets: Mapping[str, int]) -> Kernel:  # noqa: ARG002 - part of the protocol
        """Return the op's function, guarded by the dtypes that it is right for."""
        _, dtypes, function = _FUNCTIONS[op.domain, op.op_type]
        attributes = dict(op.attributes)

        def kernel(*values: Any) -> tuple[Any, ...]:
            kinds = {str(getattr(value, "dtype", type(value).__name__)) for value in values}
            # Two dtypes would be promoted by NumPy; ONNX does not know such an op.
            if len(kinds) != 1 or not kinds <= dtypes:
                raise DeclinedError(f"{op.op_type} of {', '.join(sorted(kinds))}")
            result = function(attributes, *values)
            # NumPy's functions turn results without axes into scalars.
            return (np.asarray(result) if isinstance(result, np.generic) else result,)

        return kernel
