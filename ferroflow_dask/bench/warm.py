"""Bring a cluster to the state in which it is measured: code imported, connections open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from distributed import Client

from ferroflow_dask.graph import Graph, GraphBuilder, Op
from ferroflow_dask.kernels import compile_op
from ferroflow_dask.lowering.collection import bind

#: Tasks of the small graph that each thread runs.
_TASKS_PER_THREAD = 4


def warm_up(client: Client, graph: Graph) -> None:
    """Let every worker compile one op of each kind in a graph, then run a small graph of another kind.

    Nothing is learned of the graph itself: the small one has no operator and no task name of it.
    """
    one_of_each = {op.kind: op for op in graph.live_ops}
    client.run(_compile, [(op, dict(graph.opsets)) for op in one_of_each.values()])
    n_tasks = _TASKS_PER_THREAD * sum(client.nthreads().values())
    small = bind(_fan(n_tasks), {}, prefix=lambda _: "warm-up")
    client.compute(small).result()


def _compile(calls: Sequence[tuple[Op, Mapping[str, int]]]) -> None:
    for op, opsets in calls:
        compile_op(op, opsets)


def _fan(n_ops: int) -> Graph:
    builder = GraphBuilder("warm-up")
    root = builder.constant(np.zeros(1, np.float32), "root")
    builder.output(*(builder.op("Relu", root) for _ in range(n_ops)))
    return builder.build()
