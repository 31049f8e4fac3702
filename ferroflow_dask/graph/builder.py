"""Build a graph op by op.

Values are plain strings; shapes and dtypes of what an op yields come from ONNX's own shape inference,
or from the caller for operators that ONNX does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike

from ferroflow_dask.counts import as_count
from ferroflow_dask.exceptions import GraphError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import UNKNOWN, Dim, Op, Source, TensorSpec
from ferroflow_dask.graph.protos import captured, spec_from_type, subgraphs, type_from_spec

#: Operator set that built graphs are written in: the newest that onnxruntime 1.20 on implements.
DEFAULT_OPSET = 21

#: Constants up to this many elements may be shapes, axes or pads, whose values shape inference reads.
_SHAPE_SIZE = 64
#: Of a dimension: ONNX has 64 bits for it.
_LARGEST = 2**63 - 1


class Builder:
    """Collect inputs, constants and ops of a `Graph`.

    Parameters
    ----------
    name : str, optional
    opset : int, optional
        Version of ONNX's operator set that the ops are written in.

    Examples
    --------
    >>> import numpy as np
    >>> builder = Builder("layer")
    >>> x = builder.input("x", "float32", ("batch", 3))
    >>> w = builder.constant(np.eye(3, dtype="float32"), name="w")
    >>> builder.output(y=builder.op("Relu", builder.op("MatMul", x, w)))
    >>> graph = builder.to_graph()
    >>> graph
    <Graph 'layer': 2 ops, 2 sources, 3 edges, outputs ['y']>
    >>> print(graph.spec("y"))
    float32[batch, 3]
    """

    def __init__(self, name: str = "graph", opset: int = DEFAULT_OPSET) -> None:
        self.name = name
        self._opsets = {"": opset}
        self._sources: list[Source] = []
        self._ops: list[Op] = []
        self._specs: dict[str, TensorSpec] = {}
        self._outputs: dict[str, str] = {}

    @property
    def _next_id(self) -> int:
        return len(self._sources) + len(self._ops)

    def _add_source(self, name: str, spec: TensorSpec, value: Any = None) -> str:
        if name in self._specs:
            raise GraphError(f"two values are named {name!r}; names must be unique")
        self._sources.append(Source(self._next_id, name, spec, value))
        self._specs[name] = spec
        return name

    def input(self, name: str, dtype: DTypeLike = np.float32, shape: Sequence[Dim] = ()) -> str:
        """Add a value that is bound later and return its name.

        Parameters
        ----------
        name : str
        dtype : dtype, optional
        shape : sequence of (int, str or None), optional
            A string names a symbolic dimension, None is one that may have any size.

        Raises
        ------
        GraphError
            The name is taken, ONNX has no such dtype, or a dimension is none.
        """
        spec = TensorSpec(checked_dtype(f"input {name!r}", dtype), checked_shape(name, shape))
        return self._add_source(name, spec)

    def spec(self, value: str) -> TensorSpec:
        """Return dtype and shape of a value, as far as they are known."""
        return self._specs.get(value, UNKNOWN)

    def constant(self, value: ArrayLike, name: str | None = None) -> str:
        """Add a value that comes with the graph and return its name.

        Parameters
        ----------
        value : array_like
            An array is not copied, since it may be large: changed afterwards, it changes the graph. The
            graph's own view of it is read-only, and so are results that are constants.
        name : str, optional
            Made from the source's id if left out.

        Raises
        ------
        GraphError
            The name is taken, or ONNX has no such dtype.
        """
        array = np.asarray(value)
        name = name or f"constant_{self._next_id}"
        checked_dtype(f"constant {name!r}", array.dtype)
        return self._add_source(name, TensorSpec.of(array.dtype, array.shape), array)

    def op(
        self,
        op_type: str,
        *inputs: str,
        name: str | None = None,
        domain: str = "",
        outputs: int = 1,
        spec: TensorSpec | None = None,
        **attributes: Any,
    ) -> Any:
        """Add an operator and return the name of its output, or a tuple of names for several.

        Parameters
        ----------
        op_type : str
            As in ONNX: `MatMul`, `Conv`, ….
        *inputs : str
            Values in argument order; the empty string leaves an optional one out.
        name : str, optional
            Must be unique; made from `op_type` and the op's id if left out.
        domain : str, optional
            Operator domain; the empty one is ONNX's.
        outputs : int, optional
            Number of values that the op yields.
        spec : TensorSpec, optional
            dtype and shape of the (first) output, where ONNX cannot infer it.
        **attributes
            The operator's attributes. Sub-graphs (`If`, `Loop`, `Scan`) are ONNX's `GraphProto`; they may
            read by name what was added before.

        Raises
        ------
        GraphError
            An input, or what a sub-graph reads, does not exist yet, the name is taken, or ONNX has no such
            operator.
        """
        op_id = self._next_id
        op_name = name or f"{op_type.lower()}_{op_id}"
        outer = captured(subgraphs(attributes))
        for value in filter(None, (*inputs, *outer)):
            if value not in self._specs:
                raise GraphError(f"op {op_name!r} reads {value!r}, which was not added before it")
        names = (op_name,) if outputs == 1 else tuple(f"{op_name}:{i}" for i in range(outputs))
        op = Op(op_id, op_name, op_type, inputs, names, domain, attributes, outer)
        specs = [spec] if spec is not None else self._infer(op)
        for i, value in enumerate(names):
            if value in self._specs:
                raise GraphError(f"two values are named {value!r}; names must be unique")
            self._specs[value] = specs[i] if i < len(specs) else UNKNOWN
        self._ops.append(op)
        self._opsets.setdefault(domain, 1)
        return names[0] if outputs == 1 else names

    def _infer(self, op: Op) -> list[TensorSpec]:
        if op.domain:
            return []
        version = self._opsets[""]
        if not onnx.defs.has(op.op_type, version, ""):
            raise GraphError(f"op {op.name!r}: ONNX opset {version} has no operator {op.op_type!r}")
        schema = onnx.defs.get_schema(op.op_type, version, "")
        try:
            node = onnx.helper.make_node(op.op_type, op.inputs, op.outputs, op.name, **op.attributes)
        except (TypeError, ValueError) as error:
            raise GraphError(f"op {op.name!r} ({op.kind}): {error}") from error
        types = {value: type_from_spec(self._specs[value]) for value in op.operands}
        constants = {
            source.name: onnx.numpy_helper.from_array(source.value, source.name)
            for source in self._sources
            if source.name in types and source.value is not None and source.value.size <= _SHAPE_SIZE
        }
        try:
            inferred = onnx.shape_inference.infer_node_outputs(
                schema, node, types, constants, opset_imports=[onnx.helper.make_opsetid("", version)]
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            raise GraphError(f"op {op.name!r} ({op.kind}): {str(error).strip()}") from error
        return [spec_from_type(inferred[value]) if value in inferred else UNKNOWN for value in op.outputs]

    @property
    def sinks(self) -> tuple[str, ...]:
        """The values that ops yield and no op reads, in the order of their ops."""
        read = {value for op in self._ops for value in op.operands}
        return tuple(value for op in self._ops for value in op.outputs if value not in read)

    def output(self, /, *values: str, **named: str) -> None:
        """Mark values as outputs, under their own names or under the keywords'.

        A source keeps its name; under another one it is copied by an `Identity` op.

        Parameters
        ----------
        *values : str
        **named : str
            Values by the names that the outputs get.

        Raises
        ------
        GraphError
            There is no such value.
        """
        for alias, value in {**{value: value for value in values}, **named}.items():
            if value not in self._specs:
                raise GraphError(f"output {alias!r}: there is no value {value!r}")
            self._outputs[alias] = value

    def to_graph(self) -> Graph:
        """Return the graph.

        Raises
        ------
        GraphError
            No output was marked, or two outputs carry one value or one name.
        """
        if not self._outputs:
            raise GraphError(f"graph {self.name!r} has no output; mark one: builder.output(y=value)")
        if len(set(self._outputs.values())) != len(self._outputs):
            raise GraphError("one value is marked as two outputs; add an Identity op for the second")
        renamed, copies = self._aliases()

        def rename(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(renamed.get(name, name) for name in names)

        ops = [replace(op, inputs=rename(op.inputs), outputs=rename(op.outputs)) for op in self._ops]
        specs = {renamed.get(name, name): spec for name, spec in self._specs.items()}
        return Graph(
            name=self.name,
            sources=tuple(self._sources),
            ops=(*ops, *copies),
            outputs=tuple(self._outputs),
            specs={**specs, **{op.outputs[0]: self._specs[op.inputs[0]] for op in copies}},
            opsets=self._opsets,
        )

    def _aliases(self) -> tuple[dict[str, str], list[Op]]:
        """Return the new names of values, and the ops that copy those that have to keep theirs.

        A source is bound by its name, and sub-graphs read by name.
        """
        fixed = {source.name for source in self._sources}.union(*(op.captured for op in self._ops))
        renamed: dict[str, str] = {}
        copies: list[Op] = []
        taken = {op.name for op in self._ops}
        for alias, value in self._outputs.items():
            if alias == value or value not in fixed:
                renamed[value] = alias
                continue
            op_id = self._next_id + len(copies)
            name = next(name for name in _names(f"identity_{op_id}") if name not in taken)
            copies.append(Op(op_id, name, "Identity", (value,), (alias,)))
        return renamed, copies


def _names(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{i}" for i in count(2))


def checked_dtype(what: str, dtype: DTypeLike) -> np.dtype[Any]:
    """Return a dtype that ONNX has; its strings are objects."""
    try:
        found = np.dtype(dtype)
        if found.kind in "SU":
            return np.dtype(object)
        onnx.helper.np_dtype_to_tensor_dtype(found)
    except (TypeError, ValueError, KeyError) as error:
        raise GraphError(f"{what}: ONNX has no dtype {str(dtype)!r}; give one like 'float32'") from error
    return found


def checked_shape(name: str, shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the dimensions of an input."""
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise GraphError(f"input {name!r}: shape is {shape!r}; give its dimensions: shape=({shape!r},)")
    return tuple(_checked_dim(name, dim) for dim in shape)


def _checked_dim(name: str, dim: Any) -> Dim:
    if dim is None or (isinstance(dim, str) and dim):
        return dim
    size = as_count(dim)
    if size is None or size > _LARGEST:
        raise GraphError(
            f"input {name!r}: a dimension is {dim!r}; it must be a size, a name, or None for any size"
        )
    return size
