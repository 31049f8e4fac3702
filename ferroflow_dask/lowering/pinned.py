"""Ops that name their workers: strategies matched to a cluster, and bundles that keep to one worker."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from distributed import Client, default_client

from ferroflow_dask.clients import is_address
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op, TensorSpec
from ferroflow_dask.lowering.bundles import Bundling, check_placement
from ferroflow_dask.strategy import Strategy, partition, with_shapes


def is_pinned(graph: Graph) -> bool:
    """Return whether ops name their workers."""
    return any(op.worker for op in graph.ops)


def on_cluster(strategy: Strategy, client: Client) -> Strategy:
    """Return a strategy with the addresses of a cluster's workers; or raise `StrategyError`."""
    assert client.scheduler is not None
    # `scheduler_info` may return what a periodic callback has asked for meanwhile: fewer workers.
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
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
    """Return bundles of connected ops on one worker that wait for the same values of other workers.

    The same values of other workers must wait for them, too. So nothing waits for the rest of a bundle.

    Values that other workers read are results of bundles of their own, one for each set of readers. A worker
    gets no value that it does not read.
    """
    ops, edges = graph.live_ops, graph.live_edges
    after: list[list[int]] = [[] for _ in ops]
    for i, before in enumerate(edges):
        for j in before:
            after[j].append(i)
    readers = [{ops[i].worker for i in found} for found in after]
    n = len(ops)
    waits = list(zip(_awaited(ops, edges, range(n)), _awaited(ops, after, reversed(range(n))), strict=True))
    wanted = set(graph.outputs)
    is_output = [not wanted.isdisjoint(op.outputs) for op in ops]
    is_send = [op.is_send for op in ops]
    group_of: list[Hashable] = list(_connected(ops, waits, edges, is_send))
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

    def place(group: list[int]) -> tuple[int, int, bool, int]:
        first, (awaited, awaiting) = group[0], waits[group[0]]
        return awaited.bit_count(), -awaiting.bit_count(), is_send[first], first

    return [tuple(ops[i] for i in group) for group in sorted(members.values(), key=place)]


def _awaited(ops: Sequence[Op], edges: Sequence[Sequence[int]], order: Iterable[int]) -> list[int]:
    """Return a number for each op, equal for ops that wait for the same values of other workers.

    The number is a set of bits. Each bit stands for ops on one worker that are equal in this: they send at
    one time. What an op waits for contains what the ops before it wait for. With reversed edges, the number
    stands for those who wait for the op.
    """
    classes: dict[tuple[str, int], int] = {}
    found = [0] * len(ops)
    for i in order:
        for j in edges[i]:
            found[i] |= found[j]
            if ops[j].worker != ops[i].worker:
                found[i] |= 1 << classes.setdefault((ops[j].worker, found[j]), len(classes))
    return found


def _connected(
    ops: Sequence[Op], waits: Sequence[object], edges: Sequence[Sequence[int]], is_alone: Sequence[bool]
) -> list[int]:
    """Return a number for each op, equal for connected ops on one worker with equal waits."""
    root = list(range(len(ops)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i, before in enumerate(edges):
        for j in before:
            is_together = ops[i].worker == ops[j].worker and waits[i] == waits[j]
            if is_together and not (is_alone[i] or is_alone[j]):
                root[find(i)] = find(j)
    return [find(i) for i in range(len(ops))]
