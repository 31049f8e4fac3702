"""Costs of parts of operators, measured on a worker of a cluster when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from distributed import Client

from ferroflow_dask.cost import AnalyticCost, CostModel, kind_of
from ferroflow_dask.exceptions import FerroflowError
from ferroflow_dask.graph import random_inputs
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op, TensorSpec
from ferroflow_dask.kernels import compile_op
from ferroflow_dask.lowering import bind_graph, executed, scatter
from ferroflow_dask.lowering.bundles import is_for_sessions

#: Runs of an operator, of which the shortest counts; no more once they took so long [s].
_RUNS, _MOST_S = 5, 0.5
#: Runs of a whole graph, of which the shortest counts; the first one opens its session.
_WHOLE_RUNS = 4


class WorkerCost:
    """Durations of operators on one thread of a worker; each kind is measured once, with random numbers.

    Parameters
    ----------
    client : distributed.Client
        A synchronous client.
    otherwise : CostModel, optional
        Asked for operators that cannot run on random numbers.
    """

    def __init__(self, client: Client, otherwise: CostModel | None = None) -> None:
        self._client, self._otherwise = client, otherwise or AnalyticCost()
        self._seconds: dict[Hashable, float | None] = {}
        #: How long ops take in the session of their model, as a part of what they take alone; see `fit`.
        self.factor = 1.0

    def seconds(self, op: Op, graph: Graph) -> float | None:
        """Return the shortest duration of a few runs [s]."""
        kind = kind_of(op, graph)
        if kind not in self._seconds:
            self._seconds[kind] = self._measured(op, graph)
        alone_s = self._seconds[kind]
        return None if alone_s is None else self.factor * alone_s

    def fit(self, graph: Graph) -> None:
        """Measure a whole graph in one session, and scale the durations of ops to it.

        A session fuses ops. Alone, an op finds its operands in the cache. Graphs that no session computes
        change nothing.
        """
        if not is_for_sessions(graph) or not graph.inputs:
            return
        self.factor = 1.0
        alone_s = sum(self.seconds(op, graph) or 0.0 for op in graph.live_ops)
        scattered, inputs = scatter(graph, self._client), random_inputs(graph)
        durations = []
        for _ in range(_WHOLE_RUNS):
            bound = bind_graph(scattered, inputs, granularity="whole")
            self._client.compute(bound).result()
            durations.append(executed(self._client, bound.run).busy_s)
        if alone_s > 0 and min(durations) > 0:
            self.factor = min(durations) / alone_s

    @property
    def n_measured(self) -> int:
        """Number of kinds of operators."""
        return len(self._seconds)

    def _measured(self, op: Op, graph: Graph) -> float | None:
        if op.domain == FERROFLOW_DOMAIN and op.op_type == "Slow":
            return self._otherwise.seconds(op, graph)
        specs = {value: graph.spec(value) for value in op.operands}
        if any(
            spec.size is None or spec.dtype is None or spec.dtype.kind not in "fiub"
            for spec in specs.values()
        ):
            return self._otherwise.seconds(op, graph)
        known = {name: graph.constants[name] for name in specs if name in graph.constants}
        task = self._client.submit(measure_op, op, dict(graph.opsets), specs, known, pure=False)
        found: float | None = task.result()
        return self._otherwise.seconds(op, graph) if found is None else found


def measure_op(
    op: Op, opsets: Mapping[str, int], specs: Mapping[str, TensorSpec], known: Mapping[str, Any]
) -> float | None:
    """Return the shortest duration of a few runs of an operator here [s]; None if it cannot run."""
    rng = np.random.default_rng(0)
    values = {name: known[name] if name in known else _random(spec, rng) for name, spec in specs.items()}
    operands = [values[name] if name else None for name in (*op.inputs, *op.captured)]
    durations: list[float] = []
    try:
        kernel = compile_op(op, opsets)
        kernel(*operands)
        while len(durations) < _RUNS and sum(durations) < _MOST_S:
            start = time.perf_counter()
            kernel(*operands)
            durations.append(time.perf_counter() - start)
    except FerroflowError:
        return None
    return min(durations)


def _random(spec: TensorSpec, rng: np.random.Generator) -> Any:
    assert spec.dtype is not None
    shape = tuple(int(dim or 0) for dim in spec.shape or ())
    if spec.dtype.kind == "f":
        return np.asarray(rng.random(shape, np.float32)).astype(spec.dtype)
    return rng.integers(0, 2, shape).astype(spec.dtype)  # also as indices, which must be small
