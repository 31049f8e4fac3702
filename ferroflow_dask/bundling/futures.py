"""The Futures in a graph of Dask's: as long as somebody has them, their results stay on the cluster.

What distributed calls a Future is to Dask's graphs a reference to a task that has other uses, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from dask._task_spec import GraphNode, Task, TaskRef
from dask.highlevelgraph import HighLevelGraph
from dask.typing import Key


def futures_in(graphs: Iterable[Mapping[Key, Any]], keys: Collection[Key]) -> dict[Key, Any]:
    """Return the Futures in some graphs by their keys.

    Parameters
    ----------
    graphs : iterable of mapping
        Later ones are looked at only for what was not in those before.
    keys : collection of Key
        Of the Futures that are wanted.
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
    """Yield graphs layer by layer, those last that have to be written as tasks for it."""
    for graph in graphs:
        if isinstance(graph, HighLevelGraph):
            yield from sorted(graph.layers.values(), key=lambda layer: not layer.is_materialized())
        else:
            yield graph
