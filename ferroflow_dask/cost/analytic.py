"""Costs from shapes: floating-point operations and bytes against nominal rates of one core.

The rates are guesses of the right order, good for telling a large op from a small one; a schedule
needs ratios, not seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op, TensorSpec

#: One AVX2 core in single precision, dense matrix product, well below its peak [FLOP/s].
CORE_FLOP_RATE = 3e10
#: What one core streams from memory [B/s].
CORE_MEMORY_BANDWIDTH = 1e10


@dataclass(frozen=True, slots=True)
class AnalyticCost:
    """Roofline estimate (Williams, Waterman and Patterson 2009): the slower of arithmetic and memory.

    Parameters
    ----------
    flop_rate : float, optional
        [FLOP/s]
    memory_bandwidth : float, optional
        [B/s]
    """

    flop_rate: float = CORE_FLOP_RATE
    memory_bandwidth: float = CORE_MEMORY_BANDWIDTH

    def seconds(self, op: Op, graph: Graph) -> float | None:
        """Return the expected duration of `op` on one thread [s]; None while a shape is unknown."""
        if op.domain == FERROFLOW_DOMAIN and op.op_type == "Slow":
            return float(op.attributes["duration"])
        operations = flops(op, graph)
        sizes = [graph.spec(value).nbytes for value in (*op.operands, *op.outputs) if value]
        if operations is None or None in sizes:
            return None
        moved = sum(size for size in sizes if size is not None)
        return max(operations / self.flop_rate, moved / self.memory_bandwidth)


def flops(op: Op, graph: Graph) -> float | None:
    """Return the floating-point operations of an op; None while a shape is unknown.

    A multiply-add counts as two. Operators without a rule of their own count one for each element of
    their first output.
    """
    specs = [graph.spec(value) for value in op.inputs if value]
    result = graph.spec(op.outputs[0]) if op.outputs else TensorSpec()
    if result.size is None or any(spec.size is None for spec in specs):
        return None
    rule = _RULES.get(op.op_type)
    try:
        return float(rule(op, specs, result) if rule is not None else result.size)
    except (IndexError, TypeError, ValueError):  # the op makes no sense, as running it will tell
        return None


def _matmul(op: Op, specs: list[TensorSpec], result: TensorSpec) -> int:
    # The number of products summed for each element: the last axis of the first operand, shared out
    # among heads where the scores of attention are formed.
    inner = _last(specs[0])
    if op.attributes.get("heads") and op.attributes.get("trans_b"):
        inner //= int(op.attributes["heads"])
    return 2 * inner * _size(result)


def _gemm(op: Op, specs: list[TensorSpec], result: TensorSpec) -> int:
    rows, columns = (int(dim or 0) for dim in specs[0].shape or (0, 0))
    return 2 * (rows if op.attributes.get("transA") else columns) * _size(result)


def _conv(_op: Op, specs: list[TensorSpec], result: TensorSpec) -> int:
    weight = specs[1].shape or (1,)
    return 2 * math.prod(int(dim or 0) for dim in weight[1:]) * _size(result)


def _size(spec: TensorSpec) -> int:
    return spec.size or 0


def _last(spec: TensorSpec) -> int:
    return int(spec.shape[-1] or 0) if spec.shape else 1


_RULES: dict[str, Callable[[Op, list[TensorSpec], TensorSpec], int]] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": _matmul,
}
