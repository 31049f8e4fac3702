"""A whole graph as the function of a Dask task, its large constants beside it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ferroflow_dask.bundling.results import Results
from ferroflow_dask.exceptions import FerroflowError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.kernels.session import failed
from ferroflow_dask.lowering.execution import device_here, record
from ferroflow_dask.lowering.sealed import Sealed, is_large, runner_here, sealed_of


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
            record(self.run, [(op_id, each_s) for op_id in ids])
        outputs = [found[name] for name in self.wanted]
        return outputs[0] if len(outputs) == 1 else Results(tuple(outputs))

    def __dask_tokenize__(self) -> tuple[str, str]:
        return (type(self).__qualname__, self.run)


def whole(graph: Graph, run: str, providers: tuple[str, ...], wanted: tuple[str, ...]) -> ExecuteWhole:
    """Return what computes a graph as one piece of work; the parameters are those of `ExecuteWhole`."""
    weights = tuple(source.name for source in graph.sources if is_large(source))
    return ExecuteWhole(run, sealed_of(graph), providers, tuple(graph.inputs), weights, wanted)
