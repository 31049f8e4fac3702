"""Bundled graphs of virtual tasks, cut by the function that the scheduler uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from dask._task_spec import GraphNode
from dask.order import order
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.annotations import BUNDLE_PREFIX
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.graphs import Averages, bundle_graph
from ferroflow_dask.bundling.sequence import NO_WORK
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.virtual.task import VirtualTask
from ferroflow_dask.virtual.upstream import spec_of

#: A step is late if it takes so many times its expected duration: an idle worker then takes the rest of the
#: bundle, as `policy.stealing` does. Virtual tasks have no steps, so the rest are tasks from the start.
_LATE = 4.0
#: And so much longer [s].
_LATE_S = 0.05
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
    at: dict[Key, int] = {key: n for n, key in enumerate(keys)}
    known = [Averages(one.duration_s, one.nbytes, one.nbytes) for one in parts]
    expected = known if knows_costs else _averages(keys, known)
    found = bundle_graph(
        {n: spec_of(n, [at[key] for key in one.dependencies if key in at]) for n, one in enumerate(parts)},
        [at[key] for key in wanted],
        cluster,
        {},
        alone=alone,
        by_key=dict(enumerate(expected)),
        shares_objects=True,
    )
    # A result that a bundle delivers is as good as the bundle: a task of its own stands for it on a cluster.
    values = {
        n: next(iter(bundle.places.values()))[0]
        for n, bundle in found.bundles.items()
        if len(bundle.tasks) == 1 and isinstance(bundle.tasks[0], NO_WORK)
    }
    inside = {n: [one.key for one in bundle.tasks] for n, bundle in found.bundles.items() if n not in values}
    prefixes = [key_split(key) for key in keys]
    facts: dict[Key, tuple[str, float, float]] = {
        n: (prefixes[n], parts[n].duration_s, expected[n].duration_s) for n in range(len(keys))
    }
    after = _stopped(inside, found.bundles, facts)
    # The keys of bundles are random; these are the same in every run.
    names: dict[Key, Key] = {n: key for n, key in enumerate(keys) if n not in values or n in after}
    names |= {n: (BUNDLE_PREFIX, number, n[1]) for n in found.bundles if isinstance(n, tuple)}
    names |= {n: names[bundle] for n, bundle in values.items() if n not in after}
    new: dict[Key, VirtualTask] = {}
    for n, spec in _in_order(found.tasks):
        if n in values:
            continue
        run = [part[one] for one in inside.get(n, [n])]
        needed = dict.fromkeys(names[one] for one in sorted(spec.dependencies, key=repr))
        outside = dict.fromkeys(key for one in run for key in one.dependencies if key not in at)
        new[names[n]] = replace(run[0], dependencies=(*needed, *outside))
        if n in inside:
            exports = [
                part[one].nbytes for one in found.bundles[n].exports if one is not None and one not in after
            ]
            new[names[n]] = _whole(run, new[names[n]].dependencies, sum(exports))
    for n, bundle in after.items():
        read = dict.fromkeys(names[at[key]] if key in at else key for key in part[n].dependencies)
        new[names[n]] = replace(part[n], dependencies=(*read, names[bundle]))
    return new, {key: names[n] for n, key in enumerate(keys) if n in values and n not in after}


def _in_order(tasks: Mapping[Key, GraphNode]) -> list[tuple[Key, GraphNode]]:
    """Return tasks in Dask's order, which is the same in every run for numbers as keys."""
    number = {key: i for i, key in enumerate(tasks)}
    numbered = {number[key]: [number[one] for one in task.dependencies] for key, task in tasks.items()}
    turn = order({i: spec_of(i, sorted(needed)) for i, needed in numbered.items()})
    return sorted(tasks.items(), key=lambda item: turn[number[item[0]]])


def _whole(tasks: Sequence[VirtualTask], dependencies: tuple[Key, ...], nbytes: int) -> VirtualTask:
    """Return the task that runs some tasks one after another."""
    duration_s = sum(one.duration_s for one in tasks)
    computes_s = sum(one.duration_s * one.core_share for one in tasks)
    core_share = min(1.0, computes_s / duration_s) if duration_s else 1.0
    return VirtualTask(duration_s, dependencies, nbytes, core_share=core_share, is_bundle=True)


def _stopped(
    inside: Mapping[Key, list[Key]],
    bundles: Mapping[Key, Bundle],
    facts: Mapping[Key, tuple[str, float, float]],
) -> dict[Key, Key]:
    """Take the tasks out of bundles that run after these have stopped; return the bundle of each.

    `facts` has the prefix, the duration and the expected duration of each task [s].
    """
    after: dict[Key, Key] = {}
    for name, tasks in inside.items():
        if len(bundles[name].delivered) == len(tasks):
            n_run = _n_run([facts[one] for one in tasks])
            after |= dict.fromkeys(tasks[n_run:], name)
            del tasks[n_run:]
    return after


def _n_run(tasks: Sequence[tuple[str, float, float]]) -> int:
    """Return how many tasks of a bundle run in it, by prefix, duration and expected duration of each [s]."""
    for n, (_, duration_s, _) in enumerate(tasks, 1):
        each_s = sum(expected_s for _, _, expected_s in tasks) / len(tasks)
        if duration_s - each_s > max(_LATE_S, _LATE * each_s):
            return n
    return len(tasks)


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
