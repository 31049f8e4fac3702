"""Operators to split, with random shapes, and strategies with random degrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ferroflow_dask.graph import FERROFLOW_DOMAIN, Builder, Graph, TensorSpec
from ferroflow_dask.strategy import Configuration, Strategy, spaces_of

Rng = np.random.Generator


def _numbers(rng: Rng, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape, dtype=np.float32)


def _n(rng: Rng, low: int = 1, high: int = 7) -> int:
    return int(rng.integers(low, high))


def _input(b: Builder, name: str, *shape: int) -> str:
    return b.input(name, np.float32, shape)


def matmul(b: Builder, rng: Rng) -> Any:
    m, k, n = _n(rng), _n(rng), _n(rng)
    stacks = [((), ()), ((3,), ()), ((2, 3), (2, 3)), ((2, 1), (3,)), ((), (4,))]
    left, right = stacks[_n(rng, 0, len(stacks))]
    a: tuple[int, ...] = (*left, m, k) if rng.random() < 0.9 else (k,)
    c: tuple[int, ...] = (*right, k, n) if rng.random() < 0.9 else (k,)
    weight = b.constant(_numbers(rng, *c)) if rng.random() < 0.5 else _input(b, "w", *c)
    return b.op("MatMul", _input(b, "x", *a), weight)


def gemm(b: Builder, rng: Rng) -> Any:
    m, k, n = _n(rng), _n(rng), _n(rng)
    ta, tb = _n(rng, 0, 2), _n(rng, 0, 2)
    a, c = ((k, m) if ta else (m, k)), ((n, k) if tb else (k, n))
    shapes = [(n,), (m, n), (m, 1), (), None]
    bias = shapes[_n(rng, 0, 5)]
    more = () if bias is None else (b.constant(_numbers(rng, *bias)),)
    weight = b.constant(_numbers(rng, *c))
    return b.op("Gemm", _input(b, "x", *a), weight, *more, transA=ta, transB=tb, alpha=0.5, beta=2.0)


def conv(b: Builder, rng: Rng) -> Any:
    group = [1, 1, 2, 3][_n(rng, 0, 4)]
    c, m = group * _n(rng, 1, 4), group * _n(rng, 1, 4)
    rank = _n(rng, 1, 3)
    kernel = [_n(rng, 1, 4) for _ in range(rank)]
    x = _input(b, "x", _n(rng, 1, 4), c, *(_n(rng, 8, 14) for _ in range(rank)))
    w = b.constant(_numbers(rng, m, c // group, *kernel))
    bias = (b.constant(_numbers(rng, m)),) if rng.random() < 0.5 else ()
    pads: dict[str, Any] = {"pads": [_n(rng, 0, k) for k in kernel * 2]}
    if rng.random() < 0.3:
        pads = {"auto_pad": ["SAME_UPPER", "SAME_LOWER", "VALID"][_n(rng, 0, 3)]}
    dilations = {} if "auto_pad" in pads else {"dilations": [_n(rng, 1, 3) for _ in kernel]}
    return b.op(
        "Conv", x, w, *bias, strides=[_n(rng, 1, 4) for _ in kernel], group=group, **pads, **dilations
    )


def conv_transpose(b: Builder, rng: Rng) -> Any:
    x = _input(b, "x", _n(rng), _n(rng), 5, 4)
    w = b.constant(_numbers(rng, b._specs[x].shape[1], _n(rng), 3, 2))
    return b.op("ConvTranspose", x, w, strides=[2, 1])


def pool(b: Builder, rng: Rng) -> Any:
    kernel = [_n(rng, 1, 4), _n(rng, 1, 4)]
    x = _input(b, "x", _n(rng, 1, 4), _n(rng, 1, 4), _n(rng, 8, 14), _n(rng, 8, 14))
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": [_n(rng, 1, 4), _n(rng, 1, 4)]}
    attributes["pads"] = [_n(rng, 0, k) for k in kernel * 2]
    name = ["MaxPool", "AveragePool"][_n(rng, 0, 2)]
    if name == "AveragePool":
        attributes["count_include_pad"] = _n(rng, 0, 2)
    if rng.random() < 0.2:
        attributes["ceil_mode"] = 1
    return b.op(name, x, **attributes)


def global_pool(b: Builder, rng: Rng) -> Any:
    return b.op("GlobalAveragePool", _input(b, "x", _n(rng), _n(rng), _n(rng), _n(rng)))


def elementwise(b: Builder, rng: Rng) -> Any:
    shape = [_n(rng) for _ in range(_n(rng, 1, 5))]
    other = [1 if rng.random() < 0.3 else n for n in shape][_n(rng, 0, len(shape)) :]
    y = b.constant(_numbers(rng, *other)) if rng.random() < 0.5 else _input(b, "y", *other)
    values = [_input(b, "x", *shape), y]
    return b.op(["Add", "Mul", "Max", "Sub"][_n(rng, 0, 4)], *values[:: [-1, 1][_n(rng, 0, 2)]])


def unary(b: Builder, rng: Rng) -> Any:
    x = _input(b, "x", *(_n(rng) for _ in range(_n(rng, 0, 4))))
    if rng.random() < 0.3:
        return b.op("Clip", x, b.constant(np.float32(-0.5)), b.constant(np.float32(0.5)))
    return b.op(["Relu", "Tanh", "Erf", "Sigmoid", "Dropout"][_n(rng, 0, 5)], x)


def where(b: Builder, rng: Rng) -> Any:
    n, m = _n(rng), _n(rng)
    mask = b.constant(rng.integers(0, 2, (n, 1)).astype(bool))
    return b.op("Where", mask, _input(b, "x", n, m), b.constant(np.float32(0)))


def normalization(b: Builder, rng: Rng) -> Any:
    n, c, h = _n(rng), _n(rng), _n(rng, 2)
    x = _input(b, "x", n, c, h)
    weights = [b.constant(np.abs(_numbers(rng, c)) + 0.5) for _ in range(4)]
    kind = _n(rng, 0, 6)
    if kind == 0:
        return b.op("BatchNormalization", x, *weights)
    if kind == 1:
        return b.op("InstanceNormalization", x, *weights[:2])
    if kind == 2:
        return b.op("LRN", x, size=3)
    if kind == 3:
        spec = TensorSpec.of(np.float32, (n, c, h))
        return b.op("LayerNorm", x, domain=FERROFLOW_DOMAIN, spec=spec, epsilon=1e-5)
    scale = b.constant(_numbers(rng, h))
    return b.op("LayerNormalization", x, scale, scale, outputs=[1, 3][kind % 2], axis=-1)


def softmax(b: Builder, rng: Rng) -> Any:
    shape = [_n(rng) for _ in range(_n(rng, 1, 4))]
    axis = _n(rng, -len(shape), len(shape))
    return b.op(["Softmax", "LogSoftmax"][_n(rng, 0, 2)], _input(b, "x", *shape), axis=axis)


def reduction(b: Builder, rng: Rng) -> Any:
    shape = [_n(rng) for _ in range(_n(rng, 1, 4))]
    x, is_kept = _input(b, "x", *shape), _n(rng, 0, 2)
    if rng.random() < 0.2:
        return b.op("ArgMax", x, axis=_n(rng, -len(shape), len(shape)), keepdims=is_kept)
    name = ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceL2", "ReduceProd"][_n(rng, 0, 6)]
    axes = sorted(rng.choice(len(shape), _n(rng, 1, len(shape) + 1), replace=False).tolist())
    more = () if rng.random() < 0.2 else (b.constant(np.array(axes, np.int64)),)
    return b.op(name, x, *more, keepdims=is_kept)


def reshape(b: Builder, rng: Rng) -> Any:
    n, h, d = _n(rng), _n(rng), _n(rng)
    cases = [
        ((n, h * d), (n, h, d)),
        ((n, h, d), (n, h * d)),
        ((n * h, d), (n, h * d)),
        ((1, n, h), (n, 1, h)),
        ((n, h, d), (-1, d)),
        ((6 * n, 4), (4, 6 * n)),
        ((n, h), (1, n * h, 1)),
    ]
    before, after = cases[_n(rng, 0, len(cases))]
    return b.op("Reshape", _input(b, "x", *before), b.constant(np.array(after, np.int64)))


def layout(b: Builder, rng: Rng) -> Any:
    n, h, d = _n(rng), _n(rng), _n(rng, 2)
    x = _input(b, "x", n, h, d)
    kind = _n(rng, 0, 10)
    if kind == 0:
        return b.op("Transpose", x, perm=rng.permutation(3).tolist())
    if kind == 1:
        return b.op("Concat", x, _input(b, "y", n, 2, d), axis=-2)
    if kind == 2:
        return b.op("Split", x, b.constant(np.array([1, d - 1], np.int64)), axis=2, outputs=2)
    if kind == 3:
        numbers = (b.constant(np.array([v], np.int64)) for v in (1, 9, 2))
        return b.op("Slice", x, *numbers)
    if kind == 4:
        return b.op("Pad", x, b.constant(np.array([0, 1, 0, 0, 2, 0], np.int64)))
    if kind == 5:
        return b.op("Flatten", x, axis=_n(rng, 0, 4))
    if kind == 6:
        return b.op("Unsqueeze", x, b.constant(np.array([1], np.int64)))
    if kind == 7:
        return b.op("Squeeze", _input(b, "z", n, 1, d), b.constant(np.array([1], np.int64)))
    if kind == 8:
        return b.op("Expand", _input(b, "z", n, 1, d), b.constant(np.array([2, n, h, d], np.int64)))
    return b.op("Tile", x, b.constant(np.array([1, 2, 1], np.int64)))


def gather(b: Builder, rng: Rng) -> Any:
    shape = [_n(rng) for _ in range(_n(rng, 1, 4))]
    axis = _n(rng, 0, len(shape))
    indices = rng.integers(0, shape[axis], [_n(rng) for _ in range(_n(rng, 0, 3))])
    table = b.constant(_numbers(rng, *shape)) if rng.random() < 0.5 else _input(b, "x", *shape)
    if rng.random() < 0.3:
        few = rng.integers(0, shape[axis], [max(1, n - 1) for n in shape])
        return b.op("GatherElements", table, b.constant(few), axis=axis)
    return b.op("Gather", table, b.constant(np.asarray(indices)), axis=axis)


def heads(b: Builder, rng: Rng) -> Any:
    n_heads, width, seq, seq2 = _n(rng), _n(rng), _n(rng), _n(rng)
    d = n_heads * width
    values = _input(b, "v", seq2, d)
    if rng.random() < 0.5:
        shape, left, trans_b = (n_heads, seq, seq2), _input(b, "x", seq, d), 1
    else:
        shape, left, trans_b = (seq, d), _input(b, "x", n_heads, seq, seq2), 0  # type: ignore[assignment]
    spec = TensorSpec.of(np.float32, shape)
    return b.op("MatMul", left, values, domain=FERROFLOW_DOMAIN, spec=spec, heads=n_heads, trans_b=trans_b)


def einsum(b: Builder, rng: Rng) -> Any:
    size = {index: _n(rng) for index in "bhqkd"}

    def array(name: str, term: str) -> str:
        return _input(b, name, *(size[index] for index in term))

    equation = ["bhqd,bhkd->bhqk", "bqk,kd->bqd", "bqd->bd", "qk,dk->dq"][_n(rng, 0, 4)]
    terms = equation.split("->")[0].split(",")
    return b.op("Einsum", *(array("xy"[i], term) for i, term in enumerate(terms)), equation=equation)


def recurrent(b: Builder, rng: Rng) -> Any:
    seq, batch, n, hidden = _n(rng), _n(rng), _n(rng), _n(rng)
    name, gates = [("LSTM", 4), ("GRU", 3)][_n(rng, 0, 2)]
    w, r = _numbers(rng, 1, gates * hidden, n), _numbers(rng, 1, gates * hidden, hidden)
    x = _input(b, "x", seq, batch, n)
    more = ("", "", _input(b, "h", 1, batch, hidden)) if rng.random() < 0.5 else ()
    n_outputs = {"LSTM": 3, "GRU": 2}[name]
    return b.op(name, x, b.constant(w), b.constant(r), *more, hidden_size=hidden, outputs=n_outputs)


CASES: list[Callable[[Builder, Rng], Any]] = [
    matmul,
    gemm,
    conv,
    conv_transpose,
    pool,
    global_pool,
    elementwise,
    unary,
    where,
    normalization,
    softmax,
    reduction,
    reshape,
    layout,
    gather,
    heads,
    einsum,
    recurrent,
]


def one_op(case: Callable[[Builder, Rng], Any], rng: Rng) -> Graph:
    """Return a graph of one operator."""
    builder = Builder("one", opset=17 if case is recurrent else 21)
    made = case(builder, rng)
    builder.output(*([made] if isinstance(made, str) else made))
    return builder.to_graph()


def random_strategy(graph: Graph, rng: Rng, n_workers: int = 3, most: int = 4) -> Strategy:
    """Return random degrees and workers for all operators."""
    workers = tuple(map(str, range(n_workers)))
    operators = {}
    for name, space in spaces_of(graph).items():
        degrees: dict[str, int] = {}
        for axis in () if isinstance(space, str) else space.axes:
            if rng.random() < 0.6:
                degrees[axis.name] = int(rng.integers(1, min(axis.size, most) + 1))
        n_parts = int(np.prod([1, *degrees.values()]))
        operators[name] = Configuration(tuple(rng.choice(workers, n_parts).tolist()), degrees)
    return Strategy(workers, operators)
