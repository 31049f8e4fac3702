"""The order of a graph: longest branches first if costs are known, Dask's for bundles; results that wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from dask._task_spec import GraphNode, Task, TaskRef
from dask.order import order
from overhead_graphs import stencil, tree

from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.graphs import written_task
from ferroflow_dask.cost import AnalyticCost, estimate
from ferroflow_dask.graph import Graph, generate_graph, upward_ranks
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.upstream import spec_of

WORKERS = 8


def tasks_of(graph: Graph) -> dict[Any, VirtualTask]:
    """Return a graph's ops as they are lowered, with their costs declared."""
    costs = estimate(graph, AnalyticCost())
    ranks = upward_ranks(graph, costs)
    key_of = {op.id: (f"{op.op_type}-0a1", op.id) for op in graph.live_ops}
    producer_of = {value: op for op in graph.live_ops for value in op.outputs}
    return {
        key_of[op.id]: VirtualTask(
            costs[op.id],
            tuple(dict.fromkeys(key_of[producer_of[v].id] for v in op.operands if v in producer_of)),
            nbytes=1000,
            annotations={"ferroflow_cost": costs[op.id], "ferroflow_rank": ranks[op.id]},
        )
        for op in graph.live_ops
    }


def run(policy: str, tasks: dict[Any, VirtualTask], before: Any = None) -> tuple[int, float]:
    """Return the most results that were held at once for other tasks, and the makespan [s].

    `before` is called with the cluster.
    """
    nodes = {
        key: Task(key, len, *(TaskRef(needed) for needed in task.dependencies)) for key, task in tasks.items()
    }
    needed = {dependency for task in tasks.values() for dependency in task.dependencies}
    cluster = VirtualCluster(WORKERS, policy=policy, latency_s=5e-4, bandwidth=1e8)
    if before is not None:
        before(cluster)
    cluster.submit(tasks, keep=[key for key in tasks if key not in needed], order=order(nodes))
    makespan_s = cluster.run()
    cluster.check()
    last_use: dict[Any, float] = {}
    for execution in cluster.record.executions:
        for key in tasks[execution.key].dependencies:
            last_use[key] = max(last_use.get(key, 0.0), execution.stop)
    changes = [
        change
        for execution in cluster.record.executions
        if execution.key in last_use
        for change in ((execution.stop, 1), (last_use[execution.key], -1))
    ]
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most, makespan_s


@pytest.mark.parametrize(
    ("name", "sizes", "part"),
    [
        ("wide", {"width": 64, "depth": 10, "skew": 0.5}, 0.95),
        ("wide", {"width": 40, "depth": 5, "skew": 0.25}, 0.95),
        ("large-transformer", {}, 1.001),
    ],
    ids=["many long chains", "few of many chains are long", "stacked blocks"],
)
def test_ranks_save_time_and_cost_no_memory(name: str, sizes: dict[str, Any], part: float) -> None:
    tasks = tasks_of(generate_graph(name, **sizes))
    most_of_dask, makespan_of_dask = run("dask", tasks)
    most, makespan_s = run("ferroflow", tasks)
    assert most <= 1.05 * most_of_dask
    assert makespan_s < part * makespan_of_dask


def tree_of_four(n_leaves: int) -> dict[Any, VirtualTask]:
    """Return a reduction in which each task reads four others."""
    tasks = {(0, i): VirtualTask(0.02, nbytes=1000) for i in range(n_leaves)}
    level, n = 0, n_leaves
    while n > 1:
        level, n = level + 1, n // 4
        for i in range(n):
            tasks[level, i] = VirtualTask(0.02, tuple((level - 1, 4 * i + j) for j in range(4)), nbytes=1000)
    return tasks


@pytest.mark.parametrize(
    "tasks",
    [tree_of_four(256), tree(512), stencil(800)],
    ids=["tree of four inputs each", "tree of pairs", "stencil"],
)
def test_bundles_hold_as_few_results_as_in_the_order_of_dask(
    tasks: dict[Any, VirtualTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bundle(key: Any, dependencies: Sequence[Any]) -> GraphNode:
        """Return a bundle of a task and of one before it, which takes no time."""
        first = spec_of(("before", key), dependencies)
        second = spec_of(key, [first.key])
        places = {needed: (needed, None) for needed in dependencies}
        return written_task(key, Bundle((first, second), (key,), places), tasks[key].duration_s)

    def add_first_tasks(cluster: VirtualCluster) -> None:
        cluster.tasks |= {("before", key): VirtualTask(0.0) for key in tasks}

    most_of_dask, _ = run("dask", tasks)
    monkeypatch.setattr("ferroflow_dask.virtual.sent.spec_of", bundle)
    most, _ = run("ferroflow", tasks, add_first_tasks)
    assert most <= 1.2 * most_of_dask
