"""Bundled graphs of virtual tasks, cut by the function that the scheduler uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from statistics import fmean

from dask._task_spec import Alias, GraphNode
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.annotations import BUNDLE_PREFIX
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.graphs import Averages, BundledGraph, bundle_graph, written_task
from ferroflow_dask.bundling.results import VALUE, Place
from ferroflow_dask.bundling.sequence import NO_WORK
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.scheduler.graphs.graphs import Graphs
from ferroflow_dask.virtual.task import VirtualTask
from ferroflow_dask.virtual.upstream import spec_of

#: Smaller graphs are not bundled, as in `scheduler.graphs.arrival` [tasks].
_FEWEST = 10


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

    The scheduler is taken to know the mean duration and result size of each task prefix, as from earlier
    runs.

    Parameters
    ----------
    graph : mapping of key to VirtualTask
    wanted : collection of key
    cluster : ClusterProfile
    knows_costs : bool, optional
        Whether the duration and size of each single task are known, as those of ops are.
    learned_s : mapping of str to float, optional
        Durations of prefixes that differ from the mean of their tasks, since others have run before [s].
    number : int, optional
        Of the graph; bundles have it in their keys.
    """
    alone = frozenset(at for at, task in enumerate(graph.values()) if task.annotations or task.failures)
    if len(graph) < _FEWEST or len(alone) == len(graph):
        return BundledGraph({key: spec_of(key, task.dependencies) for key, task in graph.items()}, {})
    # Numbers as keys: sets of them have the same order in every process.
    tasks = list(graph.values())
    keys = list(dict.fromkeys([*graph, *(key for task in tasks for key in task.dependencies)]))
    at: dict[Key, int] = {key: n for n, key in enumerate(keys)}
    expected = [Averages(one.duration_s, one.nbytes, one.nbytes) for one in tasks]
    if not knows_costs:
        expected = _averages(keys[: len(tasks)], expected, learned_s or {})
    found = bundle_graph(
        {n: spec_of(n, [at[key] for key in task.dependencies]) for n, task in enumerate(tasks)},
        [at[key] for key in wanted],
        cluster,
        {},
        str(number),
        alone=alone,
        by_key=dict(enumerate(expected)),
        shares_objects=True,
    )
    named = _Names(keys, number)
    specs: dict[Key, GraphNode] = {}
    bundles: dict[Key, Bundle] = {}
    for n, spec in sorted(found.tasks.items(), key=lambda item: found.order[item[0]]):
        name = named(n)
        if n not in found.bundles:
            specs[name] = named.task(spec)
            continue
        inside = [one.key for one in found.bundles[n].tasks]
        cost_s = sum(expected[one].duration_s for one in inside if isinstance(one, int))
        bundles[name] = named.bundle(found.bundles[n])
        specs[name] = written_task(name, bundles[name], 0.0 if _is_value(bundles[name]) else cost_s)
    return BundledGraph(specs, bundles)


class _Names:
    """Names tasks that have numbers as keys; bundles get names that are the same in every run."""

    def __init__(self, keys: Sequence[Key], number: int) -> None:
        self._keys = keys
        self._number = number

    def __call__(self, key: Key) -> Key:
        if isinstance(key, int):
            return self._keys[key]
        assert isinstance(key, tuple)
        return (VALUE, self(key[1])) if key[0] == VALUE else (BUNDLE_PREFIX, self._number, key[1])

    def task(self, task: GraphNode) -> GraphNode:
        if isinstance(task, Alias):
            return Alias(self(task.key), self(task.target))
        return spec_of(self(task.key), [self(key) for key in task.dependencies])

    def bundle(self, bundle: Bundle) -> Bundle:
        places: dict[Key, Place] = {
            self(key): (self(holder), item) for key, (holder, item) in bundle.places.items()
        }
        exports = tuple(None if key is None else self(key) for key in bundle.exports)
        tasks = tuple(self.task(task) for task in bundle.tasks)
        delivered = tuple(self(key) for key in bundle.delivered)
        return replace(bundle, tasks=tasks, exports=exports, places=places, delivered=delivered)


def _is_value(bundle: Bundle) -> bool:
    """Return whether a task only gives a value of a bundle its own key."""
    return len(bundle.tasks) == 1 and isinstance(bundle.tasks[0], NO_WORK)


def whole_tasks(found: BundledGraph, graph: Mapping[Key, VirtualTask]) -> dict[Key, VirtualTask]:
    """Return a bundled graph for an engine that does not divide bundles: each of them is one virtual task.

    A task that reads a delivered value waits for the bundle.
    """
    values = {
        key: next(iter(bundle.places.values()))[0]
        for key, bundle in found.bundles.items()
        if _is_value(bundle)
    }
    new: dict[Key, VirtualTask] = {}
    for key, spec in found.tasks.items():
        if key in values:
            continue
        bundle = found.bundles.get(key)
        inside = [graph[key]] if bundle is None else [graph[task.key] for task in bundle.tasks]
        nbytes = sum(graph[one].nbytes for one in (bundle.exports if bundle else (key,)) if one is not None)
        needed = dict.fromkeys(values.get(one, one) for one in sorted(spec.dependencies, key=repr))
        duration_s = sum(task.duration_s for task in inside)
        computes_s = sum(task.duration_s * task.core_share for task in inside)
        core_share = min(1.0, computes_s / duration_s) if duration_s else 1.0
        new[key] = VirtualTask(duration_s, tuple(needed), nbytes, core_share=core_share)
    return new


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
        self._graphs = graphs
        self._n_graphs = 0
        tokens = count()
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
        return bundled(
            graph,
            wanted,
            self._cluster,
            knows_costs=knows_costs,
            learned_s=learned_s,
            number=self._n_graphs,
        )

    def create(self, found: BundledGraph, submit: Callable[[], None]) -> None:
        """Let Dask create the tasks of a graph by calling `submit`."""
        self._graphs.bundles.expect(found.bundles)
        submit()
        self._graphs.bundles.add(found.bundles)


def _averages(
    keys: Sequence[Key], known: Sequence[Averages], learned_s: Mapping[str, float]
) -> list[Averages]:
    """Return for each task what is known of its prefix."""
    prefixes = [key_split(key) for key in keys]
    by_prefix: dict[str, list[Averages]] = {}
    for prefix, one in zip(prefixes, known, strict=True):
        by_prefix.setdefault(prefix, []).append(one)
    means = {
        prefix: Averages(
            learned_s.get(prefix, fmean(one.duration_s for one in tasks)),
            fmean(one.nbytes for one in tasks),
            max(one.nbytes for one in tasks),
        )
        for prefix, tasks in by_prefix.items()
    }
    return [means[prefix] for prefix in prefixes]
