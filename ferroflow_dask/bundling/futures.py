"""Futures in a Dask graph: a bundled graph must hold them, so that their results stay on the cluster.

In a Dask graph a distributed Future is a `TaskRef`, as other references to tasks are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from dask._task_spec import GraphNode, Task, TaskRef
from dask.highlevelgraph import HighLevelGraph
from dask.typing import Key


def futures_in(graphs: Iterable[Mapping[Key, Any]], keys: Collection[Key]) -> dict[Key, Any]:
    """Return the Futures in graphs by key.

    Parameters
    ----------
    graphs : iterable of mapping
        A later graph is searched only for Futures that the earlier ones do not have.
    keys : collection of Key
        Keys of the wanted Futures.
    """
    missing = set(keys)
    found: dict[Key, Any] = {}
    for part in _parts(graphs):
        if not missing:
            break
        stack = list(part.values())
        while stack:
            value = stack.pop()
            if isinstance(value, TaskRef):
                if type(value) is not TaskRef and value.key in missing:
                    missing.remove(value.key)
                    found[value.key] = value
            elif isinstance(value, GraphNode):
                if isinstance(value, Task) and not missing.isdisjoint(value.dependencies):
                    stack += (*value.args, *value.kwargs.values())
            elif isinstance(value, (tuple, list, set, frozenset)):
                stack += value
            elif isinstance(value, dict):
                stack += value.values()
    return found


def _parts(graphs: Iterable[Mapping[Key, Any]]) -> Iterator[Mapping[Key, Any]]:
    """Yield graphs layer by layer, materialized layers first: iterating over others writes their tasks."""
    for graph in graphs:
        if isinstance(graph, HighLevelGraph):
            yield from sorted(graph.layers.values(), key=lambda layer: not layer.is_materialized())
        else:
            yield graph
