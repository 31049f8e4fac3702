"""How a model takes batches: any number of rows at once, or as many as it was exported for.

Exporters often fix the batch, most of them to one. Where the fixed number only stands in the inputs, and in
the target shapes of reshapes, it can be freed; ONNX's shape inference proves that it has been. That rows
do not depend on each other, it cannot prove: who frees a batch has to try it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ferroflow_dask.graph.inference import inferred
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Dim, Source, TensorSpec

#: Names the dimension along which rows are independent.
BATCH = "ferroflow_batch"


@dataclass(frozen=True, slots=True, eq=False)
class Batching:
    """A graph that takes batches, and how.

    Parameters
    ----------
    graph : Graph
    rows : int or None
        How many rows it takes at a time; None for any number.
    freed_of : int or None
        The number that was fixed and could be freed.
    """

    graph: Graph
    rows: int | None = None
    freed_of: int | None = None

    def __str__(self) -> str:
        if self.rows is not None:
            return f"its batch is fixed to {self.rows} and its shapes depend on it: fed {self.rows} at a time"
        return "takes any batch" if self.freed_of is None else "its batch was fixed and has been freed"


def batching_of(graph: Graph, batched: Mapping[str, TensorSpec]) -> Batching:
    """Return how a graph takes batches.

    Parameters
    ----------
    graph : Graph
    batched : mapping of str to TensorSpec
        The inputs that are batched along their first dimension, and what is known of their values.
    """
    first = [_first(graph.inputs[name]) for name in batched]
    fixed = {dim for dim in first if isinstance(dim, int)}
    if not fixed:
        return Batching(graph)
    rows = min(fixed)
    if len(fixed) == 1:
        freed = _freed(graph, batched, rows)
        outputs = output_specs(freed, _with_batch(freed, batched))
        if all(_first(outputs[name]) == BATCH for name in freed.outputs):
            return Batching(freed, freed_of=rows)
    return Batching(graph, rows=rows)


def output_specs(graph: Graph, inputs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return what ONNX can say of a graph's outputs, given more about its inputs."""
    found = inferred(graph, inputs)
    return {name: found.get(name, graph.spec(name)) for name in graph.outputs}


def _with_batch(graph: Graph, batched: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    specs = {name: graph.inputs[name] for name in batched}
    return {name: TensorSpec(spec.dtype, (BATCH, *(spec.shape or ())[1:])) for name, spec in specs.items()}


def _first(spec: TensorSpec) -> Dim:
    return spec.shape[0] if spec.shape else None


def _freed(graph: Graph, batched: Mapping[str, TensorSpec], rows: int) -> Graph:
    """Return the graph without the number of rows in its inputs and in what reshapes are told."""
    targets = {op.inputs[1] for op in graph.live_ops if op.op_type == "Reshape" and not op.domain}
    others = {
        value
        for op in graph.live_ops
        for place, value in enumerate(op.operands)
        if not (op.op_type == "Reshape" and not op.domain and place == 1)
    }
    return replace(
        graph,
        sources=tuple(
            _freed_source(source, source.name in batched, source.name in targets - others, rows)
            for source in graph.sources
        ),
        specs={},  # which have the number in them
    )


def _freed_source(source: Source, is_batched: bool, is_target: bool, rows: int) -> Source:
    if is_batched:
        return replace(source, spec=TensorSpec(source.spec.dtype, (BATCH, *(source.spec.shape or ())[1:])))
    if is_target and source.is_small:
        target = np.array(source.array)
        if target.ndim == 1 and len(target) and target[0] == rows:
            target[0] = 0  # "as many as the input has"
            return replace(source, value=target, is_scattered=False)
    return source
