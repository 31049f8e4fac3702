"""Batch inference: the method of models that computes rows of a collection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferroflow_dask.graph.batch_axes import BatchAxis
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.lowering.batches import Outputs, map_batches
from ferroflow_dask.lowering.forms import Columns


class BatchInference:
    """A base class of `Model`."""

    graph: Graph

    def map_batches(
        self,
        data: Any,
        *,
        batch: int | None = None,
        batch_size: int | None = None,
        batch_axis: BatchAxis = 0,
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
        batch_axis : int, or dict of str to int, optional
            The axis of the model's inputs and outputs along which rows are: of all, or by name. The default
            is the first. In `data` and in the result, rows are always along the first axis.
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
            batch_axis=batch_axis,
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
