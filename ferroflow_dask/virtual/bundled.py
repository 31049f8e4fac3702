"""Bundled graphs of virtual tasks, cut by the function that the scheduler uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.annotations import BUNDLE_PREFIX, COST_ANNOTATION
from ferroflow_dask.bundling.graphs import Averages, bundle_graph
from ferroflow_dask.bundling.sequence import NO_WORK
from ferroflow_dask.cluster_profile import ClusterProfile
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
    number: int = 0,
) -> tuple[dict[Key, VirtualTask], dict[Key, Key]]:
    """Return a graph in fewer tasks, and for wanted tasks that are no more: the one that yields the result.

    The scheduler is taken to know the mean duration and result size of each task prefix, as from earlier
    runs.

    Parameters
    ----------
    graph : mapping of key to VirtualTask
    wanted : collection of key
    cluster : ClusterProfile
    knows_costs : bool, optional
        Whether the duration and size of each single task are known, as those of ops are.
    number : int, optional
        Of the graph; bundles have it in their keys.
    """
    alone = frozenset(at for at, task in enumerate(graph.values()) if task.annotations or task.failures)
    if len(graph) < _FEWEST or len(alone) == len(graph):
        return dict(graph), {}
    # Numbers as keys: sets of them have the same order in every process.
    keys, parts = list(graph), list(graph.values())
    part: dict[Key, VirtualTask] = dict(enumerate(parts))
    at = {key: n for n, key in enumerate(keys)}
    known = [Averages(one.duration_s, one.nbytes, one.nbytes) for one in parts]
    found = bundle_graph(
        {n: spec_of(n, [at[key] for key in one.dependencies if key in at]) for n, one in enumerate(parts)},
        [at[key] for key in wanted],
        cluster,
        {},
        alone=alone,
        by_key=dict(enumerate(known if knows_costs else _averages(keys, known))),
    )
    # A result that a bundle delivers is as good as the bundle: a task of its own stands for it on a cluster.
    values = {
        n: next(iter(bundle.places.values()))[0]
        for n, bundle in found.bundles.items()
        if len(bundle.tasks) == 1 and isinstance(bundle.tasks[0], NO_WORK)
    }
    # The keys of bundles are random; these are the same in every run.
    names: dict[Key, Key] = {n: key for n, key in enumerate(keys) if n not in values}
    names |= {n: (BUNDLE_PREFIX, number, n[1]) for n in found.bundles if isinstance(n, tuple)}
    names |= {n: names[bundle] for n, bundle in values.items()}
    new: dict[Key, VirtualTask] = {}
    for n, spec in found.tasks.items():
        if n in values:
            continue
        bundle = found.bundles.get(n)
        inside = [part[one.key] for one in bundle.tasks] if bundle is not None else [part[n]]
        needed = dict.fromkeys(names[one] for one in sorted(spec.dependencies, key=repr))
        outside = dict.fromkeys(key for one in inside for key in one.dependencies if key not in at)
        task = replace(inside[0], dependencies=(*needed, *outside))
        if bundle is not None:
            duration_s = sum(one.duration_s for one in inside)
            task = VirtualTask(
                duration_s,
                task.dependencies,
                sum(part[one].nbytes for one in bundle.exports),
                {COST_ANNOTATION: duration_s},
                takes_core=any(one.takes_core for one in inside),
            )
        new[names[n]] = task
    return new, {key: names[n] for n, key in enumerate(keys) if n in values}


class Bundler:
    """Bundles the graphs that arrive, one after the other.

    Parameters
    ----------
    cluster : ClusterProfile
    """

    def __init__(self, cluster: ClusterProfile) -> None:
        self._cluster = cluster
        self._n_graphs = 0
        # For tasks that bundles stand for, the bundle: later graphs may read them.
        self._yields: dict[Key, Key] = {}

    def cut(
        self, graph: Mapping[Key, VirtualTask], wanted: Collection[Key], knows_costs: bool
    ) -> tuple[dict[Key, VirtualTask], list[Key]]:
        """Return a graph in fewer tasks, and the tasks that yield what is wanted."""
        self._n_graphs += 1
        read = {key: self._reading(task) for key, task in graph.items()}
        new, yields = bundled(read, wanted, self._cluster, knows_costs=knows_costs, number=self._n_graphs)
        self._yields |= yields
        return new, list(dict.fromkeys(yields.get(key, key) for key in wanted))

    def _reading(self, task: VirtualTask) -> VirtualTask:
        if self._yields.keys().isdisjoint(task.dependencies):
            return task
        needed = dict.fromkeys(self._yields.get(key, key) for key in task.dependencies)
        return replace(task, dependencies=tuple(needed))


def _averages(keys: Sequence[Key], known: Sequence[Averages]) -> list[Averages]:
    """Return for each task what is known of its prefix."""
    prefixes = [key_split(key) for key in keys]
    by_prefix: dict[str, list[Averages]] = {}
    for prefix, one in zip(prefixes, known, strict=True):
        by_prefix.setdefault(prefix, []).append(one)
    means = {
        prefix: Averages(
            fmean(one.duration_s for one in tasks),
            fmean(one.nbytes for one in tasks),
            max(one.nbytes for one in tasks),
        )
        for prefix, tasks in by_prefix.items()
    }
    return [means[prefix] for prefix in prefixes]
