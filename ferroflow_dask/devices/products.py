"""Products of matrices on a device, alone and several as one: ONNX's MatMul and Gemm."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ferroflow_dask.devices.device import Device
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.array import gemm

_GEMM = "Gemm"
_PRODUCTS = frozenset(("MatMul", _GEMM))
#: Shape and dtype of an operand; None for one that is left out.
Told = tuple[tuple[int, ...], str] | None


def is_product(op: Op) -> bool:
    """Return whether an op is a product of matrices, or of stacks of them."""
    return op.op_type in _PRODUCTS and not op.domain


def has_function(op: Op, operands: Sequence[Told]) -> bool:
    """Return whether `product` takes an op's operands; its kernel says what is wrong with others."""
    return op.op_type != _GEMM or common(operands) is not None


def common(operands: Sequence[Told]) -> Hashable:
    """Return what products that go out together have in common; None for one that must go alone."""
    there = [told for told in operands if told is not None]
    if len({dtype for _, dtype in there}) != 1 or there[0][1] not in ("float32", "float64"):
        return None
    ranks = [len(shape) for shape, _ in there]
    return tuple(operands) if ranks[:2] == [2, 2] and max(ranks) == 2 else None


def nbytes_of(op: Op, operands: Sequence[Told]) -> int:
    """Return what a product that has something in `common` with others takes on a device at most [B]."""
    shapes = [told[0] for told in operands if told is not None]
    (rows, columns), n = _size_of_result(op, shapes), sum(int(np.prod(shape)) for shape in shapes)
    n += rows * columns
    if op.op_type == _GEMM:  # the product before C is added to it, and C times beta
        n += rows * columns + sum(int(np.prod(shape)) for shape in shapes[2:])
    assert operands[0] is not None
    return n * np.dtype(operands[0][1]).itemsize


def _size_of_result(op: Op, shapes: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    swapped = [int(op.op_type == _GEMM and bool(op.attributes.get(name, 0))) for name in ("transA", "transB")]
    return shapes[0][swapped[0]], shapes[1][1 - swapped[1]]


def product(device: Device, op: Op, operands: Sequence[Any]) -> Any:
    """Enqueue a product, in the precision that was asked for.

    Of several as one, the first operand is a stack, and so are the others, unless they are the same for all.
    """
    if op.op_type == _GEMM:
        return gemm(op, *operands, multiply=lambda a, b: _multiplied(device, a, b))
    return _multiplied(device, *operands)


def _multiplied(device: Device, a: Any, b: Any) -> Any:
    if a.ndim == 3 and b.ndim == 2:  # one for all: rows of the left ones after each other make one product
        n, rows, inner = a.shape
        return device.product(a.reshape(n * rows, inner), b).reshape(n, rows, b.shape[-1])
    return device.product(a, b)


def as_matrices(stack: Any) -> Any:
    """Return a stack of scalars, rows or matrices as one of matrices, to be added to a stack of these."""
    missing = 3 - stack.ndim
    return stack.reshape(stack.shape[0], *(1,) * missing, *stack.shape[1:]) if missing else stack
