"""Costs from shapes: floating-point operations as one counts them by hand, times that are the slower part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.cost.analytic import flops
from ferroflow_dask.graph import Builder, Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op, TensorSpec

Shape = tuple[int | str, ...]


def of_one_op(op_type: str, shapes: Sequence[Shape], domain: str = "", **attributes: Any) -> tuple[Op, Graph]:
    builder = Builder()
    names = [builder.input(f"x{i}", shape=shape) for i, shape in enumerate(shapes)]
    builder.output(y=builder.op(op_type, *names, domain=domain, **attributes))
    graph = builder.to_graph()
    return graph.live_ops[-1], graph


def heads(n: int, trans_b: int, shape: tuple[int, ...]) -> dict[str, Any]:
    spec = TensorSpec.of("f4", shape)
    return {"domain": FERROFLOW_DOMAIN, "heads": n, "trans_b": trans_b, "spec": spec}


#: By what is computed: the operator, shapes of its inputs, its attributes; a multiply-add counts as two.
COUNTED: dict[str, tuple[str, list[Shape], dict[str, Any], int | None]] = {
    "a product of matrices": ("MatMul", [(3, 5), (5, 7)], {}, 2 * 3 * 5 * 7),
    "a batch of them": ("MatMul", [(4, 3, 5), (4, 5, 7)], {}, 4 * 2 * 3 * 5 * 7),
    "Gemm": ("Gemm", [(3, 5), (5, 7)], {}, 2 * 3 * 5 * 7),
    "Gemm, the first transposed": ("Gemm", [(5, 3), (5, 7)], {"transA": 1}, 2 * 3 * 5 * 7),
    "Gemm, the second transposed": ("Gemm", [(3, 5), (7, 5)], {"transB": 1}, 2 * 3 * 5 * 7),
    "a convolution": ("Conv", [(1, 4, 8, 8), (6, 4, 3, 3)], {}, 2 * (4 * 3 * 3) * (6 * 6 * 6)),
    "one in groups": ("Conv", [(1, 4, 8, 8), (6, 2, 3, 3)], {"group": 2}, 2 * (2 * 3 * 3) * (6 * 6 * 6)),
    # Of 12 columns, each head has its 4.
    "scores of three heads": ("MatMul", [(5, 12), (7, 12)], heads(3, 1, (3, 5, 7)), 2 * 4 * (3 * 5 * 7)),
    "their values": ("MatMul", [(3, 5, 7), (7, 12)], heads(3, 0, (5, 12)), 2 * 7 * (5 * 12)),
    "any other operator": ("Add", [(3, 5), (3, 5)], {}, 3 * 5),
    "unknown rows": ("MatMul", [("n", 5), (5, 7)], {}, None),
}


@pytest.mark.parametrize(("op_type", "shapes", "attributes", "expected"), COUNTED.values(), ids=COUNTED)
def test_operations_are_counted_as_by_hand(
    op_type: str, shapes: list[Shape], attributes: dict[str, Any], expected: int | None
) -> None:
    op, graph = of_one_op(op_type, shapes, **attributes)
    assert flops(op, graph) == expected


@pytest.mark.parametrize(
    ("flop_rate", "memory_bandwidth", "expected_s"),
    [(2.0, 1e9, 105.0), (1e9, 4.0, 71.0)],  # 210 operations; 15, 35 and 21 numbers of four bytes
    ids=["arithmetic is slower", "memory is slower"],
)
def test_an_op_takes_the_slower_of_arithmetic_and_memory(
    flop_rate: float, memory_bandwidth: float, expected_s: float
) -> None:
    cost = AnalyticCost(flop_rate, memory_bandwidth)
    assert cost.seconds(*of_one_op("MatMul", [(3, 5), (5, 7)])) == expected_s
    assert cost.seconds(*of_one_op("MatMul", [("n", 5), (5, 7)])) is None
