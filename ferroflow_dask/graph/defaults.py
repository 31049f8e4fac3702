"""Inputs with a default: initializers that a model lists as inputs, too, so that a caller may give others.

A graph has them as constants. One in which some of them are given has these as inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

import onnx

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Source, TensorSpec
from ferroflow_dask.graph.protos import spec_from_type
from ferroflow_dask.graph.to_onnx import to_onnx

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
    sources = tuple(_as_input(source) if source.name in names else source for source in graph.sources)
    opened = replace(graph, sources=sources, specs={})
    # Shapes may have come of the very values that are not known any more, as that of a reshape does.
    found = _inferred(opened)
    kept = {value: replace(spec, shape=None) for value, spec in graph.specs.items()}
    return replace(opened, specs={value: found.get(value, spec) for value, spec in kept.items()})


def _as_input(source: Source) -> Source:
    spec = TensorSpec() if source.declared is None else source.declared
    return replace(source, spec=spec, value=None, is_placed=False, known=None, declared=None)


def _inferred(graph: Graph) -> dict[str, TensorSpec]:
    """Return what ONNX can say of values that ops produce; of those with an unknown type it says nothing."""
    try:
        model = onnx.shape_inference.infer_shapes(to_onnx(graph), data_prop=True).graph
    except (onnx.shape_inference.InferenceError, ValueError):
        return {}
    found = {entry.name: spec_from_type(entry.type) for entry in (*model.value_info, *model.output)}
    return {name: spec for name, spec in found.items() if spec.dtype is not None}
