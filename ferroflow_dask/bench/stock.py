"""Simulated makespan of a graph under stock Dask, to be shown after a run."""

from __future__ import annotations

from collections.abc import Mapping

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.graph import Graph
from ferroflow_dask.simulation import Machine, TaskGraph, run_listed


def stock_s(graph: Graph, seconds: Mapping[int, float], cluster: ClusterProfile) -> float:
    """Return the makespan of a list schedule with one task for each op [s].

    Parameters
    ----------
    graph : Graph
    seconds : mapping of int to float
        Measured duration of each op that computes [s].
    cluster : ClusterProfile
        Costs of tasks and messages. Those of a cluster with the plugin are lower than stock Dask's.
    """
    ops = graph.live_ops
    nbytes = [sum(graph.spec(value).nbytes or 0 for value in op.outputs if value) for op in ops]
    tasks = TaskGraph(
        [seconds.get(op.id, 0.0) for op in ops],
        [{earlier: nbytes[earlier] for earlier in needed} for needed in graph.live_edges],
    )
    return run_listed(tasks, Machine.of_profile(cluster)).makespan_s
