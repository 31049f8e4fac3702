"""The protocol that cost models share."""

from __future__ import annotations

from typing import Protocol

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op


class CostModel(Protocol):
    """Tells how long an op will take."""

    def seconds(self, op: Op, graph: Graph) -> float | None:
        """Return the expected duration of `op` on one thread [s], or None where it is not known."""
        ...


def estimate(graph: Graph, model: CostModel) -> dict[int, float]:
    """Return the duration of each op that `model` knows, by op id [s]."""
    costs = {op.id: model.seconds(op, graph) for op in graph.ops}
    return {op_id: seconds for op_id, seconds in costs.items() if seconds is not None}
