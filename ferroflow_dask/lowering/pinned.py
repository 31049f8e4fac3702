"""Ops that name their workers: strategies matched to a cluster, and the tasks of graphs in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from distributed import Client, default_client

from ferroflow_dask.clients import is_address
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.lowering.bundles import Bundling, check_granularity
from ferroflow_dask.lowering.pinned_bundles import bundles_of
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


def pinned_bundling(graph: Graph, costs: Mapping[int, float], granularity: str | None) -> Bundling:
    """Return the tasks of a graph whose ops name their workers."""
    if granularity is not None:
        check_granularity(granularity)
    if granularity == "whole":
        raise UsageError("a strategy needs granularity 'bundles' or 'ops', got 'whole'")
    if granularity == "ops":
        return Bundling(tuple((op,) for op in graph.live_ops), "ops", {}, costs)
    return Bundling(tuple(bundles_of(graph, costs)), "bundles", {}, costs)
