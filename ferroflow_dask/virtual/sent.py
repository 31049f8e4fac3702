"""Graphs of virtual tasks as clients send them, and what is known of the tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from dask._task_spec import GraphNode
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.plan import Plan
from ferroflow_dask.bundling.rewrite import rewrite
from ferroflow_dask.bundling.snapshot import SentGraph, Snapshot
from ferroflow_dask.virtual.task import VirtualTask
from ferroflow_dask.virtual.upstream import spec_of

#: Annotation of tasks that fail. It keeps them separate, and Dask does not get it.
FAILURES = "failures"


def specs_of(graph: Mapping[Key, VirtualTask]) -> dict[Key, GraphNode]:
    """Return virtual tasks as Dask's."""
    return {key: spec_of(key, task.dependencies) for key, task in graph.items()}


def annotations_of(graph: Mapping[Key, VirtualTask]) -> dict[str, dict[Key, Any]]:
    """Return the annotations of tasks by type and key."""
    found: dict[str, dict[Key, Any]] = {}
    for key, task in graph.items():
        own = {**task.annotations, FAILURES: task.failures} if task.failures else task.annotations
        for annotation, value in own.items():
            found.setdefault(annotation, {})[key] = value
    return found


def sent_graph(
    graph: Mapping[Key, VirtualTask],
    wanted: Collection[Key],
    order: Mapping[Key, int] | None = None,
    *,
    knows_costs: bool = False,
) -> SentGraph:
    """Return virtual tasks as a graph that a client sends; the parameters are those of `submit`."""
    averages = {key: _averages([task]) for key, task in graph.items() if knows_costs}
    return SentGraph(specs_of(graph), frozenset(wanted), annotations_of(graph), order, averages=averages)


def averages_by_prefix(
    graph: Mapping[Key, VirtualTask], learned_s: Mapping[str, float] | None = None
) -> dict[str, Averages]:
    """Return the averages of each task prefix; `learned_s` has other durations of some prefixes [s]."""
    by_prefix: dict[str, list[VirtualTask]] = {}
    for key, task in graph.items():
        by_prefix.setdefault(key_split(key), []).append(task)
    found = {prefix: _averages(tasks) for prefix, tasks in by_prefix.items()}
    other = {prefix: duration_s for prefix, duration_s in (learned_s or {}).items() if prefix in found}
    return found | {prefix: replace(found[prefix], duration_s=value) for prefix, value in other.items()}


def _averages(tasks: Collection[VirtualTask]) -> Averages:
    nbytes = [task.nbytes for task in tasks]
    return Averages(fmean(task.duration_s for task in tasks), fmean(nbytes), max(nbytes))


def planned(graph: SentGraph, snapshot: Snapshot, token: str) -> Plan:
    """Return the plan of a graph, its tasks in the order in which they should run."""
    plan = rewrite(graph, replace(snapshot, shares_objects=True), token)
    tasks = {key: plan.tasks[key] for key in sorted(plan.tasks, key=plan.order.__getitem__)}
    return replace(plan, tasks=tasks, order={key: place for place, key in enumerate(tasks)})
