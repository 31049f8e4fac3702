"""Bundled graphs of virtual tasks, cut by the function that the scheduler uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dask._task_spec import GraphNode, Task, TaskRef
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.annotations import COST_ANNOTATION
from ferroflow_dask.bundling.graphs import Averages, bundle_graph
from ferroflow_dask.bundling.sequence import NO_WORK
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.virtual.task import VirtualTask

#: Smaller graphs are not bundled, as in `scheduler.graphs.arrival` [tasks].
_FEWEST = 10


def bundled(
    graph: Mapping[Key, VirtualTask], wanted: Collection[Key], cluster: ClusterProfile
) -> tuple[dict[Key, VirtualTask], list[Key]]:
    """Return a graph in fewer tasks, and the tasks that yield what is wanted.

    The scheduler is taken to know the mean duration and result size of each task prefix, as from earlier
    runs.

    Parameters
    ----------
    graph : mapping of key to VirtualTask
    wanted : collection of key
    cluster : ClusterProfile
    """
    alone = {key for key, task in graph.items() if task.annotations or task.failures}
    if len(graph) < _FEWEST or len(alone) == len(graph):
        return dict(graph), list(wanted)
    tasks: dict[Key, GraphNode] = {
        key: Task(key, _nothing, *(TaskRef(needed) for needed in task.dependencies))
        for key, task in graph.items()
    }
    found = bundle_graph(tasks, frozenset(wanted), cluster, _averages(graph), alone=alone)
    # A result that a bundle delivers is as good as the bundle: a task of its own stands for it on a cluster.
    yields: dict[Key, Key] = {}
    for key, bundle in found.bundles.items():
        if len(bundle.tasks) == 1 and isinstance(bundle.tasks[0], NO_WORK):
            yields[key] = next(iter(bundle.places.values()))[0]
    new: dict[Key, VirtualTask] = {}
    for key, task in found.tasks.items():
        if key in yields:
            continue
        needed = tuple(dict.fromkeys(yields.get(one, one) for one in task.dependencies))
        inside = found.bundles.get(key)
        if inside is None:
            own = graph[key]
            new[key] = VirtualTask(
                own.duration_s, needed, own.nbytes, own.annotations, own.failures, own.takes_core
            )
            continue
        parts = [graph[one.key] for one in inside.tasks]
        duration_s = sum(part.duration_s for part in parts)
        nbytes = sum(graph[one].nbytes for one in inside.exports)
        is_computing = any(part.takes_core for part in parts)
        annotations: dict[str, Any] = {COST_ANNOTATION: duration_s}
        new[key] = VirtualTask(duration_s, needed, nbytes, annotations, takes_core=is_computing)
    return new, list(dict.fromkeys(yields.get(key, key) for key in wanted))


def _averages(graph: Mapping[Key, VirtualTask]) -> dict[str, Averages | None]:
    by_prefix: dict[str, list[VirtualTask]] = {}
    for key, task in graph.items():
        by_prefix.setdefault(key_split(key), []).append(task)
    return {
        prefix: Averages(
            sum(task.duration_s for task in tasks) / len(tasks),
            sum(task.nbytes for task in tasks) / len(tasks),
            max(task.nbytes for task in tasks),
        )
        for prefix, tasks in by_prefix.items()
    }


def _nothing(*inputs: object) -> None:
    """Stand for a task's function."""
