"""Evaluating a whole graph: every op once, values kept while they are read, inputs as declared."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from contextlib import contextmanager
from typing import Any

from ferroflow_dask.graph import Op, generate_graph
from ferroflow_dask.kernels import compile_op, evaluate


def test_every_op_runs_once_inside_the_hook():
    graph = generate_graph("transformer", seq_len=2, d_model=4, n_heads=2)
    entered: Counter[str] = Counter()
    left: Counter[str] = Counter()

    @contextmanager
    def count(op: Op) -> Any:
        entered[op.name] += 1
        yield
        left[op.name] += 1

    evaluate(graph, on_op=count)
    assert entered == left == {op.name: 1 for op in graph.ops}


def test_values_are_dropped_after_their_last_reader(monkeypatch):
    alive: list[Any] = []
    most = 0

    def recording(op: Op, *rest: Any) -> Any:
        kernel = compile_op(op, *rest)

        def run(*values: Any) -> Any:
            nonlocal most
            (result,) = kernel(*values)
            alive.append(weakref.ref(result))
            most = max(most, sum(ref() is not None for ref in alive))
            return (result,)

        return run

    monkeypatch.setattr(sys.modules["ferroflow_dask.kernels.evaluate"], "compile_op", recording)
    evaluate(generate_graph("matmul-chain", n_ops=10, m=3))
    assert len(alive) == 10
    assert most == 2  # the one being read and the one being made
