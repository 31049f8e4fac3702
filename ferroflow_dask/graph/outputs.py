"""Graphs with some of their outputs: what only the others need is not computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from ferroflow_dask.exceptions import UnknownNameError
from ferroflow_dask.graph.ir import Graph

#: Of each graph those with fewer outputs, the same for the same names: workers know them open.
_made: WeakKeyDictionary[Graph, dict[tuple[str, ...], Graph]] = WeakKeyDictionary()


def with_outputs(graph: Graph, names: Sequence[str]) -> Graph:
    """Return a graph with these outputs only, in this order; itself if they are its own.

    Raises
    ------
    UnknownNameError
        The graph has no such output.
    """
    for name in names:
        if name not in graph.outputs:
            raise UnknownNameError.of("output", name, graph.outputs)
    wanted = tuple(names)
    if wanted == graph.outputs:
        return graph
    made = _made.setdefault(graph, {})
    if wanted not in made:
        made[wanted] = replace(graph, outputs=wanted)
    return made[wanted]
