"""The graph: sources, operators and the named values between them.

This module owns what a graph *is* and when it is well formed. It knows nothing of how long an
operator takes, how it is computed, or where.

The vocabulary is ONNX's (value, op_type, domain, opset, attribute) with ferroflow's ids: sources and
ops share one numbering, which is also how published tables count them.
"""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ferroflow_dask.exceptions import GraphError

if TYPE_CHECKING:
    from ferroflow_dask.lowering.collection import BoundGraph

#: A dimension: a size, the name of a symbolic one, or unknown.
Dim = int | str | None

#: Constants of so many bytes at most tell shapes, axes and scales [B].
SMALL = 4096

#: Domain of the operators that ONNX does not have (`Slow`, `MatMul` per head, `LayerNorm`).
FERROFLOW_DOMAIN = "ferroflow"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a value before it exists.

    Parameters
    ----------
    dtype : numpy.dtype or None
        None where the value is no tensor (a sequence, an optional) or its type is unknown.
    shape : tuple of (int, str or None), or None
        None where not even the rank is known.
    """

    dtype: np.dtype[Any] | None = None
    shape: tuple[Dim, ...] | None = None

    @classmethod
    def of(cls, dtype: DTypeLike, shape: tuple[Dim, ...]) -> TensorSpec:
        """Build a spec from anything that NumPy takes for a dtype."""
        return cls(np.dtype(dtype), tuple(shape))

    @property
    def is_static(self) -> bool:
        """Whether every dimension is a number."""
        return self.shape is not None and all(isinstance(dim, int) for dim in self.shape)

    @property
    def size(self) -> int | None:
        """Number of elements, or None while a dimension is unknown."""
        if self.shape is None:
            return None
        size = 1
        for dim in self.shape:
            if not isinstance(dim, int):
                return None
            size *= dim
        return size

    @property
    def nbytes(self) -> int | None:
        """Size in memory [B], or None while it is unknown."""
        if self.size is None or self.dtype is None:
            return None
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = "?" if self.dtype is None else self.dtype.name
        if self.shape is None:
            return f"{dtype}[…]"
        return f"{dtype}[{', '.join('?' if dim is None else str(dim) for dim in self.shape)}]"


#: Spec of a value of which nothing is known.
UNKNOWN = TensorSpec()


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A value that is supplied, not computed: an input (no `value` yet) or a constant.

    `value` is a NumPy array, or, once the constants of a graph were placed on a cluster
    (`is_placed`), the Dask Future of one; `known` is the array of a small one then.
    """

    id: int
    name: str
    spec: TensorSpec
    value: Any = None
    is_placed: bool = False
    known: Any = None

    @property
    def is_input(self) -> bool:
        """Whether the value must be bound before the graph can be computed."""
        return self.value is None

    @property
    def is_small(self) -> bool:
        """Whether the value is a constant that is here and that shapes may be computed from."""
        value = self.array
        return value is not None and (value.dtype.kind == "O" or value.nbytes <= SMALL)

    @property
    def array(self) -> Any:
        """The value, where it is in this process."""
        return self.known if self.is_placed else self.value


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operator applied to named values.

    Parameters
    ----------
    id : int
        Index in the numbering that sources and ops share.
    name : str
        Unique in its graph.
    op_type, domain : str
        As in ONNX; the empty domain is ONNX's own.
    inputs : tuple of str
        Values in argument order; the empty string is an optional input left out.
    outputs : tuple of str
        Values that the op produces; the empty string is an optional output left out.
    attributes : mapping
        Python values, or ONNX messages where ONNX has them (tensors, sub-graphs).
    captured : tuple of str
        Values of this graph that sub-graphs in the attributes read by name.
    """

    id: int
    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    domain: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    captured: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[str, ...]:
        """The values that must exist before the op can run, in order; one may occur twice."""
        if "" in self.inputs:
            return tuple(name for name in self.inputs if name) + self.captured
        return self.inputs + self.captured

    @property
    def kind(self) -> str:
        """Operator type with its domain, as people write it: `MatMul`, `ferroflow.Slow`."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type


@dataclass(frozen=True, eq=False)
class Graph:
    """An immutable directed acyclic graph of operators.

    Parameters
    ----------
    name : str
    sources : tuple of Source
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
    ferroflow_dask.GraphBuilder : builds a graph op by op.
    ferroflow_dask.generate : the built-in graphs.
    ferroflow_dask.load_onnx : imports a model.
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

    def bind(self, /, **inputs: ArrayLike) -> BoundGraph:
        """Give the inputs their values and get a Dask collection; see `ferroflow_dask.bind` for options.

        Parameters
        ----------
        **inputs
            An array for each of `Graph.inputs`: NumPy's or Dask's, a delayed value, or a Future. Names that
            are no Python identifiers are passed as `graph.bind(**{"gpu_0/data": x})`.

        Returns
        -------
        BoundGraph
            A Dask collection: `.compute()`, `.persist()`, `client.compute(…)` and `dask.compute(…)`
            yield the outputs by name.

        Raises
        ------
        BindError
            A name, shape or dtype does not fit; the message lists what the graph takes.

        Examples
        --------
        >>> import numpy as np
        >>> from ferroflow_dask import GraphBuilder
        >>> builder = GraphBuilder("double")
        >>> x = builder.input("x", "float32", ("batch",))
        >>> builder.output(y=builder.op("Add", x, x))
        >>> builder.build().bind(x=np.float32([1, 2])).compute(scheduler="sync")
        {'y': array([2., 4.], dtype=float32)}
        """
        from ferroflow_dask.lowering import bind

        return bind(self, inputs)

    def map_batches(self, x: Any, *, batch: int | None = None, providers: Sequence[str] | None = None) -> Any:
        """Compute the graph on each batch of Dask arrays, lazily: a whole model in each worker.

        Weights travel to each worker once; a worker keeps the last four models open.

        Parameters
        ----------
        x : dask array, or mapping of str to array
            Batches are its chunks along the first dimension. Of a graph of several inputs a dict of them:
            Dask arrays are batched alike, others go with every batch. Where the graph has one input, `x`
            may also be a NumPy array, cut into batches of `batch` rows.
        batch : int, optional
            Rows of a batch; if left out the chunks of `x`, or 32 for a NumPy array.
        providers : sequence of str, optional
            Kernel providers; `ferroflow.kernels.providers` if left out. With onnxruntime among them the
            graph is one session, otherwise it is computed op by op.

        Returns
        -------
        dask array, or dict of str to dask array
            The output, or the outputs by name where there are several.

        Raises
        ------
        BindError
            A name, shape or dtype does not fit, or an output has no batch dimension.
        KernelNotFoundError
            No provider has one of the operators.

        Examples
        --------
        >>> y = load_onnx("model.onnx").map_batches(x)  # doctest: +SKIP
        >>> client.compute(y).result()  # doctest: +SKIP
        """
        from ferroflow_dask.lowering import map_batches

        return map_batches(self, x, batch=batch, providers=providers)

    def visualize(self, filename: str | None = None) -> str:
        """Return the graph in DOT; with a `filename`, write it there too (see `render.write`)."""
        from ferroflow_dask.graph import render

        dot = render.to_dot(self)
        if filename is not None:
            render.write(dot, filename)
        return dot

    def _repr_html_(self) -> str:
        from ferroflow_dask.graph import render

        return render.to_html(self)

    def __repr__(self) -> str:
        return (
            f"<Graph {self.name!r}: {len(self.ops)} ops, {len(self.sources)} sources, "
            f"{self.n_edges} edges, outputs {list(self.outputs)[:4]}{'…' if len(self.outputs) > 4 else ''}>"
        )
