"""Models: graphs that users load, build or generate, and compute with Dask.

A `Graph` is data and knows nothing of Dask. A `Model` has one and lowers it to Dask tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ferroflow_dask.arguments import check_kind
from ferroflow_dask.clients import check_synchronous
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.graph.render import to_dot, to_html, write
from ferroflow_dask.kernels.evaluate import evaluate
from ferroflow_dask.kernels.provider import Part
from ferroflow_dask.kernels.session import parts_of
from ferroflow_dask.lowering.bundles import default_granularity
from ferroflow_dask.lowering.collection import BoundGraph, bind_graph
from ferroflow_dask.lowering.pinned import in_parts, is_pinned, on_cluster
from ferroflow_dask.lowering.scattering import scatter
from ferroflow_dask.model.batch_inference import BatchInference
from ferroflow_dask.strategy import Strategy

if TYPE_CHECKING:
    from distributed import Client

    from ferroflow_dask.cluster_profile import ClusterProfile
    from ferroflow_dask.cost import CostModel


@dataclass(frozen=True, eq=False, repr=False)
class Model(BatchInference):
    """A graph with the methods that compute it.

    Parameters
    ----------
    graph : Graph

    See Also
    --------
    ferroflow_dask.load_onnx : imports an ONNX model.
    ferroflow_dask.GraphBuilder : builds a model op by op.
    ferroflow_dask.generate : returns one of the built-in models.
    """

    graph: Graph

    def __post_init__(self) -> None:
        check_kind("Model", self.graph, Graph, "a Graph; load_onnx(file) and generate(name) return Models")

    @property
    def name(self) -> str:
        """Name of the graph."""
        return self.graph.name

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """Inputs that must be bound, by name."""
        return self.graph.inputs

    @property
    def defaults(self) -> dict[str, TensorSpec]:
        """Constants that may be bound like inputs, by name."""
        return self.graph.defaults

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return self.graph.outputs

    def bind(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        profile: ClusterProfile | None = None,
        granularity: str | None = None,
        costs: CostModel | None = None,
        gpu_costs: CostModel | None = None,
        gpu_matmul_threshold: int | None = None,
        providers: Sequence[str] | None = None,
        strategy: Strategy | None = None,
        **named: Any,
    ) -> BoundGraph:
        """Give the inputs their values and return a Dask collection of the outputs.

        Parameters
        ----------
        inputs : mapping of str to array, optional
            Inputs by name. An input whose name is no Python identifier, or that of an option, is given here.
        profile : ClusterProfile, optional
            The cluster that the graph is cut for, as `calibrate` returns it: ops that are too short for a
            task of their own are bundled.
        granularity : str, optional
            `whole` (one task, in one onnxruntime session or in several, see `providers`), `bundles`, `ops`
            (a task for each op) or `auto` (the one that is predicted to be fastest). `bundles` and `auto`
            need `profile`. The default is `whole`, or `auto` with a profile. For graphs without inputs or
            with operators of the domain ferroflow, and with `gpu_costs`, it is `ops`, or `bundles` with a
            profile. With a strategy it is `bundles`; `whole` is not allowed.
        costs : CostModel, optional
            Expected durations of ops, for the tasks' `ferroflow_cost`. By default they are estimated from
            shapes and nominal rates.
        gpu_costs : CostModel, optional
            Expected durations of ops on workers with GPUs, for clusters where only some workers have GPUs.
        gpu_matmul_threshold : int, optional
            Matrix products with at least this many elements in their result run on GPUs, all other ops on
            CPUs. By default each op runs where it is predicted to end first.
        providers : sequence of str, optional
            Kernel providers, the preferred one first; `ferroflow.kernels.providers` if left out.
        strategy : Strategy, optional
            Splits operators into parts for workers; see `ferroflow_dask.strategy`. Names of workers are those
            of the default client's cluster. Without a default client, parts run anywhere.
        **named
            Inputs by name: a NumPy or Dask array, a delayed value or a Future for each of `Model.inputs`, and
            for any of `Model.defaults`. Lazy values become one array on a worker. If its dtype is unknown
            until then, the worker checks it, and computing may raise `BindError`.

        Returns
        -------
        BoundGraph
            A Dask collection: `.compute()`, `.persist()`, `client.compute(…)` and `dask.compute(…)` yield the
            outputs by name.

        Raises
        ------
        BindError
            A name, shape or dtype does not fit; the message lists the inputs.
        KernelNotFoundError
            No provider has one of the operators.
        StrategyError
            The strategy does not fit the model or the cluster.
        UsageError
            An argument is of the wrong type, there is no such granularity, it needs a profile, an input is
            given twice, or the client that scattered the constants is closed.

        Examples
        --------
        >>> import numpy as np
        >>> from ferroflow_dask import GraphBuilder
        >>> builder = GraphBuilder("double")
        >>> x = builder.input("x", "float32", ("batch",))
        >>> builder.output(y=builder.op("Add", x, x))
        >>> model = builder.build()
        >>> model.bind(x=np.float32([1, 2])).compute(scheduler="sync")
        {'y': array([2., 4.], dtype=float32)}
        >>> model.bind({"x": np.float32([3])}, granularity="whole").compute(scheduler="sync")
        {'y': array([6.], dtype=float32)}
        """
        given = _by_name("bind", inputs, named)
        options: dict[str, Any] = {
            "profile": profile,
            "granularity": granularity,
            "costs": costs,
            "gpu_costs": gpu_costs,
            "gpu_matmul_threshold": gpu_matmul_threshold,
            "providers": providers,
            "strategy": strategy,
        }
        for option, value in options.items():
            is_input = option in self.inputs or option in self.defaults
            if value is not None and is_input and option not in given:
                raise UsageError(
                    f"{option!r} is an input of model {self.name!r} and an option of bind; give the input in "
                    f"a dict: bind({{{option!r}: {option}}})"
                )
        if granularity is None and strategy is None and not is_pinned(self.graph):
            has_gpu_costs = gpu_costs is not None or gpu_matmul_threshold is not None
            options["granularity"] = default_granularity(self.graph, profile is not None, has_gpu_costs)
        return bind_graph(self.graph, given, **options)

    def scatter(self, client: Client, strategy: Strategy | None = None) -> Model:
        """Copy the constants to every worker and return a model that refers to the copies.

        This model is not changed. Without `scatter`, constants travel inside the Dask graph. That is right
        for small constants and slow for the weights of a large model (Dask warns about graphs over 10 MB).
        If the plugin is installed, all copies stay; otherwise Dask's active memory manager keeps one copy of
        a constant that no task waits for.

        Parameters
        ----------
        client : distributed.Client
            A synchronous client. The returned model can be computed on its cluster while it is open.
        strategy : Strategy, optional
            Splits operators into parts for workers. Each worker gets only the weights that its parts read.
            The returned model is in parts: `bind` takes no strategy then. Shapes of inputs must be known.

        Returns
        -------
        Model
            The constants stay on the cluster as long as it lives.

        Raises
        ------
        ClusterError
            There are no workers.
        StrategyError
            The strategy does not fit the model or the cluster.
        UsageError
            `client` is asynchronous, closed, or no client.

        Examples
        --------
        >>> model = load_onnx("model.onnx").scatter(client)  # doctest: +SKIP
        >>> client.compute(model.bind(x=x)).result()  # doctest: +SKIP
        """
        graph = self.graph
        if strategy is not None:
            check_kind("scatter", strategy, Strategy, "a Strategy, as read_strategy(file) returns one")
            check_synchronous(client, "scatter")
            graph = in_parts(graph, {}, on_cluster(strategy, client))
        return Model(scatter(graph, client))

    def evaluate(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        providers: Sequence[str] | None = None,
        **named: Any,
    ) -> dict[str, Any]:
        """Compute the model in this process, one op after another, and return the outputs by name.

        Parameters
        ----------
        inputs : mapping of str to array, optional
            Inputs by name, as for `bind`.
        providers : sequence of str, optional
            Kernel providers, as for `bind`.
        **named
            Inputs by name.

        Raises
        ------
        BindError
            A name, shape or dtype does not fit.
        KernelNotFoundError
            No provider has one of the operators.
        KernelError
            An op failed.
        UsageError
            The constants were scattered on a cluster, or an input is given twice.

        Examples
        --------
        >>> from ferroflow_dask import generate
        >>> {name: y.shape for name, y in generate("uniform", n=1, dim=2).evaluate().items()}
        {'matmul_2': (2, 2)}
        """
        return evaluate(self.graph, _by_name("evaluate", inputs, named), providers=providers)

    def providers(self, *, providers: Sequence[str] | None = None) -> list[Part]:
        """Return which parts of the model run where if it is computed as a whole, and why.

        The model is opened for that. Parts that onnxruntime computes are sessions. An op is outside of
        sessions if onnxruntime has no kernel for it, or computes something else than ONNX describes.

        Parameters
        ----------
        providers : sequence of str, optional
            Kernel providers, as for `bind`.

        Returns
        -------
        list of Part
            Each with `provider`, the names of its `ops`, and the `reason` why it is no session.

        Raises
        ------
        KernelNotFoundError
            No provider has one of the operators.

        Examples
        --------
        >>> for part in load_onnx("model.onnx").providers():  # doctest: +SKIP
        ...     print(part)
        onnxruntime: 12 ops
        reference: resize_3 (align_corners aligns the rounded, not the exact size)
        onnxruntime: 7 ops
        """
        return parts_of(self.graph, providers)

    def visualize(self, filename: str | None = None) -> str:
        """Return the graph in Graphviz's DOT language; with a `filename`, also write it.

        Parameters
        ----------
        filename : str, optional
            With the suffix .dot, or .svg, .png or .pdf, which Graphviz's program `dot` renders.

        Raises
        ------
        UsageError
            The file has another suffix, or Graphviz is not installed.
        FerroflowError
            The file cannot be written, or Graphviz failed.
        """
        dot = to_dot(self.graph)
        if filename is not None:
            write(dot, filename)
        return dot

    def _repr_html_(self) -> str:
        return to_html(self.graph)

    def __repr__(self) -> str:
        return f"<Model{repr(self.graph).removeprefix('<Graph')}"


def _by_name(function: str, inputs: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that a method got as a mapping and as keywords."""
    given = {} if inputs is None else inputs
    check_kind(function, given, Mapping, f"a dict of inputs by name, {function}({{'x': x}})")
    twice = given.keys() & named.keys()
    if twice:
        raise UsageError(f"input {min(twice)!r} is given twice, in the dict and as a keyword")
    return {**given, **named}
