"""Compute a whole graph in this process, one op after another: what all other executions must equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph.defaults import with_inputs
from ferroflow_dask.graph.inputs import check_inputs
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.choice import check_supported
from ferroflow_dask.kernels.registry import compile_op


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    providers: Sequence[str] | None = None,
    on_op: Callable[[Op], AbstractContextManager[object]] | None = None,
) -> dict[str, Any]:
    """Return the outputs of a graph by name.

    Values are dropped as soon as the last op that reads them has run.

    Parameters
    ----------
    graph : Graph
    inputs : mapping of str to array, optional
        A value for each of `Graph.inputs`, and for any of `Graph.defaults`.
    providers : sequence of str, optional
        As in `compile_op`.
    on_op : callable, optional
        Called with each op just before it runs; what it returns is entered around the computation (not
        the compilation) of that op, so that a caller can count or time.

    Returns
    -------
    dict of str to array
        The values of `Graph.outputs`; lists or None where an output is a sequence or an optional. One that is
        a constant, or a view of one, is read-only.

    Raises
    ------
    BindError
        A name, shape or dtype does not fit.
    UsageError
        The graph's constants were scattered on a cluster.
    KernelNotFoundError
        No provider has one of the operators; nothing was computed.
    KernelError
        An op failed.

    Examples
    --------
    >>> import numpy as np
    >>> from ferroflow_dask.graph import Builder
    >>> builder = Builder("double")
    >>> x = builder.input("x", "float32", ("batch",))
    >>> builder.output(y=builder.op("Add", x, x))
    >>> evaluate(builder.to_graph(), {"x": np.float32([1, 2])}, providers=["array"])
    {'y': array([2., 4.], dtype=float32)}
    """
    graph = with_inputs(graph, inputs or {})
    given = check_inputs(graph, inputs or {})
    if any(source.is_scattered for source in graph.sources):
        raise UsageError(
            f"the constants of graph {graph.name!r} are on a cluster; evaluate it as it was before"
        )
    check_supported(graph, providers)
    values = {**graph.constants, **given}
    # Outputs count as read once more, so that they stay.
    reads = Counter(value for op in graph.live_ops for value in op.operands) + Counter(graph.outputs)
    for op in graph.live_ops:
        kernel = compile_op(op, graph.opsets, providers)
        operands = [values[name] if name else None for name in op.inputs + op.captured]
        with nullcontext() if on_op is None else on_op(op):
            results = kernel(*operands)
        del operands
        values.update((name, result) for name, result in zip(op.outputs, results, strict=True) if reads[name])
        for name in op.operands:
            reads[name] -= 1
            if not reads[name]:
                del values[name]
    return {name: values[name] for name in graph.outputs}
