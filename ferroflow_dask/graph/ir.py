"""The graph: sources, operators and the named values between them.

This module owns what a graph *is* and when it is well formed. It knows nothing of how long an
operator takes, how it is computed, or where.
"""

from __future__ import annotations

import graphlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ferroflow_dask.exceptions import GraphError
from ferroflow_dask.graph.nodes import UNKNOWN, Op, Source, TensorSpec


@dataclass(frozen=True, eq=False)
class Graph:
    """An immutable directed acyclic graph of operators.

    Parameters
    ----------
    name : str
    sources : tuple of Source
        Constants become read-only, as results may be the very arrays; those given are not changed or copied.
    ops : tuple of Op
        In any order.
    outputs : tuple of str
        The values that a computation of the graph yields.
    specs : mapping of str to TensorSpec
        What is known of the values that ops produce; absent ones are unknown.
    opsets : mapping of str to int
        Version of each operator domain.

    Raises
    ------
    GraphError
        On duplicate names or ids, an unknown input, an output that nothing produces, a cycle.

    See Also
    --------
    ferroflow_dask.graph.Builder : builds a graph op by op.
    ferroflow_dask.graph.generate_graph : returns one of the built-in graphs.
    ferroflow_dask.graph.graph_from_onnx : imports an ONNX model.
    ferroflow_dask.Model : computes a graph with Dask.
    """

    name: str
    sources: tuple[Source, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    opsets: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", MappingProxyType(dict(self.specs)))
        object.__setattr__(self, "opsets", MappingProxyType(dict(self.opsets)))
        object.__setattr__(self, "sources", tuple(source.read_only() for source in self.sources))
        self._check_names()
        self._check_operands()

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only mappings do not pickle; what was derived is derived again.
        return Graph, (self.name, self.sources, self.ops, self.outputs, dict(self.specs), dict(self.opsets))

    def _check_names(self) -> None:
        ids: dict[int, str] = {}
        numbered = [
            *((source.id, source.name) for source in self.sources),
            *((op.id, op.name) for op in self.ops),
        ]
        for node_id, name in numbered:
            if node_id in ids:
                raise GraphError(f"{name!r} and {ids[node_id]!r} have the same id {node_id}")
            ids[node_id] = name
        op_names: set[str] = set()
        values = set()
        for source in self.sources:
            if source.name in values:
                raise GraphError(f"two sources are named {source.name!r}; names must be unique")
            values.add(source.name)
        for op in self.ops:
            if op.name in op_names:
                raise GraphError(f"two ops are named {op.name!r}; names must be unique")
            op_names.add(op.name)
            for value in filter(None, op.outputs):
                if value in values:
                    raise GraphError(f"op {op.name!r} produces {value!r}, a name that is already taken")
                values.add(value)

    def _check_operands(self) -> None:
        known = {source.name for source in self.sources} | self.producers.keys()
        for op in self.ops:
            for value in op.operands:
                if value not in known:
                    raise GraphError(f"op {op.name!r} reads {value!r}, which nothing produces")
        for value in self.outputs:
            if value not in known:
                raise GraphError(f"output {value!r} of graph {self.name!r} is produced by nothing")
        _ = self.topological_order

    @cached_property
    def producers(self) -> dict[str, Op]:
        """The op that computes each value; sources are not in it."""
        return {value: op for op in self.ops for value in op.outputs if value}

    @cached_property
    def predecessors(self) -> dict[int, tuple[Op, ...]]:
        """For each op's id the ops whose values it reads, each once, in argument order."""
        return {
            op.id: tuple(dict.fromkeys(self.producers[v] for v in op.operands if v in self.producers))
            for op in self.ops
        }

    @cached_property
    def topological_order(self) -> tuple[Op, ...]:
        """Ops so that each comes after those it reads from."""
        if self._is_sorted():
            return self.ops
        by_id = {op.id: op for op in self.ops}
        sorter = graphlib.TopologicalSorter(
            {op.id: [before.id for before in self.predecessors[op.id]] for op in self.ops}
        )
        try:
            return tuple(by_id[i] for i in sorter.static_order())
        except graphlib.CycleError as error:
            path = " → ".join(repr(by_id[i].name) for i in error.args[1])
            raise GraphError(f"graph {self.name!r} has a cycle: {path}") from error

    def _is_sorted(self) -> bool:
        # As builders and most files have them.
        produced: set[str] = set()
        for op in self.ops:
            if any(value in self.producers and value not in produced for value in op.operands):
                return False
            produced.update(op.outputs)
        return True

    @cached_property
    def live_ops(self) -> tuple[Op, ...]:
        """The ops that some output depends on, in topological order: those that a run executes."""
        needed = set(self.outputs)
        live = []
        for op in reversed(self.topological_order):
            if not needed.isdisjoint(op.outputs):
                needed.update(op.operands)
                live.append(op)
        return tuple(reversed(live))

    @cached_property
    def live_position(self) -> dict[int, int]:
        """Where each op is in `live_ops`, by id."""
        return {op.id: i for i, op in enumerate(self.live_ops)}

    @cached_property
    def live_edges(self) -> tuple[tuple[int, ...], ...]:
        """For each of `live_ops` the positions in it of those whose values it reads, each once."""
        at = {value: i for i, op in enumerate(self.live_ops) for value in op.outputs}
        edges = []
        for op in self.live_ops:
            found = [at[value] for value in op.operands if value in at]
            edges.append(tuple(found) if len(found) < 2 else tuple(dict.fromkeys(found)))
        return tuple(edges)

    @cached_property
    def inputs(self) -> dict[str, TensorSpec]:
        """Sources that must be bound, by name."""
        return {source.name: source.spec for source in self.sources if source.is_input}

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Sources that come with the graph, by name."""
        return {source.name: source.value for source in self.sources if not source.is_input}

    @cached_property
    def defaults(self) -> dict[str, TensorSpec]:
        """Constants that may be bound like inputs, by name: what may be given in place of their values."""
        return {source.name: source.declared for source in self.sources if source.declared is not None}

    @property
    def n_nodes(self) -> int:
        """Sources and ops together, as published tables count."""
        return len(self.sources) + len(self.ops)

    @property
    def n_edges(self) -> int:
        """Operands of all ops; a value read twice counts twice."""
        return sum(len(op.operands) for op in self.ops)

    def spec(self, value: str) -> TensorSpec:
        """Return what is known of a value's dtype and shape."""
        for_source = self._source_specs.get(value)
        return for_source if for_source is not None else self.specs.get(value, UNKNOWN)

    @cached_property
    def _source_specs(self) -> dict[str, TensorSpec]:
        return {source.name: source.spec for source in self.sources}

    def __repr__(self) -> str:
        return (
            f"<Graph {self.name!r}: {len(self.ops)} ops, {len(self.sources)} sources, "
            f"{self.n_edges} edges, outputs {list(self.outputs)[:4]}{'…' if len(self.outputs) > 4 else ''}>"
        )
