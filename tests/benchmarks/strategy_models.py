"""Models whose operators a strategy can split: transformers of one sequence, a CNN for one large image."""

from __future__ import annotations

import numpy as np

from ferroflow_dask.graph import Builder, Graph


def transformer(n_layers: int = 1, seq_len: int = 512, d_model: int = 1024, n_heads: int = 16) -> Graph:
    """Return transformer blocks of ONNX's operators, for one sequence."""
    rng = np.random.default_rng(0)
    b = Builder(f"transformer of {n_layers}")

    def weight(*shape: int) -> str:
        numbers = rng.standard_normal(shape, dtype=np.float32)
        added: str = b.constant(numbers / np.float32(np.sqrt(shape[0])))
        return added

    def numbers(*n: int) -> str:
        added: str = b.constant(np.array(n, np.int64))
        return added

    def by_head(value: str, *perm: int) -> str:
        split = b.op("Reshape", value, numbers(1, seq_len, n_heads, d_model // n_heads))
        added: str = b.op("Transpose", split, perm=list(perm))
        return added

    def norm(value: str) -> str:
        ones = b.constant(np.ones(d_model, np.float32))
        added: str = b.op("LayerNormalization", value, ones, b.constant(np.zeros(d_model, np.float32)))
        return added

    scale = b.constant(np.array((d_model // n_heads) ** -0.5, np.float32))
    x = b.input("x", np.float32, (1, seq_len, d_model))
    for _ in range(n_layers):
        normed = norm(x)
        q, k, v = (b.op("MatMul", normed, weight(d_model, d_model)) for _ in range(3))
        scores = b.op("MatMul", by_head(b.op("Mul", q, scale), 0, 2, 1, 3), by_head(k, 0, 2, 3, 1))
        mixed = b.op("MatMul", b.op("Softmax", scores), by_head(v, 0, 2, 1, 3))
        merged = b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), numbers(1, seq_len, d_model))
        x = b.op("Add", x, b.op("MatMul", merged, weight(d_model, d_model)))
        hidden = b.op("Relu", b.op("MatMul", norm(x), weight(d_model, 4 * d_model)))
        x = b.op("Add", x, b.op("MatMul", hidden, weight(4 * d_model, d_model)))
    b.output(y=x)
    return b.to_graph()


def cnn(size: int = 1024) -> Graph:
    """Return a CNN of nine convolutions for one image of `size` × `size`, with residual connections."""
    rng = np.random.default_rng(0)
    b = Builder("cnn")

    def conv(value: str, n_in: int, n_out: int) -> str:
        kernel = rng.standard_normal((n_out, n_in, 3, 3), dtype=np.float32) / np.float32(3 * np.sqrt(n_in))
        bias = b.constant(np.zeros(n_out, np.float32))
        added: str = b.op("Conv", value, b.constant(kernel), bias, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        return added

    x = b.op("Relu", conv(b.input("x", np.float32, (1, 3, size, size)), 3, 32))
    n = 32
    for n_out in (32, 64, 128, 128):
        inner = b.op("Relu", conv(x, n, n_out))
        x = b.op("Relu", b.op("Add", inner, conv(inner, n_out, n_out)))
        x, n = b.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), n_out
    pooled = b.op("Flatten", b.op("GlobalAveragePool", x))
    b.output(y=b.op("Gemm", pooled, b.constant(rng.standard_normal((n, 100), dtype=np.float32))))
    return b.to_graph()
