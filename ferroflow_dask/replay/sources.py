"""Jobs of graphs of ops and of Dask collections, with durations that are estimated, learned or given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dask._task_spec import Alias, DataNode, GraphNode, convert_legacy_graph
from dask.base import collections_to_expr, is_dask_collection, unpack_collections
from dask.core import flatten
from dask.typing import Key
from dask.utils import key_split
from distributed import Client

from ferroflow_dask.clients import check_synchronous
from ferroflow_dask.cost import AnalyticCost, CostModel, estimate
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN
from ferroflow_dask.replay.job import Job, JobGraph, in_static_order
from ferroflow_dask.virtual import VirtualTask
from ferroflow_dask.virtual.task import sinks

#: Durations [s] or sizes [B] of tasks: by key or prefix, by a function of the key, or one for all.
Given = Mapping[Any, float] | Callable[[Key], float] | float


def job_of_graph(graph: Graph, costs: CostModel | None = None) -> Job:
    """Return the job of a graph of ops, one task for each op.

    Parameters
    ----------
    graph : Graph
    costs : CostModel, optional
        `AnalyticCost` if left out. Ops whose duration it does not know take no time.
    """
    seconds = estimate(graph, costs or AnalyticCost())
    ops = graph.live_ops
    tasks: dict[Key, VirtualTask] = {}
    keys: list[Key] = [(op.op_type, at) for at, op in enumerate(ops)]
    for key, op, needed in zip(keys, ops, graph.live_edges, strict=True):
        nbytes = sum(graph.spec(value).nbytes or 0 for value in op.outputs if value)
        sleeps = op.domain == FERROFLOW_DOMAIN and op.op_type == "Slow"
        dependencies = tuple(keys[earlier] for earlier in dict.fromkeys(needed))
        tasks[key] = VirtualTask(
            seconds.get(op.id, 0.0), dependencies, nbytes, core_share=0.0 if sleeps else 1.0
        )
    return Job((JobGraph(tasks, tuple(sinks(tasks)), knows_costs=True),), name=graph.name)


def job_of_collection(
    collection: Any,
    *,
    durations_s: Given | None = None,
    nbytes: Given = 0.0,
    client: Client | None = None,
    optimize_graph: bool = True,
) -> Job:
    """Return the job of any Dask collection, or of several in a list.

    Parameters
    ----------
    collection : Dask collection, or list of them
    durations_s : mapping, callable or float, optional
        Of tasks, by key or by prefix [s].
    nbytes : mapping, callable or float, optional
        Of results [B].
    client : distributed.Client, optional
        Durations and sizes that are not given are those that its cluster has learned.
    optimize_graph : bool, optional
        Whether Dask optimizes the graph first, as `compute` does.

    Raises
    ------
    UsageError
        It is no collection, or the duration of a task is unknown.
    """
    found, _ = unpack_collections(collection)
    if not found or not all(map(is_dask_collection, found)):
        raise UsageError(
            f"simulate needs a Dask collection, a graph or a record, got {type(collection).__name__}"
        )
    expr = collections_to_expr(found, optimize_graph=optimize_graph)
    if optimize_graph:
        expr = expr.optimize()
    specs: Mapping[Key, GraphNode] = convert_legacy_graph(expr.__dask_graph__())
    learned = learned_on(client) if client is not None else {}
    wanted = set(flatten(expr.__dask_keys__()))
    tasks: dict[Key, VirtualTask] = {}
    for key, spec in specs.items():
        dependencies = tuple(sorted(spec.dependencies, key=repr))
        if isinstance(spec, DataNode | Alias):
            tasks[key] = VirtualTask(0.0, dependencies)
            continue
        known_s, known_nbytes = learned.get(key_split(key), (None, 0.0))
        duration_s = _value(durations_s, key, known_s)
        if duration_s is None:
            raise UsageError(
                f"the duration of {key_split(key)!r} must be known, got none; give durations_s={{"
                f"{key_split(key)!r}: SECONDS}} or a client whose cluster has run such tasks"
            )
        size = _value(nbytes, key, None) or known_nbytes
        tasks[key] = VirtualTask(duration_s, dependencies, int(size))
    tasks = in_static_order(tasks)
    return Job((JobGraph(tasks, tuple(key for key in tasks if key in wanted)),))


def _value(given: Given | None, key: Key, otherwise: float | None) -> float | None:
    if isinstance(given, Mapping):
        return given.get(key, given.get(key_split(key), otherwise))
    if callable(given):
        return given(key)
    return otherwise if given is None else given


def learned_on(client: Client) -> dict[str, tuple[float, float]]:
    """Return duration [s] and result size [B] of each task prefix that a cluster has learned."""
    check_synchronous(client, "simulate")
    found: dict[str, tuple[float, float]] = client.run_on_scheduler(_averages)
    return found


def _averages(dask_scheduler: Any) -> dict[str, tuple[float, float]]:
    from ferroflow_dask.scheduler.learned import learned_on

    found = {
        name: (prefix.duration_average, 0.0)
        for name, prefix in dask_scheduler.task_prefixes.items()
        if prefix.duration_average >= 0
    }
    return found | learned_on(dask_scheduler).costs.means()
