"""Upward ranks of numbered nodes, for graphs of ops and for bundles of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ranks_of(costs: Sequence[float], before: Sequence[Iterable[int]]) -> list[float]:
    """Return the upward rank of each node: its cost plus the costliest chain that depends on it.

    The nodes are numbered in an order in which they can run; O(nodes + edges).

    Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task scheduling for heterogeneous
    computing", 2002; here without mean transfer times.

    Parameters
    ----------
    costs : sequence of float
        Cost of each node.
    before : sequence of iterable of int
        For each node, the nodes that it depends on.
    """
    ranks = [0.0] * len(costs)
    for node in range(len(costs) - 1, -1, -1):
        ranks[node] += costs[node]
        for earlier in before[node]:
            ranks[earlier] = max(ranks[earlier], ranks[node])
    return ranks
