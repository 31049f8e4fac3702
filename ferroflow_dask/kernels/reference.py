"""ONNX's operators as `onnx.reference` has them: all, slowly, and with sequences and sub-graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op, TensorSpec
from ferroflow_dask.graph.protos import type_from_spec
from ferroflow_dask.kernels.corrections import CORRECTIONS
from ferroflow_dask.kernels.op_model import one_node_model
from ferroflow_dask.kernels.operands import mixed_types
from ferroflow_dask.kernels.provider import Kernel


class ReferenceProvider:
    """The reference implementation that comes with onnx."""

    name = "reference"

    def supports(self, op: Op, opsets: Mapping[str, int]) -> bool:
        """Return whether the operator, and each in its sub-graphs, has an implementation."""
        if op.domain == FERROFLOW_DOMAIN:
            return False
        try:
            _evaluator(op, opsets, {})
        except RuntimeError:
            # NotImplementedError where there is nothing, its parent where only newer versions exist.
            return False
        return True

    def compile(self, op: Op, opsets: Mapping[str, int]) -> Kernel:
        """Return a kernel that evaluates the one-node model of the op."""
        return _EvaluatorKernel(op, opsets)


class _EvaluatorKernel:
    def __init__(self, op: Op, opsets: Mapping[str, int]) -> None:
        self._op = op
        self._opsets = dict(opsets)
        self._evaluators: dict[tuple[Any, ...], ReferenceEvaluator] = {}

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        names = self._op.inputs + self._op.captured
        feeds = {name: value for name, value in zip(names, values, strict=True) if name}
        found = iter(self._evaluator(feeds).run(None, feeds))
        return tuple(next(found) if value else None for value in self._op.outputs)

    def _evaluator(self, feeds: Mapping[str, Any]) -> ReferenceEvaluator:
        """Return the evaluator for these dtypes: operators that are functions may depend on them."""
        dtypes = {name: value.dtype for name, value in feeds.items() if isinstance(value, np.ndarray)}
        key = tuple(dtypes.items())
        if key not in self._evaluators:
            # The implementation would promote them, as NumPy does.
            if wrong := mixed_types(self._op, self._opsets, [feeds.get(name) for name in self._op.inputs]):
                raise TypeError(wrong)
            # Two threads may both do this; the evaluators are the same.
            types = {
                name: type_from_spec(TensorSpec(dtype)) for name, dtype in dtypes.items() if dtype.kind != "U"
            }
            self._evaluators[key] = _evaluator(self._op, self._opsets, types)
        return self._evaluators[key]


def _evaluator(op: Op, opsets: Mapping[str, int], types: Mapping[str, onnx.TypeProto]) -> ReferenceEvaluator:
    return ReferenceEvaluator(one_node_model(op, opsets, types), new_ops=list(CORRECTIONS))
