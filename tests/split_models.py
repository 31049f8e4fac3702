"""Models that tests split into parts."""

from __future__ import annotations

import numpy as np

from ferroflow_dask.graph import Builder, Graph, generate_graph


def mlp() -> Graph:
    rng = np.random.default_rng(0)
    b = Builder("mlp")
    x = b.input("x", np.float32, (12, 16))
    for n in (32, 24, 8):
        weight = b.constant(rng.standard_normal((b._specs[x].shape[-1], n), dtype=np.float32) / 4)
        x = b.op("Relu", b.op("Gemm", x, weight, b.constant(rng.standard_normal(n, dtype=np.float32))))
    b.output(y=b.op("Softmax", x))
    return b.to_graph()


def cnn() -> Graph:
    rng = np.random.default_rng(0)
    b = Builder("cnn")
    x = b.input("x", np.float32, (2, 3, 17, 19))
    for m, stride in ((6, 2), (8, 1)):
        weight = b.constant(rng.standard_normal((m, b._specs[x].shape[1], 3, 3), dtype=np.float32) / 5)
        left = b.op("Relu", b.op("Conv", x, weight, pads=[1, 1, 1, 1], strides=[stride, stride]))
        x = b.op("Add", left, b.op("MaxPool", left, kernel_shape=[3, 3], pads=[1, 1, 1, 1]))
    x = b.op("Flatten", b.op("GlobalAveragePool", x))
    b.output(y=b.op("Gemm", x, b.constant(rng.standard_normal((8, 5), dtype=np.float32))))
    return b.to_graph()


def block(seq: int = 12, d: int = 16, n_heads: int = 4) -> Graph:
    """Return a transformer block of ONNX's operators."""
    rng = np.random.default_rng(0)
    b = Builder("block")
    x = b.input("x", np.float32, (2, seq, d))

    def weight(*shape: int) -> str:
        return b.constant(rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[0])))

    def numbers(*n: int) -> str:
        return b.constant(np.array(n, np.int64))

    def norm(value: str) -> str:
        return b.op("LayerNormalization", value, weight(d), weight(d))

    def by_head(value: str, *perm: int) -> str:
        split = b.op("Reshape", value, numbers(2, seq, n_heads, d // n_heads))
        return b.op("Transpose", split, perm=list(perm))

    normed = norm(x)
    q, k, v = (b.op("Add", b.op("MatMul", normed, weight(d, d)), weight(d)) for _ in range(3))
    scores = b.op("MatMul", by_head(q, 0, 2, 1, 3), by_head(k, 0, 2, 3, 1))
    mixed = b.op("MatMul", b.op("Softmax", scores), by_head(v, 0, 2, 1, 3))
    merged = b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), numbers(2, seq, d))
    x = b.op("Add", x, b.op("MatMul", merged, weight(d, d)))
    hidden = b.op("Gelu", b.op("MatMul", norm(x), weight(d, 4 * d)))
    b.output(y=b.op("Add", x, b.op("MatMul", hidden, weight(4 * d, d))))
    return b.to_graph()


MODELS = {
    "mlp": mlp(),
    "cnn": cnn(),
    "block": block(),
    "transformer": generate_graph("transformer", seq_len=8, d_model=16, n_heads=4),
}
