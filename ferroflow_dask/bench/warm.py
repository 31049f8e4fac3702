"""Bring a cluster to the state in which it is measured: code imported, connections open."""

from __future__ import annotations

import gc
import operator
import uuid
from collections.abc import Mapping, Sequence

from distributed import Client

from ferroflow_dask.graph import Graph, Op
from ferroflow_dask.kernels import compile_op

#: Tasks that each thread runs.
_TASKS_PER_THREAD = 4


def warm_up(client: Client, graph: Graph) -> None:
    """Let every worker compile one op of each kind in a graph, then run a few tasks that are no ops.

    Nothing is learned of the graph itself: the tasks have none of its operators and names.
    """
    one_of_each = {op.kind: op for op in graph.live_ops}
    client.run(_compile, [(op, dict(graph.opsets)) for op in one_of_each.values()])
    n_tasks = _TASKS_PER_THREAD * sum(client.nthreads().values())
    # Named, since Dask would learn durations for ops of the functions' own names, `neg` and `add`.
    root = client.submit(operator.neg, 1, key=f"warm-up-{uuid.uuid4()}")
    client.gather(client.map(operator.add, [root] * n_tasks, range(n_tasks), key="warm-up", pure=False))
    # With all that is imported, a full collection stops the scheduler of a local cluster, which runs in
    # this process, for 0.1 s. What exists now stays: the collector need not look at it again.
    gc.collect()
    gc.freeze()


def _compile(calls: Sequence[tuple[Op, Mapping[str, int]]]) -> None:
    for op, opsets in calls:
        compile_op(op, opsets)
