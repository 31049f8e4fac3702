"""The built-in graphs: ferroflow's benchmark DAGs, with its ids, edges and milliseconds.

Differences from the predecessor, on purpose: weights are seeded random numbers, scaled to keep norms
(there they were constants, so that most values vanished), and attention is a `MatMul` per head with
the second operand transposed, so that shapes are those of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferroflow_dask.counts import checked_count
from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.graph.builder import Builder
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, TensorSpec
from ferroflow_dask.memory import TASK_NBYTES, check_memory

#: Length of the vector that sleeping ops pass through: too small for its transfer to count.
_TOKEN_LENGTH = 16
_MILLISECOND = 1e-3
_FLOAT_NBYTES = 4
#: Longer ops do not end in the lifetime of a cluster [ms].
_LONGEST_MS = 1e9


@dataclass(frozen=True, slots=True)
class _Writer:
    """A builder with the handful of calls that the topologies are written in."""

    builder: Builder
    rng: np.random.Generator

    def token(self, name: str) -> str:
        """Add a small source for sleeping ops to pass through."""
        return self.builder.constant(self.rng.standard_normal(_TOKEN_LENGTH, dtype=np.float32), name)

    def data(self, name: str, *shape: int) -> str:
        """Add a source of standard normal numbers."""
        return self.builder.constant(self.rng.standard_normal(shape, dtype=np.float32), name)

    def weight(self, name: str, n: int) -> str:
        """Add an (n, n) source that keeps the norm of what it multiplies: variance 1/n."""
        values: NDArray[np.float32] = self.rng.standard_normal((n, n), dtype=np.float32)
        return self.builder.constant(values / np.float32(np.sqrt(n)), name)

    def slow(self, value: str, duration_ms: float, name: str) -> str:
        """Add an op that sleeps, then passes its input through."""
        added: str = self.builder.op(
            "Slow",
            value,
            name=name,
            domain=FERROFLOW_DOMAIN,
            spec=TensorSpec.of(np.float32, (_TOKEN_LENGTH,)),
            duration=duration_ms * _MILLISECOND,
        )
        return added

    def layer_norm(self, value: str, *shape: int) -> str:
        """Add a normalisation of the last axis without scale or bias."""
        added: str = self.builder.op(
            "LayerNorm", value, domain=FERROFLOW_DOMAIN, spec=TensorSpec.of(np.float32, shape), epsilon=1e-5
        )
        return added

    def head_matmul(self, a: str, b: str, heads: int, trans_b: bool, *shape: int) -> str:
        """Add a matrix product per head."""
        added: str = self.builder.op(
            "MatMul",
            a,
            b,
            domain=FERROFLOW_DOMAIN,
            spec=TensorSpec.of(np.float32, shape),
            heads=heads,
            trans_b=int(trans_b),
        )
        return added

    def finish(self) -> Graph:
        """Mark the values that nothing reads as outputs and build."""
        self.builder.output(*self.builder.sinks)
        return self.builder.to_graph()


def _wide(w: _Writer, width: int, depth: int, skew: float) -> None:
    root = w.token("root")
    n_slow = round(width * skew)
    for branch in range(width):
        value = root
        kind, duration_ms = ("slow", 5.0) if branch < n_slow else ("fast", 1.0)
        for step in range(depth):
            value = w.slow(value, duration_ms, f"{kind}_{1 + branch * depth + step}")


def _imbalanced(w: _Writer, n_heavy: int, heavy_ms: float, n_fast: int, fast_ms: float) -> None:
    root = w.token("root")
    for i in range(n_heavy):
        w.slow(root, heavy_ms, f"heavy_{1 + i}")
    for i in range(n_fast):
        w.slow(root, fast_ms, f"fast_{1 + n_heavy + i}")


def _skewed(w: _Writer, n: int, factor: float) -> None:
    roots = (w.token("root_0"), w.token("root_1"))
    for i in range(n // 2):
        w.slow(roots[0], 1.0, f"fast_{2 + i}")
    for i in range(n // 2, n):
        w.slow(roots[1], factor, f"slow_{2 + i}")


def _transformer(w: _Writer, seq_len: int, d_model: int, n_heads: int, layers: int = 1) -> None:
    if d_model % n_heads:
        raise UsageError(f"d_model {d_model} is no multiple of n_heads {n_heads}; heads share it evenly")
    value = w.data("X", seq_len, d_model)
    for layer in range(layers):
        suffix = f"_{layer}" if layers > 1 else ""
        wq, wk, wv, wo, wff = (w.weight(name + suffix, d_model) for name in ("Wq", "Wk", "Wv", "Wo", "Wff"))
        op = w.builder.op
        q, k, v = op("MatMul", value, wq), op("MatMul", value, wk), op("MatMul", value, wv)
        scores = w.head_matmul(q, k, n_heads, True, n_heads, seq_len, seq_len)
        scores = w.layer_norm(op("Relu", scores), n_heads, seq_len, seq_len)
        mixed = w.head_matmul(scores, v, n_heads, False, seq_len, d_model)
        hidden = w.layer_norm(op("Relu", op("MatMul", mixed, wo)), seq_len, d_model)
        value = w.layer_norm(op("MatMul", hidden, wff), seq_len, d_model)


def _resnet(w: _Writer, channels: int) -> None:
    x, w1, w2 = w.data("X", channels, channels), w.weight("W1", channels), w.weight("W2", channels)
    op = w.builder.op
    hidden = op("MatMul", op("Relu", op("MatMul", x, w1)), w2)
    w.layer_norm(op("MatMul", hidden, x), channels, channels)


def _matmul_chain(w: _Writer, n_ops: int, m: int) -> None:
    value, weight = w.data("X", m, m), w.weight("W", m)
    for _ in range(n_ops):
        value = w.builder.op("MatMul", value, weight)


def _matmul_parallel(w: _Writer, n_branches: int, ops_per_branch: int, m: int) -> None:
    root, weight = w.data("X", m, m), w.weight("W", m)
    for _ in range(n_branches):
        value = root
        for _ in range(ops_per_branch):
            value = w.builder.op("MatMul", value, weight)


def _uniform(w: _Writer, n: int, dim: int) -> None:
    _matmul_chain(w, n_ops=n, m=dim)


@dataclass(frozen=True, slots=True)
class _Topology:
    write: Callable[..., None]
    defaults: Mapping[str, Any]
    summary: str
    #: Takes the sizes; returns the number of ops, and of numbers in constants and in the largest results.
    needs: Callable[..., tuple[int, int]]


def _needs_wide(width: int, depth: int, **_: float) -> tuple[int, int]:
    return width * depth, 0


def _needs_transformer(seq_len: int, d_model: int, n_heads: int, layers: int) -> tuple[int, int]:
    return 12 * layers, seq_len * d_model + 5 * layers * d_model**2 + n_heads * seq_len**2


_WIDE = (
    "a root and `width` chains of `depth` sleeping ops, the first width·skew of them slow (5 ms, else 1 ms)"
)
_LAYERS = "`layers` transformer blocks in a row"

TOPOLOGIES: Mapping[str, _Topology] = {
    "imbalanced": _Topology(
        _imbalanced,
        {"n_heavy": 4, "heavy_ms": 200.0, "n_fast": 200, "fast_ms": 1.0},
        "a few long and many short sleeping ops, all on one root",
        lambda n_heavy, n_fast, **_: (n_heavy + n_fast, 0),
    ),
    "wide": _Topology(_wide, {"width": 8, "depth": 5, "skew": 0.25}, _WIDE, _needs_wide),
    "large-wide": _Topology(_wide, {"width": 320, "depth": 1, "skew": 0.47}, _WIDE, _needs_wide),
    "xlarge-wide": _Topology(_wide, {"width": 1280, "depth": 1, "skew": 0.003}, _WIDE, _needs_wide),
    "skewed": _Topology(
        _skewed, {"n": 100, "factor": 10.0}, "half the ops 1 ms, half `factor` ms", lambda n, **_: (n, 0)
    ),
    "transformer": _Topology(
        _transformer, {"layers": 1, "seq_len": 128, "d_model": 512, "n_heads": 8}, _LAYERS, _needs_transformer
    ),
    "large-transformer": _Topology(
        _transformer, {"layers": 8, "seq_len": 128, "d_model": 512, "n_heads": 8}, _LAYERS, _needs_transformer
    ),
    "xlarge-transformer": _Topology(
        _transformer,
        {"layers": 32, "seq_len": 128, "d_model": 512, "n_heads": 8},
        _LAYERS,
        _needs_transformer,
    ),
    "resnet": _Topology(
        _resnet,
        {"channels": 64},
        "a residual block as matrix products",
        lambda channels: (5, 4 * channels**2),
    ),
    "matmul-chain": _Topology(
        _matmul_chain,
        {"n_ops": 50, "m": 512},
        "matrix products one after another",
        lambda n_ops, m: (n_ops, 3 * m**2),
    ),
    "matmul-parallel": _Topology(
        _matmul_parallel,
        {"n_branches": 16, "ops_per_branch": 8, "m": 512},
        "independent chains of products",
        lambda n_branches, ops_per_branch, m: (n_branches * ops_per_branch, (n_branches + 2) * m**2),
    ),
    "uniform": _Topology(
        _uniform, {"n": 50, "dim": 64}, "matrix products one after another", lambda n, dim: (n, 3 * dim**2)
    ),
}

#: Arguments that count something, and the least that they may be.
_COUNTS: Mapping[str, int] = {
    **dict.fromkeys(("width", "depth", "seq_len", "d_model", "n_heads", "layers", "channels"), 1),
    **dict.fromkeys(("n_ops", "m", "n_branches", "ops_per_branch", "n", "dim"), 1),
    **dict.fromkeys(("n_heavy", "n_fast", "seed"), 0),
}


def generate_graph(name: str, *, seed: int = 0, **arguments: Any) -> Graph:
    """Return one of the built-in graphs; `ferroflow_dask.generate` documents names and arguments."""
    topology = TOPOLOGIES.get(name)
    if topology is None:
        raise UnknownNameError.of("DAG", name, TOPOLOGIES)
    for argument in arguments:
        if argument not in topology.defaults:
            raise UsageError(
                f"DAG {name!r} has no argument {argument!r}; it takes: {', '.join(topology.defaults)}"
            )
    sizes = {**topology.defaults, **{name: _checked(name, value) for name, value in arguments.items()}}
    check_memory(f"DAG {name!r}", needed_nbytes(name, sizes), f"give smaller {', '.join(arguments)}")
    writer = _Writer(Builder(name), np.random.default_rng(_checked("seed", seed)))
    try:
        topology.write(writer, **sizes)
    except (MemoryError, OverflowError) as error:
        raise UsageError(f"DAG {name!r} with {sizes} needs more memory than there is") from error
    if not writer.builder.sinks:
        raise UsageError(f"DAG {name!r} with {sizes} has no ops")
    return writer.finish()


def needed_nbytes(name: str, sizes: Mapping[str, Any]) -> int:
    """Return the memory that a built-in graph and a run of it need, estimated from all its sizes [B]."""
    n_ops, n_numbers = TOPOLOGIES[name].needs(**sizes)
    return TASK_NBYTES * n_ops + _FLOAT_NBYTES * n_numbers


def _checked(argument: str, value: Any) -> Any:
    if argument in _COUNTS:
        return checked_count(argument, value, _COUNTS[argument])
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if argument == "skew":
        if not (is_number and 0 <= value <= 1):
            raise UsageError(f"skew is {value!r}; it must lie between 0 and 1")
    elif not (is_number and 0 <= value <= _LONGEST_MS):
        raise UsageError(f"{argument} is {value!r}; it must be from 0 to {_LONGEST_MS:g}")
    return float(value)
