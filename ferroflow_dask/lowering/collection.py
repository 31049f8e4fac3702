"""A graph with bound inputs, as a Dask collection."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from dask.base import DaskMethodsMixin
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.threaded import get as threaded_get
from dask.typing import Key

from ferroflow_dask.arguments import check_kind
from ferroflow_dask.bundling.predict import Prediction
from ferroflow_dask.bundling.results import Place
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.cost import AnalyticCost, CostModel, estimate
from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.graph.defaults import with_inputs
from ferroflow_dask.graph.inputs import check_inputs
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.choice import check_supported, provider_names
from ferroflow_dask.lowering.bundles import Bundling, bundle, check_granularity
from ferroflow_dask.lowering.pinned import in_parts, is_pinned, pinned_bundling
from ferroflow_dask.lowering.scattering import check_scattered
from ferroflow_dask.lowering.sources import check_lazy, is_lazy
from ferroflow_dask.lowering.tasks import GpuCosts, host_values, lower, op_type_prefix
from ferroflow_dask.strategy import Strategy


class BoundGraph(DaskMethodsMixin):
    """The outputs of a graph, to be computed by Dask.

    Made by `Model.bind`. `compute()`, `persist()`, `visualize()`, `client.compute(…)` and
    `dask.compute(…)` work as on any Dask collection; computing yields a dict of outputs by name.

    Attributes
    ----------
    run : str
        Unique; part of every key. `executed(client, run)` counts the ops that were executed.
    places : dict of str to (key, int or None)
        For each output the key of the task that yields it, and which item of its result it is; None for
        all of it.
    n_tasks : int
        Number of tasks that a computation runs.
    granularity : str
        `whole`, `bundles` or `ops`.
    predictions : mapping of str to Prediction
        What should happen on the cluster that the graph was cut for, if it was: by granularity, those that
        were considered.
    """

    def __init__(
        self,
        run: str,
        dsk: HighLevelGraph,
        places: Mapping[str, Place],
        *,
        n_tasks: int,
        graph: Graph | None,
        granularity: str = "ops",
        predictions: Mapping[str, Prediction] = MappingProxyType({}),
    ):
        self.run = run
        self.places = dict(places)
        self.n_tasks = n_tasks
        self.granularity = granularity
        self.predictions = dict(predictions)
        self._dsk = dsk
        # It may hold the Futures of scattered constants: without them persisted outputs that a worker took
        # with it could not be computed again.
        self._graph = graph

    def __dask_graph__(self) -> HighLevelGraph:
        return self._dsk

    def __dask_keys__(self) -> list[Key]:
        return list(dict.fromkeys(key for key, _ in self.places.values()))

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(self._dsk.layers)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        # Of one run there are several, with some of the outputs each.
        return (type(self).__name__, self.run, tuple(self.places.items()))

    __dask_optimize__ = None
    __dask_scheduler__ = staticmethod(threaded_get)

    def __dask_postcompute__(self) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
        return host_values, (self.places,)

    def __dask_postpersist__(self) -> tuple[Callable[..., BoundGraph], tuple[Any, ...]]:
        return _persisted, (self.run, self.places, self._graph, (self.granularity, self.predictions))

    @property
    def prediction(self) -> Prediction | None:
        """What should happen, if the graph was cut for a cluster."""
        return self.predictions.get(self.granularity)

    def by_name(self, results: Sequence[Any]) -> dict[str, Any]:
        """Return the outputs, given the results of `__dask_keys__()`."""
        return host_values(results, self.places)

    def only(self, *names: str) -> BoundGraph:
        """Return the collection of some of the outputs; what they do not need is not computed.

        It has no predictions, which are of all outputs.
        """
        for name in names:
            if name not in self.places:
                raise UnknownNameError.of("output", name, self.places)
        places = {name: self.places[name] for name in names}
        dsk = self._dsk.cull({key for key, _ in places.values()})
        n_tasks = len(dsk) if self.n_tasks else 0  # what was persisted is values
        return BoundGraph(
            self.run, dsk, places, n_tasks=n_tasks, graph=self._graph, granularity=self.granularity
        )

    def __repr__(self) -> str:
        names = list(self.places)
        return f"<BoundGraph: {self.n_tasks} tasks, outputs {names[:4]}{'…' if len(names) > 4 else ''}>"


def _persisted(
    results: Mapping[Key, Any],
    run: str,
    places: Mapping[str, Place],
    graph: Graph | None,
    planned: tuple[str, Mapping[str, Prediction]],
    *,
    rename: Any = None,
) -> BoundGraph:
    if rename:
        places = {name: (rename.get(key, key), item) for name, (key, item) in places.items()}
    layer = f"persisted-{run}"
    dsk = HighLevelGraph({layer: MaterializedLayer(results)}, {layer: set()})
    granularity, predictions = planned
    return BoundGraph(
        run, dsk, places, n_tasks=0, graph=graph, granularity=granularity, predictions=predictions
    )


def bind_graph(
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    costs: CostModel | None = None,
    providers: Sequence[str] | None = None,
    prefix: Callable[[Op], str] = op_type_prefix,
    profile: ClusterProfile | None = None,
    granularity: str | None = None,
    gpu_costs: CostModel | None = None,
    gpu_matmul_threshold: int | None = None,
    strategy: Strategy | None = None,
) -> BoundGraph:
    """Give a graph's inputs their values and lower it to Dask tasks.

    Most parameters and the errors are those of `ferroflow_dask.Model.bind`.

    Parameters
    ----------
    graph : Graph
    inputs : mapping of str to array, optional
    prefix : callable, optional
        Returns the key prefix of the tasks of an op; the operator's name by default.
    """
    check_scattered(graph)
    check_kind("bind", inputs or {}, Mapping, "a dict of inputs by name, bind({'x': x})")
    if profile is not None:
        check_kind("bind", profile, ClusterProfile, "a ClusterProfile, as calibrate(client) returns one")
    graph = with_inputs(graph, inputs or {})
    if strategy is not None:
        check_kind("bind", strategy, Strategy, "a Strategy, as read_strategy(file) returns one")
        graph = in_parts(graph, inputs or {}, strategy)
    with _collector_at_rest():
        seconds = _nominal_costs(graph) if costs is None else estimate(graph, costs)
        bundling = _bundling(graph, seconds, profile, granularity)
        return _bind(
            graph,
            {} if inputs is None else inputs,
            bundling,
            costs=seconds,
            providers=providers,
            prefix=prefix,
            is_predicted=profile is not None,
            gpu=_gpu_costs(graph, gpu_costs, gpu_matmul_threshold),
        )


#: What ops cost at nominal rates, of each graph that was bound before.
_nominal: WeakKeyDictionary[Graph, Mapping[int, float]] = WeakKeyDictionary()


def _nominal_costs(graph: Graph) -> Mapping[int, float]:
    if graph not in _nominal:
        _nominal[graph] = estimate(graph, AnalyticCost())
    return _nominal[graph]


def _gpu_costs(graph: Graph, costs: CostModel | None, threshold: int | None) -> GpuCosts | None:
    if costs is None and threshold is None:
        return None
    return GpuCosts(estimate(graph, costs or AnalyticCost()), threshold)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    # Lowering makes many objects and no garbage; the collector would look them through time and again.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _bind(
    graph: Graph,
    inputs: Mapping[str, Any],
    bundling: Bundling | None,
    *,
    costs: Mapping[int, float],
    providers: Sequence[str] | None,
    prefix: Callable[[Op], str],
    is_predicted: bool,
    gpu: GpuCosts | None,
) -> BoundGraph:
    chosen = provider_names(providers)
    check_lazy(inputs)
    values = check_inputs(graph, inputs, is_lazy)
    check_supported(graph, chosen)
    run = uuid.uuid4().hex
    lowered = lower(
        graph,
        values,
        run,
        providers=chosen,
        costs=costs,
        prefix=prefix,
        bundles=None if bundling is None or bundling.granularity == "ops" else bundling.bundles,
        guesses=None if bundling is None else bundling.costs_s,
        gpu=gpu,
        is_whole=bundling is not None and bundling.granularity == "whole",
    )
    return BoundGraph(
        run,
        lowered.dsk,
        lowered.places,
        n_tasks=lowered.n_tasks,
        graph=graph,
        granularity="ops" if bundling is None else bundling.granularity,
        predictions=bundling.predictions if bundling is not None and is_predicted else {},
    )


def _bundling(
    graph: Graph, costs: Mapping[int, float], profile: ClusterProfile | None, granularity: str | None
) -> Bundling | None:
    """Return how the graph is cut; None for a task for each op, of which nothing is predicted."""
    if is_pinned(graph):
        return pinned_bundling(graph, costs, granularity)
    if granularity is not None:
        check_granularity(granularity)
    if profile is not None:
        return bundle(graph, costs, profile, granularity or "bundles")
    if granularity in (None, "ops"):
        return None
    if granularity == "whole":
        return bundle(graph, costs, ClusterProfile((1,)), granularity)
    raise UsageError(
        f"granularity {granularity!r} needs profile=, which ferroflow_dask.calibrate(client) returns"
    )
