"""Bundled graphs of virtual tasks, planned by the function that the scheduler uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import Any

from dask._task_spec import Alias, GraphNode
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.annotations import BUNDLE_PREFIX
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.graphs import Averages, BundledGraph, written_task
from ferroflow_dask.bundling.ordering import in_order
from ferroflow_dask.bundling.results import VALUE
from ferroflow_dask.bundling.rewrite import FEWEST, rewrite
from ferroflow_dask.bundling.snapshot import SentGraph, Snapshot
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.scheduler.graphs.graphs import Graphs
from ferroflow_dask.virtual.task import VirtualTask
from ferroflow_dask.virtual.upstream import spec_of


def bundled(
    graph: Mapping[Key, VirtualTask],
    wanted: Collection[Key],
    cluster: ClusterProfile,
    *,
    knows_costs: bool = False,
    learned_s: Mapping[str, float] | None = None,
    number: int = 0,
) -> BundledGraph:
    """Return a graph in fewer tasks, in the order in which they should run.

    The scheduler is taken to know the means of each task prefix, as from earlier runs; `learned_s` has other
    durations [s]. With `knows_costs` it knows each task. Keys of bundles contain the `number` of the graph.
    """
    plain = BundledGraph({key: spec_of(key, task.dependencies) for key, task in graph.items()}, {})
    alone: dict[Key, bool] = {
        n: True for n, task in enumerate(graph.values()) if task.annotations or task.failures
    }
    if len(graph) < FEWEST or len(alone) == len(graph):
        return plain
    # Numbers as keys: sets of them have the same order in every process.
    keys = list(dict.fromkeys([*graph, *(key for task in graph.values() for key in task.dependencies)]))
    at: dict[Key, int] = {key: n for n, key in enumerate(keys)}
    tasks: dict[Key, GraphNode] = {
        at[key]: spec_of(at[key], [at[one] for one in task.dependencies]) for key, task in graph.items()
    }
    averages = _averages(graph, knows_costs, learned_s or {})
    sent = SentGraph(tasks, frozenset(map(at.__getitem__, wanted)), {"alone": alone}, averages=averages)
    plan = rewrite(sent, Snapshot(cluster, shares_objects=True), str(number))
    named = _Names(keys, number)
    if not plan.bundles:
        return BundledGraph({named(n): plain.tasks[named(n)] for n in in_order(tasks)}, {})
    bundles = {named(n): named.bundle(bundle) for n, bundle in plan.bundles.items()}
    specs: dict[Key, GraphNode] = {}
    for n in sorted(plan.tasks, key=plan.order.__getitem__):
        name = named(n)
        if n in plan.bundles:
            cost_s = sum(averages[task.key].duration_s for task in plan.bundles[n].tasks)
            specs[name] = written_task(name, bundles[name], cost_s)
        else:
            specs[name] = named.task(plan.tasks[n])
    return BundledGraph(specs, bundles)


class _Names:
    """Names tasks that have numbers as keys; bundles get names that are the same in every run."""

    def __init__(self, keys: Sequence[Key], number: int) -> None:
        self._keys = keys
        self._number = number

    def __call__(self, key: Any) -> Key:
        if isinstance(key, int):
            return self._keys[key]
        return (VALUE, self(key[1])) if key[0] == VALUE else (BUNDLE_PREFIX, self._number, key[1])

    def task(self, task: GraphNode) -> GraphNode:
        if isinstance(task, Alias):
            return Alias(self(task.key), self(task.target))
        return spec_of(self(task.key), [self(key) for key in task.dependencies])

    def bundle(self, bundle: Bundle) -> Bundle:
        return replace(
            bundle,
            tasks=tuple(map(self.task, bundle.tasks)),
            exports=tuple(map(self, bundle.exports)),
            places={self(key): (self(holder), item) for key, (holder, item) in bundle.places.items()},
            delivered=tuple(map(self, bundle.delivered)),
        )


def _averages(
    graph: Mapping[Key, VirtualTask], knows_costs: bool, learned_s: Mapping[str, float]
) -> dict[Key, Averages]:
    """Return the averages of each task, by its number."""
    names = list(graph) if knows_costs else list(map(key_split, graph))
    by_name: dict[Key, list[VirtualTask]] = {}
    for name, task in zip(names, graph.values(), strict=True):
        by_name.setdefault(name, []).append(task)
    means: dict[Key, Averages] = {}
    for name, alike in by_name.items():
        nbytes = [task.nbytes for task in alike]
        means[name] = Averages(fmean(task.duration_s for task in alike), fmean(nbytes), max(nbytes))
    for name in () if knows_costs else means.keys() & learned_s.keys():
        means[name] = replace(means[name], duration_s=learned_s[str(name)])
    return {n: means[name] for n, name in enumerate(names)}


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
        self._n_graphs, tokens = 0, count()
        graphs.bundles.token = lambda: str(next(tokens))  # the same in every run
        graphs.receive()

    def cut(
        self,
        graph: Mapping[Key, VirtualTask],
        wanted: Collection[Key],
        knows_costs: bool,
        learned_s: Mapping[str, float] | None,
    ) -> BundledGraph:
        """Return a graph in fewer tasks."""
        self._n_graphs += 1
        options: Any = {"knows_costs": knows_costs, "learned_s": learned_s, "number": self._n_graphs}
        return bundled(graph, wanted, self._cluster, **options)

    def create(self, found: BundledGraph, submit: Callable[[], None]) -> None:
        """Let Dask create the tasks of a graph by calling `submit`."""
        self._bundles.expect(found.bundles)
        submit()
        self._bundles.add(found.bundles)
