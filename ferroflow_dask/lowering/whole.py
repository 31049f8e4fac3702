"""A whole graph as the function of a Dask task, its large constants beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ferroflow_dask.bundling.results import Results
from ferroflow_dask.exceptions import FerroflowError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op, Source
from ferroflow_dask.kernels.session import failed
from ferroflow_dask.lowering.execution import device_here, record_alike
from ferroflow_dask.lowering.sealed import Sealed, large_constants, runner_here, sealed_of

#: Operators that compute nothing.
_MOVERS = frozenset({"Concat", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True, slots=True, eq=False)
class ExecuteWhole:
    """The function of a Dask task: compute a graph as one piece of work.

    Parameters
    ----------
    run : str
        Name of the run under which the executions are counted: all ops, once all have run, each with the
        same part of the time.
    sealed : Sealed
    providers : tuple of str
        Kernel providers in the order in which they are asked.
    inputs, weights : tuple of str
        Names of the arrays that it is called with: the graph's inputs, then its large constants.
    wanted : tuple of str
        The outputs to return.
    """

    run: str
    sealed: Sealed
    providers: tuple[str, ...]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    wanted: tuple[str, ...]

    def __call__(self, *arrays: Any) -> Any:
        """Return the output that is wanted, or `Results` of several."""
        values = dict(zip((*self.inputs, *self.weights), arrays, strict=True))
        weights = {name: values[name] for name in self.weights}
        graph = self.sealed.graph
        start = time.perf_counter()
        try:
            found = runner_here(self.sealed, weights, self.providers, self.run)(values)
        except FerroflowError:
            raise
        except Exception as error:
            raise failed(graph, values, error) from error
        if device_here() is None:  # which tells of each op when it has ended
            ids = [op.id for op in graph.live_ops]
            each_s = (time.perf_counter() - start) / len(ids)
            record_alike(self.run, ids, each_s)
        outputs = [found[name] for name in self.wanted]
        return outputs[0] if len(outputs) == 1 else Results(tuple(outputs))

    def __dask_tokenize__(self) -> tuple[str, str]:
        return (type(self).__qualname__, self.run)


@dataclass(frozen=True, slots=True, eq=False)
class ExecutePart(ExecuteWhole):
    """The function of a Dask task: compute a bundle of a graph in parts as one piece of work.

    Parameters
    ----------
    items : tuple of (int or None)
        For each array, which item of a task's result it is; None for all of it.
    """

    items: tuple[int | None, ...] = ()

    def __call__(self, *results: Any) -> Any:
        """Return the output that is wanted, or `Results` of several."""
        arrays = [
            result if item is None else result[item] for result, item in zip(results, self.items, strict=True)
        ]
        return ExecuteWhole.__call__(self, *arrays)

    def __dask_tokenize__(self) -> tuple[str, str]:
        return (type(self).__qualname__, f"{self.run} {self.sealed.token}")


#: The bundles of a graph in parts as graphs, by the ids of their ops.
_bundles: WeakKeyDictionary[Graph, dict[tuple[int, ...], Graph]] = WeakKeyDictionary()


def is_for_session(ops: Sequence[Op]) -> bool:
    """Return whether a session may be faster than the ops of a bundle one by one: some of them compute."""
    is_known = all(op.domain != FERROFLOW_DOMAIN and not op.captured for op in ops)
    # A task of one op yields all its outputs, also those that nothing reads.
    is_known = is_known and (len(ops) > 1 or len(ops[0].outputs) == 1)
    return is_known and any(op.op_type not in _MOVERS for op in ops)


def part(
    graph: Graph,
    ops: Sequence[Op],
    run: str,
    *,
    providers: tuple[str, ...],
    wanted: tuple[str, ...],
    n_parts: int,
) -> ExecutePart:
    """Return what computes a bundle as one piece of work, without the items of its arrays.

    Parameters
    ----------
    graph, run, providers, wanted
        As in `whole`.
    ops : sequence of Op
    n_parts : int
        Bundles of the graph that its workers keep open.
    """
    known = _bundles.setdefault(graph, {})
    key = tuple(op.id for op in ops)
    if key not in known:
        known[key] = _alone(graph, ops, wanted)
    piece = known[key]
    weights = tuple(large_constants(piece))
    return ExecutePart(run, sealed_of(piece, n_parts), providers, tuple(piece.inputs), weights, wanted)


def _alone(graph: Graph, ops: Sequence[Op], wanted: Sequence[str]) -> Graph:
    """Return a bundle as a graph whose inputs are what it reads of others."""
    made = {value for op in ops for value in op.outputs}
    read = [value for value in dict.fromkeys(v for op in ops for v in op.operands) if value not in made]
    constants = {source.name: source for source in graph.sources if not source.is_input}
    sources = [
        constants.get(value) or Source(-1 - i, value, graph.spec(value)) for i, value in enumerate(read)
    ]
    specs = {value: graph.spec(value) for value in (*read, *made) if value}
    return Graph(graph.name, tuple(sources), tuple(ops), tuple(wanted), specs, graph.opsets)


def whole(graph: Graph, run: str, providers: tuple[str, ...], wanted: tuple[str, ...]) -> ExecuteWhole:
    """Return what computes a graph as one piece of work; the parameters are those of `ExecuteWhole`."""
    weights = tuple(large_constants(graph))
    return ExecuteWhole(run, sealed_of(graph), providers, tuple(graph.inputs), weights, wanted)
