"""The parts of a graph: values, what supplies them and what computes them.

The vocabulary is ONNX's (value, op_type, domain, opset, attribute) with ferroflow's ids: sources and
ops share one numbering, which is also how published tables count them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

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
    is_sequence : bool
        Whether the value is known to be a list of others, or an optional one.
    """

    dtype: np.dtype[Any] | None = None
    shape: tuple[Dim, ...] | None = None
    is_sequence: bool = False

    @classmethod
    def of(cls, dtype: DTypeLike, shape: tuple[Dim, ...]) -> TensorSpec:
        """Build a spec from anything that NumPy takes for a dtype."""
        return cls(np.dtype(dtype), tuple(shape))

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
        if self.is_sequence:
            return "sequence"
        dtype = "?" if self.dtype is None else self.dtype.name.replace("object", "string")
        if self.shape is None:
            return f"{dtype}[…]"
        return f"{dtype}[{', '.join('?' if dim is None else str(dim) for dim in self.shape)}]"


#: Spec of a value of which nothing is known.
UNKNOWN = TensorSpec()


def with_specs(specs: Mapping[str, TensorSpec], most: int | None = None) -> str:
    """Return values with their specs in words, no more than so many of them."""
    shown = ", ".join(f"{name}: {spec}" for name, spec in islice(specs.items(), most))
    return shown if most is None or len(specs) <= most else f"{shown}, …"


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A value that is supplied, not computed: an input (no `value` yet) or a constant.

    `value` is a NumPy array, read-only in a graph, or, once constants were scattered to workers
    (`is_scattered`), the Dask Future of one; `known` is the array of a small one then. `declared` is what may
    be given in place of a constant that is only the default of an input; None of other sources.
    """

    id: int
    name: str
    spec: TensorSpec
    value: Any = None
    is_scattered: bool = False
    known: Any = None
    declared: TensorSpec | None = None

    @property
    def is_input(self) -> bool:
        """Whether the value must be bound before the graph can be computed."""
        return self.value is None

    @property
    def is_small(self) -> bool:
        """Whether the value is a constant that is here and that shapes may be computed from."""
        value = self.array
        return value is not None and (value.dtype.kind == "O" or value.nbytes <= SMALL)

    def read_only(self) -> Source:
        """Return the source with its array read-only: a view, so that the owner of the array may write on."""
        array = self.array
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            return self
        view = array.view()
        view.flags.writeable = False
        return replace(self, known=view) if self.is_scattered else replace(self, value=view)

    @property
    def array(self) -> Any:
        """The value, where it is in this process."""
        return self.known if self.is_scattered else self.value


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
    worker : str
        Name or address of the worker that must run the op; empty for any.
    is_send : bool
        Whether only other workers read what the op yields.
    """

    id: int
    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    domain: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    captured: tuple[str, ...] = ()
    worker: str = ""
    is_send: bool = False

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
