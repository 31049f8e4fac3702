"""Models: graphs that users load, build or generate, and compute with Dask.

A `Graph` is data and knows nothing of Dask. A `Model` has one and lowers it to Dask tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from ferroflow_dask.lowering.batches import Outputs, map_batches
from ferroflow_dask.lowering.bundles import default_placement
from ferroflow_dask.lowering.collection import BoundGraph, bind_graph
from ferroflow_dask.lowering.forms import Columns
from ferroflow_dask.lowering.pinned import in_parts, is_pinned, on_cluster
from ferroflow_dask.lowering.placement import place
from ferroflow_dask.strategy import Strategy

if TYPE_CHECKING:
    from distributed import Client

    from ferroflow_dask.cluster_profile import ClusterProfile
    from ferroflow_dask.cost import CostModel


@dataclass(frozen=True, eq=False, repr=False)
class Model:
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
        placement: str | None = None,
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
        placement : str, optional
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
            An argument is of the wrong type, there is no such placement, it needs a profile, an input is
            given twice, or the client that placed the constants is closed.

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
        >>> model.bind({"x": np.float32([3])}, placement="whole").compute(scheduler="sync")
        {'y': array([6.], dtype=float32)}
        """
        given = _by_name("bind", inputs, named)
        options: dict[str, Any] = {
            "profile": profile,
            "placement": placement,
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
        if placement is None and strategy is None and not is_pinned(self.graph):
            has_gpu_costs = gpu_costs is not None or gpu_matmul_threshold is not None
            options["placement"] = default_placement(self.graph, profile is not None, has_gpu_costs)
        return bind_graph(self.graph, given, **options)

    def map_batches(
        self,
        data: Any,
        *,
        batch: int | None = None,
        batch_size: int | None = None,
        columns: Columns = None,
        preprocess: Callable[[Any], Any] | None = None,
        postprocess: Callable[[Any], Any] | None = None,
        on_error: str = "raise",
        providers: Sequence[str] | None = None,
        session_options: Mapping[str, Any] | None = None,
        intra_op_num_threads: int | None = None,
        warm_up: bool = False,
        check_rows: bool = True,
        outputs: Outputs | None = None,
        meta: Any = None,
    ) -> Any:
        """Compute the model on batches of rows, lazily: each worker runs the whole model.

        Weights travel to each worker once; a worker keeps the last four models open. The rows of a batch must
        not depend on each other, or on their place in the batch. Two random rows are checked for that, once
        for each model and values of inputs that go with every batch; dependent rows raise `BindError`. If the
        model fails on random values, the first rows of `data` are computed and checked. Rows are not checked
        if they are fed one at a time, if the model draws random numbers or quantizes by the range of a batch,
        or if its constants are on the cluster of an asynchronous client.

        Parameters
        ----------
        data : DataFrame, array, mapping of str to array, bag, or delayed values
            A DataFrame of pandas or Dask: inputs are columns, and each output becomes a column. If a row of
            an output is an array, the column contains arrays. Index and divisions are kept.
            A Dask array: batches are its chunks along the first dimension. A NumPy array is cut into batches.
            For several inputs, a dict: Dask arrays are batched alike, other arrays go with every batch; any
            of `Model.defaults` may be among them.
            A bag: items are rows, or dicts to which outputs are added. A delayed value, or a list of them:
            each is a chunk, that is a DataFrame, an array, a dict of arrays or a list.
        batch : int, optional
            Rows of a chunk, for arrays and pandas frames. The default is the chunks of `data`, 32 for a NumPy
            array, and four chunks for each thread for a pandas frame.
        batch_size : int, optional
            Rows that the model gets at once. The default is all rows of a chunk. Chunks stay as they are.
        columns : dict of str to (str or list of str), or list of str, optional
            Columns of a frame by input, or those of the only input. The default is columns with the names of
            inputs, or else all columns for the only input. For bags, keys of the dicts by input.
        preprocess : callable or class, optional
            Gets a batch of `data` (a pandas DataFrame, an array, a dict of arrays, a list) and returns what
            the model gets: an array, a dict of arrays, a DataFrame or a list. The number of rows may change.
            Outputs are added to the rows that it returns if these have the type of `data`. A class, or a
            `functools.partial` of one, is built once in each process.
        postprocess : callable or class, optional
            Gets a batch of the result and returns what to keep of it.
        on_error : {"raise", "null"}, optional
            With "null", outputs of rows that fail in `preprocess` or in the model are null. A warning counts
            them. A batch that fails is computed again row by row. In arrays, integers become float64.
        providers : sequence of str, optional
            Kernel providers; `ferroflow.kernels.providers` if left out. If onnxruntime is among them the
            model is one session, otherwise it is computed op by op.
        session_options : dict, optional
            Fields of onnxruntime's `SessionOptions`, such as `graph_optimization_level`: "disabled", "basic",
            "extended" or "all". Names with a dot are configuration entries.
        intra_op_num_threads : int, optional
            Threads of a session. The default is `OMP_NUM_THREADS`, which Dask sets to 1 in its workers.
        warm_up : bool, optional
            Whether the model is opened on all workers of the default client before this method returns.
        check_rows : bool, optional
            Whether rows are checked. With `outputs` as a dict, a model is then not run before the
            computation, unless it has a fixed batch.
        outputs : list of str, or dict of str to (dtype, shape of a row), optional
            The outputs to return. What only other outputs need is not computed. Without a dict, dtypes and
            shapes come from the model; if it does not tell them, it is run on a few rows of zeros, or on the
            first rows of `data` if it fails on zeros.
        meta : DataFrame, array or dict of arrays, optional
            An empty result. By default functions are called with a few rows to find it.

        Returns
        -------
        dask DataFrame, dask array, dict of str to dask array, bag, delayed value, or list of delayed values
            Of the type of `data`. For arrays, the output, or the outputs by name if there are several. With
            `preprocess` or `postprocess`, an array has unknown chunk sizes.

        Raises
        ------
        BindError
            A name, shape or dtype does not fit, an output has no batch dimension, rows depend on each other,
            or `array.query-planning` is on in Dask's configuration.
        UnknownNameError
            The model has no such output.
        UsageError
            An option has another form, or does not fit the type of `data`.
        KernelNotFoundError
            No provider has one of the operators.

        Examples
        --------
        >>> frame = dask.dataframe.read_parquet("table.parquet")  # doctest: +SKIP
        >>> frame = load_onnx("model.onnx").map_batches(frame)  # doctest: +SKIP
        >>> frame.to_parquet("out.parquet")  # doctest: +SKIP
        """
        return map_batches(
            self.graph,
            data,
            batch=batch,
            batch_size=batch_size,
            columns=columns,
            preprocess=preprocess,
            postprocess=postprocess,
            on_error=on_error,
            providers=providers,
            session_options=session_options,
            intra_op_num_threads=intra_op_num_threads,
            warm_up=warm_up,
            check_rows=check_rows,
            outputs=outputs,
            meta=meta,
        )

    def place(self, client: Client, strategy: Strategy | None = None) -> Model:
        """Copy the constants to every worker and return a model that refers to the copies.

        This model is not changed. Without placement, constants travel inside the Dask graph. That is right
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
        >>> model = load_onnx("model.onnx").place(client)  # doctest: +SKIP
        >>> client.compute(model.bind(x=x)).result()  # doctest: +SKIP
        """
        graph = self.graph
        if strategy is not None:
            check_kind("place", strategy, Strategy, "a Strategy, as read_strategy(file) returns one")
            check_synchronous(client, "place")
            graph = in_parts(graph, {}, on_cluster(strategy, client))
        return Model(place(graph, client))

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
            The constants were placed on a cluster, or an input is given twice.

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
