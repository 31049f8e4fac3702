"""What makes two ops take equally long: operator, attributes, and the shapes and types of operands."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from hashlib import blake2s
from typing import Any

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op

#: Attributes of these types tell what an op does; arrays and sub-graphs are left out.
_TELLING = (bool, int, float, str, bytes)


def kind_of(op: Op, graph: Graph) -> Hashable:
    """Return what ops that take equally long have in common."""
    attributes = tuple((name, repr(value)) for name, value in op.attributes.items() if _is_telling(value))
    specs = tuple((spec.dtype, spec.shape) for spec in map(graph.spec, op.operands))
    return (op.domain, op.op_type, attributes, specs)


def kind_name(op: Op, graph: Graph) -> str:
    """Return the kind of an op as a short name that is the same everywhere."""
    return _name(kind_of(op, graph), op.op_type)


#: Most ops of a graph are of few kinds.
@lru_cache(maxsize=1024)
def _name(kind: Hashable, op_type: str) -> str:
    digest = blake2s(repr(kind).encode(), digest_size=8)
    return f"{op_type}-{digest.hexdigest()}"


def _is_telling(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, _TELLING) for item in value)
    return isinstance(value, _TELLING)
