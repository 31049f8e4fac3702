"""The provider `array`: finds an op's kernel in the tables of the families, and guards it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array import (
    arithmetic,
    choices,
    constants,
    convolution,
    functions,
    layout,
    normalization,
    pooling,
    products,
    reductions,
)
from ferroflow_dask.kernels.array.operator import Operator
from ferroflow_dask.kernels.provider import DeclinedError, Kernel, opset_version

_FAMILIES = (
    *(products, convolution, pooling, arithmetic, functions),
    *(choices, reductions, normalization, layout, constants),
)

#: (domain, op_type) → kernels by the version of the operator.
_TABLE: dict[tuple[str, str], dict[int, Operator]] = {}
for _family in _FAMILIES:
    for _operator in _family.OPERATORS:
        _versions = _TABLE.setdefault((_operator.domain, _operator.op_type), {})
        _versions.update(dict.fromkeys(_operator.versions, _operator))

#: Its kernels are faster than these on NumPy's arrays.
_FASTER_ON_HOST = "onnxruntime"


class ArrayProvider:
    """Kernels in array code that any library with NumPy's interface runs."""

    name = "array"

    def supports(self, op: Op, opsets: Mapping[str, int]) -> bool:
        """Return whether there is a function for the operator in this version with these attributes."""
        operator = _find(op, opsets)
        if operator is None or op.captured or not operator.takes(op):
            return False
        return operator.n_outputs is None or not any(op.outputs[operator.n_outputs :])

    def compile(self, op: Op, opsets: Mapping[str, int]) -> Kernel:
        """Return the op's function, guarded by the dtypes that it is right for."""
        operator = _find(op, opsets)
        assert operator is not None  # supported, as the protocol says
        check, function = _guard(op, operator), operator.function

        def kernel(*values: Any) -> tuple[Any, ...]:
            check(values)
            return (_array(function(op, *values)),)

        def kernel_of_several(*values: Any) -> tuple[Any, ...]:
            check(values)
            found = function(op, *values)
            results = list(found) if isinstance(found, tuple) else [found]
            results += [None] * (len(op.outputs) - len(results))
            return tuple(_array(one) if name else None for name, one in zip(op.outputs, results, strict=True))

        return kernel if len(op.outputs) == 1 and operator.n_outputs is not None else kernel_of_several

    def yields_to(self, op: Op) -> str | None:
        """Return the provider whose kernel is to be asked first where both may be, None for none."""
        versions = _TABLE.get((op.domain, op.op_type), {})
        return None if any(operator.is_first for operator in versions.values()) else _FASTER_ON_HOST

    def host_operands(self, op: Op) -> frozenset[int]:
        """Return the positions of operands whose values the kernel reads: they must be NumPy arrays."""
        versions = _TABLE.get((op.domain, op.op_type), {})
        named = frozenset[int]().union(*(operator.host for operator in versions.values()))
        return frozenset(i for i in named if i < len(op.inputs) and op.inputs[i])


def _find(op: Op, opsets: Mapping[str, int]) -> Operator | None:
    """Return the kernel for the version of the operator that the op's opset has."""
    versions = _TABLE.get((op.domain, op.op_type))
    if versions is None:
        return None
    if op.domain:
        return versions.get(opset_version(op, opsets))
    version = opset_version(op, opsets)
    if not onnx.defs.has(op.op_type, version):
        return None
    return versions.get(onnx.defs.get_schema(op.op_type, version).since_version)


def _array(result: Any) -> Any:
    # NumPy's functions turn results without axes into scalars.
    return np.asarray(result) if isinstance(result, np.generic) else result


def _guard(op: Op, operator: Operator) -> Callable[[tuple[Any, ...]], None]:
    """Return what declines operands that the kernel is not right for; it runs before each small op."""
    dtypes = frozenset(map(np.dtype, operator.dtypes))
    apart = {i: frozenset(map(np.dtype, names)) for i, names in operator.apart.items()}
    special = operator.host | apart.keys()

    def check(values: tuple[Any, ...]) -> None:
        common = None
        for i, value in enumerate(values):
            if value is None:
                continue
            dtype = getattr(value, "dtype", None)
            if i in special:
                if i in apart and dtype not in apart[i]:
                    raise DeclinedError(f"operand {i} of {op.op_type} is {dtype or type(value).__name__}")
                if i in operator.host and not isinstance(value, np.ndarray):
                    raise DeclinedError(f"operand {i} of {op.op_type} is not on the host")
            elif common is None:
                if dtype is None or dtype not in dtypes:
                    raise DeclinedError(f"{op.op_type} of {dtype or type(value).__name__}")
                common = dtype
            elif dtype != common:
                # NumPy would promote them; ONNX does not know such an op.
                raise DeclinedError(f"{op.op_type} of {common} and {dtype or type(value).__name__}")

    return check
