"""A graph with bound inputs, as a Dask collection."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dask.base import DaskMethodsMixin
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.threaded import get as threaded_get
from dask.typing import Key

from ferroflow_dask import config
from ferroflow_dask.cost import AnalyticCost, CostModel, estimate
from ferroflow_dask.graph.inputs import check_inputs
from ferroflow_dask.graph.ir import Graph, Op
from ferroflow_dask.kernels import check_supported
from ferroflow_dask.lowering.tasks import lower, op_type_prefix


class BoundGraph(DaskMethodsMixin):
    """The outputs of a graph, to be computed by Dask.

    Made by `Graph.bind`. `compute()`, `persist()`, `visualize()`, `client.compute(…)` and
    `dask.compute(…)` work as on any Dask collection; computing yields a dict of outputs by name.

    Attributes
    ----------
    run : str
        Unique; part of every key. `executed(client, run)` counts the ops that were executed.
    keys : dict of str to key
        The Dask key of each output.
    n_tasks : int
        Number of tasks that a computation runs.
    """

    def __init__(
        self, run: str, dsk: HighLevelGraph, keys: Mapping[str, Key], n_tasks: int, graph: Graph | None
    ):
        self.run = run
        self.keys = dict(keys)
        self.n_tasks = n_tasks
        self._dsk = dsk
        # The graph may hold the Futures of placed constants; without it they would be released.
        self._graph = graph

    def __dask_graph__(self) -> HighLevelGraph:
        return self._dsk

    def __dask_keys__(self) -> list[Key]:
        return list(self.keys.values())

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(self._dsk.layers)

    def __dask_tokenize__(self) -> tuple[str, str]:
        return (type(self).__name__, self.run)

    __dask_optimize__ = None
    __dask_scheduler__ = staticmethod(threaded_get)

    def __dask_postcompute__(self) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
        return _by_name, (tuple(self.keys),)

    def __dask_postpersist__(self) -> tuple[Callable[..., BoundGraph], tuple[Any, ...]]:
        return _persisted, (self.run, self.keys, self._graph)

    def __repr__(self) -> str:
        names = list(self.keys)
        return f"<BoundGraph: {self.n_tasks} tasks, outputs {names[:4]}{'…' if len(names) > 4 else ''}>"


def _by_name(results: Sequence[Any], names: Iterable[str]) -> dict[str, Any]:
    return dict(zip(names, results, strict=True))


def _persisted(
    results: Mapping[Key, Any], run: str, keys: Mapping[str, Key], graph: Graph | None, *, rename: Any = None
) -> BoundGraph:
    if rename:
        keys = {name: rename.get(key, key) for name, key in keys.items()}
    layer = f"persisted-{run}"
    return BoundGraph(
        run, HighLevelGraph({layer: MaterializedLayer(results)}, {layer: set()}), keys, 0, graph
    )


def bind(
    graph: Graph,
    inputs: Mapping[str, Any],
    *,
    costs: CostModel | None = None,
    providers: Sequence[str] | None = None,
    prefix: Callable[[Op], str] = op_type_prefix,
) -> BoundGraph:
    """Give a graph's inputs their values and lower it to Dask tasks.

    Parameters
    ----------
    graph : Graph
    inputs : mapping of str to array
    costs : CostModel, optional
        Where tasks' `ferroflow_cost` comes from; shapes and nominal rates if left out.
    providers : sequence of str, optional
        Kernel providers in the order in which they are asked; `ferroflow.kernels.providers` if left out.
    prefix : callable, optional
        Names the tasks of an op.

    Raises
    ------
    BindError
        A name, shape or dtype does not fit.
    KernelNotFoundError
        No provider has one of the operators.
    """
    chosen = tuple(config.get_names("kernels.providers") if providers is None else providers)
    values = check_inputs(graph, inputs)
    check_supported(graph, chosen)
    run = uuid.uuid4().hex
    lowered = lower(
        graph, values, run, providers=chosen, costs=estimate(graph, costs or AnalyticCost()), prefix=prefix
    )
    return BoundGraph(run, lowered.dsk, lowered.keys, lowered.n_tasks, graph)
