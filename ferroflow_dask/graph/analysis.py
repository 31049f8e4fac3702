"""Orders, ranks and lower bounds of what a run of a graph executes, given what each op costs; large products.

Costs are handed in as a mapping from op id to seconds (or any other unit: the results are in the same).
All functions are linear in ops plus edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.ranks import ranks_of

#: op id → cost [s]
Costs = Mapping[int, float]

#: Operators that are matrix products, whatever their domain.
MATRIX_PRODUCTS = frozenset({"MatMul", "Gemm"})


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no schedule can beat.

    Parameters
    ----------
    work : float
        T1, the sum of all costs [s].
    critical_path : float
        T∞, the costliest chain of dependent ops [s].
    """

    work: float
    critical_path: float

    def makespan(self, workers: int) -> float:
        """Return max(T1/P, T∞) [s] for P threads (Graham 1969; Blumofe & Leiserson 1999)."""
        return max(self.work / workers, self.critical_path)


def upward_ranks(graph: Graph, costs: Costs) -> dict[int, float]:
    """Return the upward rank of each op: its cost plus the costliest chain behind it [s].

    Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task scheduling for
    heterogeneous computing", 2002; here without mean transfer times, which Dask overlaps.
    """
    ranks = ranks_of([costs[op.id] for op in graph.live_ops], graph.live_edges)
    return dict(zip(graph.live_position, ranks, strict=True))


def levels(graph: Graph) -> dict[int, int]:
    """Return for each op the number of ops on the longest chain that ends in it (1 at the sources)."""
    level: dict[int, int] = {}
    for op in graph.live_ops:
        level[op.id] = 1 + max((level[before.id] for before in graph.predecessors[op.id]), default=0)
    return level


def critical_path(graph: Graph, costs: Costs) -> tuple[Op, ...]:
    """Return the costliest chain of dependent ops, first op first; the smallest ids on ties."""
    ranks = upward_ranks(graph, costs)
    successors: dict[int, list[Op]] = {op.id: [] for op in graph.live_ops}
    for op in graph.live_ops:
        for before in graph.predecessors[op.id]:
            successors[before.id].append(op)
    path: list[Op] = []
    candidates = [op for op in graph.live_ops if not graph.predecessors[op.id]]
    while candidates:
        path.append(max(candidates, key=lambda op: (ranks[op.id], -op.id)))
        candidates = successors[path[-1].id]
    return tuple(path)


def bounds(graph: Graph, costs: Costs) -> Bounds:
    """Return T1 and T∞ of the graph."""
    return Bounds(
        work=sum(costs[op.id] for op in graph.live_ops),
        critical_path=max(upward_ranks(graph, costs).values(), default=0.0),
    )


def is_large_product(graph: Graph, op: Op, n_elements: int) -> bool:
    """Return whether an op is a matrix product whose result has so many elements, or more.

    One whose size is not known before it has run counts as empty.
    """
    return op.op_type in MATRIX_PRODUCTS and (graph.spec(op.outputs[0]).size or 0) >= n_elements
