"""The operator that takes time and does nothing: `ferroflow.Slow`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op
from ferroflow_dask.kernels.provider import Kernel


class SyntheticProvider:
    """Kernels whose duration [s] is given, for studying schedulers on exact costs."""

    name = "synthetic"

    def supports(self, op: Op, opsets: Mapping[str, int]) -> bool:  # noqa: ARG002 - part of the protocol
        """Return whether the op is `ferroflow.Slow`."""
        return op.domain == FERROFLOW_DOMAIN and op.op_type == "Slow"

    def compile(self, op: Op, opsets: Mapping[str, int]) -> Kernel:  # noqa: ARG002
        """Return a kernel that sleeps for the attribute `duration` [s], then passes its first input through.

        If the op has the attributes `shape` and `dtype`, the result is an array of zeros instead.
        """
        duration = float(op.attributes["duration"])
        shape, dtype = op.attributes.get("shape"), op.attributes.get("dtype")

        def slow(*values: Any) -> tuple[Any, ...]:
            time.sleep(duration)
            return (values[0] if shape is None else np.zeros(shape, dtype),)

        return slow
