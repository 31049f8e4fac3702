"""Ops that name their workers: strategies matched to a cluster, and bundles that keep to one worker."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from distributed import Client, default_client

from ferroflow_dask.clients import is_address
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op, TensorSpec
from ferroflow_dask.lowering.bundles import Bundling, check_placement
from ferroflow_dask.strategy import Strategy, partition, with_shapes

#: What `partition` makes of a value that another worker reads.
_SENDS = ("Identity", "Slice")


def is_pinned(graph: Graph) -> bool:
    """Return whether ops name their workers."""
    return any(op.worker for op in graph.ops)


def on_cluster(strategy: Strategy, client: Client) -> Strategy:
    """Return a strategy with the addresses of a cluster's workers; or raise `StrategyError`."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return strategy.on({str(worker["name"]): address for address, worker in workers.items()})


def in_parts(graph: Graph, inputs: Mapping[str, Any], strategy: Strategy) -> Graph:
    """Return a graph in the parts of a strategy; see `partition`.

    Parameters
    ----------
    graph : Graph
    inputs : mapping of str to array
        Shapes follow from theirs, if the graph leaves some open.
    strategy : Strategy
        Names of workers are those of the default client's cluster. Without one, parts run anywhere.
    """
    if is_pinned(graph):
        raise UsageError(f"graph {graph.name!r} is in parts already; bind it without strategy=")
    if not all(map(is_address, strategy.workers)):
        try:
            strategy = on_cluster(strategy, default_client())
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
    specs = {
        name: TensorSpec(getattr(value, "dtype", None), tuple(value.shape))
        for name, value in inputs.items()
        if isinstance(getattr(value, "dtype", None), np.dtype)
    }
    return partition(with_shapes(graph, specs), strategy)


def pinned_bundling(graph: Graph, costs: Mapping[int, float], placement: str | None) -> Bundling:
    """Return the tasks of a graph whose ops name their workers."""
    if placement is not None:
        check_placement(placement)
    if placement == "whole":
        raise UsageError("a strategy needs placement 'bundles' or 'ops', got 'whole'")
    if placement == "ops":
        return Bundling(tuple((op,) for op in graph.live_ops), "ops", {}, costs)
    return Bundling(tuple(bundles_of(graph)), "bundles", {}, costs)


def bundles_of(graph: Graph) -> list[tuple[Op, ...]]:
    """Return bundles of ops on one worker that wait for nothing in between.

    Values that other workers read are results of bundles of their own, one for each set of readers. So a
    worker gets no value that it does not read.
    """
    ops, edges = graph.live_ops, graph.live_edges
    depths = _depths(ops, edges)
    readers: list[set[str]] = [set() for _ in ops]
    for op, before in zip(ops, edges, strict=True):
        for j in before:
            readers[j].add(op.worker)
    wanted = set(graph.outputs)
    is_output = [not wanted.isdisjoint(op.outputs) for op in ops]
    is_send = [
        op.op_type in _SENDS and bool(readers[i]) and not is_output[i] and op.worker not in readers[i]
        for i, op in enumerate(ops)
    ]
    group_of: list[Hashable] = list(_connected(depths, edges, is_send))
    # What a group yields: to whom it sends, and None for all else.
    yields: dict[Hashable, set[frozenset[str] | None]] = {}
    for i, before in enumerate(edges):
        if is_output[i]:
            yields.setdefault(group_of[i], set()).add(None)
        for j in before:
            if group_of[i] != group_of[j]:
                to = frozenset(readers[i]) if is_send[i] else None
                yields.setdefault(group_of[j], set()).add(to)
    for i, before in enumerate(edges):
        if is_send[i] and before:
            source, to = group_of[before[0]], frozenset(readers[i])
            group_of[i] = source if yields[source] == {to} else (source, to)
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(group_of):
        members.setdefault(group, []).append(i)
    order = sorted(members.values(), key=lambda group: (depths[group[0]], is_send[group[0]], group[0]))
    return [tuple(ops[i] for i in group) for group in order]


def _depths(ops: Sequence[Op], edges: Sequence[Sequence[int]]) -> list[int]:
    """Return how often values move between workers on the longest way to each op."""
    depths: list[int] = []
    for op, before in zip(ops, edges, strict=True):
        depths.append(max((depths[j] + (ops[j].worker != op.worker) for j in before), default=0))
    return depths


def _connected(depths: Sequence[int], edges: Sequence[Sequence[int]], is_alone: Sequence[bool]) -> list[int]:
    """Return a number for each op, equal for those of one depth that are connected."""
    root = list(range(len(depths)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i, before in enumerate(edges):
        for j in before:
            # Ops of one depth that are connected are on one worker.
            if depths[i] == depths[j] and not (is_alone[i] or is_alone[j]):
                root[find(i)] = find(j)
    return [find(i) for i in range(len(depths))]
