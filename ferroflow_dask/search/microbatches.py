"""Microbatches: copies of a graph that read the same weights."""

from __future__ import annotations

from dataclasses import replace

from ferroflow_dask.graph.ir import Graph


def repeated(graph: Graph, n: int) -> tuple[Graph, dict[str, tuple[str, int]]]:
    """Return a graph with copies of all ops and inputs, and by op, its name in the graph and its copy.

    Parameters
    ----------
    graph : Graph
        Of one microbatch.
    n : int
        Number of copies, the graph itself among them.
    """
    constants = graph.constants
    sources, ops, results = list(graph.sources), list(graph.ops), list(graph.outputs)
    specs = dict(graph.specs)
    origin = {op.name: (op.name, 0) for op in graph.ops}
    step = 1 + max([source.id for source in graph.sources] + [op.id for op in graph.ops])
    for copy in range(1, n):

        def named(value: str, copy: int = copy) -> str:
            return value if not value or value in constants else f"{value}, microbatch {copy}"

        for source in graph.sources:
            if source.is_input:
                sources.append(replace(source, id=source.id + copy * step, name=named(source.name)))
        for op in graph.ops:
            inputs, outputs, captured = (
                tuple(map(named, values)) for values in (op.inputs, op.outputs, op.captured)
            )
            again = replace(op, id=op.id + copy * step, name=named(op.name))
            ops.append(replace(again, inputs=inputs, outputs=outputs, captured=captured))
            origin[named(op.name)] = (op.name, copy)
        specs |= {named(value): spec for value, spec in graph.specs.items()}
        results += map(named, graph.outputs)
    return replace(graph, sources=tuple(sources), ops=tuple(ops), outputs=tuple(results), specs=specs), origin
