"""Plans of graphs of virtual tasks, by the function that the scheduler uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import count

from dask.typing import Key

from ferroflow_dask.bundling.graphs import Averages
from ferroflow_dask.bundling.plan import Plan
from ferroflow_dask.bundling.rewrite import rewrite
from ferroflow_dask.bundling.snapshot import SentGraph, Snapshot
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.scheduler.graphs.graphs import Graphs
from ferroflow_dask.virtual.task import VirtualTask, annotations_of, own_averages
from ferroflow_dask.virtual.upstream import spec_of


def sent_graph(
    graph: Mapping[Key, VirtualTask],
    wanted: Collection[Key],
    order: Mapping[Key, int] | None = None,
    *,
    knows_costs: bool = False,
) -> SentGraph:
    """Return virtual tasks as a graph that a client sends; `knows_costs` as in `VirtualCluster.submit`."""
    tasks = {key: spec_of(key, task.dependencies) for key, task in graph.items()}
    averages = own_averages(graph) if knows_costs else {}
    return SentGraph(tasks, frozenset(wanted), annotations_of(graph), order, averages=averages)


def planned(graph: SentGraph, snapshot: Snapshot, token: str) -> Plan:
    """Return the plan of a graph, its tasks in the order in which they should run."""
    plan = rewrite(graph, replace(snapshot, shares_objects=True), token)
    order = sorted(plan.tasks, key=plan.order.__getitem__)
    return replace(plan, tasks={key: plan.tasks[key] for key in order})


class Bundler:
    """Bundles the graphs that arrive at a virtual scheduler, and divides running bundles as the plugin does.

    Parameters
    ----------
    cluster : ClusterProfile
    graphs : Graphs
        Of the plugin.
    """

    def __init__(self, cluster: ClusterProfile, graphs: Graphs) -> None:
        self._cluster = cluster
        self._bundles = graphs.bundles
        tokens = count()
        graphs.bundles.token = lambda: str(next(tokens))  # the same in every run
        graphs.receive()

    def plan(self, graph: SentGraph, learned: Mapping[str, Averages]) -> Plan:
        """Return the plan of a graph."""
        return planned(graph, Snapshot(self._cluster, learned), self._bundles.token())

    def create(self, plan: Plan, submit: Callable[[], None]) -> None:
        """Let Dask create the tasks of a plan by calling `submit`."""
        self._bundles.expect(plan.bundles)
        submit()
        self._bundles.add(plan.bundles)
