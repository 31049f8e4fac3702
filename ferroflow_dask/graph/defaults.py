"""Inputs with a default: initializers that a model lists as inputs, too, so that a caller may give others.

A graph has them as constants. One in which some of them are given has these as inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

from ferroflow_dask.graph.inference import inferred
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import UNKNOWN, Source, TensorSpec

#: Of each graph those with inputs in place of defaults, the same for the same names: workers know them open.
_made: WeakKeyDictionary[Graph, dict[frozenset[str], Graph]] = WeakKeyDictionary()


def with_inputs(graph: Graph, given: Iterable[str]) -> Graph:
    """Return a graph in which those of its defaults that are given are inputs; itself if none is.

    Parameters
    ----------
    graph : Graph
    given : iterable of str
        Names of values that a caller gives, among them those of other inputs, and wrong ones.
    """
    names = frozenset(name for name in given if name in graph.defaults)
    if not names:
        return graph
    made = _made.setdefault(graph, {})
    if names not in made:
        made[names] = _opened(graph, names)
    return made[names]


def _opened(graph: Graph, names: Collection[str]) -> Graph:
    sources = tuple(
        _as_input(source, graph.defaults[source.name]) if source.name in names else source
        for source in graph.sources
    )
    # Shapes may have come of the very values that are not known any more, as that of a reshape does.
    doubtful = _reached(graph, names)
    opened = replace(graph, sources=sources, specs={})
    found = inferred(opened)
    specs = {
        value: _of_both(found.get(value, UNKNOWN), spec) if value in doubtful else spec
        for value, spec in graph.specs.items()
    }
    return replace(opened, specs=specs)


def _as_input(source: Source, spec: TensorSpec) -> Source:
    return replace(source, spec=spec, value=None, is_scattered=False, known=None, declared=None)


def _reached(graph: Graph, names: Collection[str]) -> set[str]:
    """Return some values with all that are computed from them."""
    reached = set(names)
    for op in graph.topological_order:
        if not reached.isdisjoint(op.operands):
            reached.update(op.outputs)
    return reached


def _of_both(found: TensorSpec, before: TensorSpec) -> TensorSpec:
    """Return what is found of a value, or its type as it was before where nothing is."""
    return replace(before, shape=None) if found.dtype is None else found
