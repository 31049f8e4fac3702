"""Products of matrices: ONNX's, and the two operators of our own domain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op
from ferroflow_dask.kernels.array.operator import FLOATS, WIDE_NUMBERS, Operator, of_values, text


def _layer_norm(op: Op, x: Any) -> Any:
    """Normalise the last axis of (…, n) (ONNX LayerNormalization, opset 17, scale 1 and no bias).

    Half precision is normalised in single, as ONNX does (`stash_type` 1).
    """
    wide = x.astype(np.float32) if x.dtype == np.float16 else x
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    epsilon = wide.dtype.type(op.attributes.get("epsilon", 1e-5))
    return (centred / np.sqrt(variance + epsilon)).astype(x.dtype, copy=False)


def _split_heads(x: Any, heads: int) -> Any:
    """Turn (seq, d) into (heads, seq, d / heads)."""
    seq, d = x.shape
    if d % heads:
        raise ValueError(f"{d} columns cannot be shared evenly by {heads} heads")
    return x.reshape(seq, heads, d // heads).transpose(1, 0, 2)


def _head_matmul(op: Op, a: Any, b: Any) -> Any:
    """Multiply per attention head (Vaswani et al., "Attention Is All You Need", 2017, without scaling).

    With `trans_b`: (seq, d) and (seq2, d) to scores (heads, seq, seq2).
    Without: scores (heads, seq, seq2) and (seq2, d) to (seq, d), heads side by side.
    """
    heads = int(op.attributes["heads"])
    right = _split_heads(b, heads)
    if op.attributes.get("trans_b", 0):
        return np.matmul(_split_heads(a, heads), right.transpose(0, 2, 1))
    if a.shape[0] != heads:
        raise ValueError(f"scores of {a.shape[0]} heads, where the attribute says {heads}")
    mixed = np.matmul(a, right)
    return mixed.transpose(1, 0, 2).reshape(a.shape[1], math.prod(b.shape[1:]))


def _gemm(op: Op, a: Any, b: Any, c: Any = None) -> Any:
    """Return alpha A B + beta C, matrices transposed on demand (ONNX Gemm, opset 7 on)."""
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError("Gemm takes matrices")
    return gemm(op, a, b, c)


def gemm(op: Op, a: Any, b: Any, c: Any = None, *, multiply: Callable[[Any, Any], Any] = np.matmul) -> Any:
    """Return what Gemm does, of matrices or of stacks of them (n, …, …); `multiply` takes A and B."""
    alpha, beta = (op.attributes.get(name, 1.0) for name in ("alpha", "beta"))
    left = _transposed(a) if op.attributes.get("transA", 0) else a
    right = _transposed(b) if op.attributes.get("transB", 0) else b
    product = multiply(left, right)
    if alpha != 1:
        product = product * a.dtype.type(alpha)
    if c is not None and np.broadcast_shapes(c.shape, product.shape) != product.shape:
        raise ValueError(f"C of shape {c.shape} does not broadcast to {product.shape}")
    if c is None or not beta:  # as in BLAS, C is not read then: it may hold NaN
        return product
    return product + (c if beta == 1 else c * a.dtype.type(beta))


def _transposed(x: Any) -> Any:
    return x.transpose(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)


def _einsum(op: Op, *values: Any) -> Any:
    """Sum products by an equation of indices (ONNX Einsum, opset 12)."""
    return np.einsum(text(op, "equation", "").replace(" ", ""), *values)


OPERATORS = (
    # On NumPy, sessions of onnxruntime gain nothing over a bare product: those are asked first.
    Operator("MatMul", (1, 9, 13), of_values(np.matmul), WIDE_NUMBERS, is_first=True),
    Operator("LayerNorm", (1,), _layer_norm, FLOATS, is_first=True, domain=FERROFLOW_DOMAIN),
    Operator("MatMul", (1,), _head_matmul, FLOATS, is_first=True, domain=FERROFLOW_DOMAIN),
    Operator("Gemm", (7, 9, 11, 13), _gemm, FLOATS),
    Operator("Einsum", (12, 28), _einsum, WIDE_NUMBERS),
)
