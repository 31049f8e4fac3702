"""The protocol that cost models share."""

from __future__ import annotations

from math import inf
from typing import Protocol

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op


class CostModel(Protocol):
    """Tells how long an op will take."""

    def seconds(self, op: Op, graph: Graph) -> float | None:
        """Return the expected duration of `op` on one thread [s], or None where it is not known."""
        ...


def estimate(graph: Graph, model: CostModel) -> dict[int, float]:
    """Return the duration of each op that `model` knows, by op id [s].

    Raises
    ------
    UsageError
        What it says of an op is no duration.
    """
    costs: dict[int, float] = {}
    for op in graph.ops:
        seconds = model.seconds(op, graph)
        if seconds is None:
            continue
        if not 0 <= seconds < inf:
            raise UsageError(
                f"{type(model).__name__} says that op {op.name!r} takes {seconds!r} s; it must be a number, "
                "at least 0, or None where it is not known"
            )
        costs[op.id] = seconds
    return costs
