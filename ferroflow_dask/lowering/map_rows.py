"""Batch inference on rows of any collection: frames, bags, delayed values, and arrays with functions."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dask._task_spec import DataNode, GraphNode, Task, TaskRef
from dask.typing import Key

from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.batching import BATCH
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.kernels.choice import one_line
from ferroflow_dask.lowering.batch_model import BatchModel, Trial, batch_model
from ferroflow_dask.lowering.row_sources import ArraySource, FrameSource, RowSource, blank
from ferroflow_dask.lowering.row_steps import MapChunk, Steps
from ferroflow_dask.lowering.sources import checked
from ferroflow_dask.lowering.warm_up import warm_up

logger = logging.getLogger("ferroflow_dask")


def map_rows(
    graph: Graph,
    source: RowSource,
    providers: tuple[str, ...],
    steps: Steps,
    trial: Trial,
    *,
    meta: Any = None,
    others: Mapping[str, Any] | None = None,
    has_warm_up: bool = False,
) -> Any:
    """Compute a model on each chunk of a collection, lazily; see `ferroflow_dask.Model.map_batches`.

    Parameters
    ----------
    graph : Graph
    source : RowSource
    providers : tuple of str
    steps : Steps
    trial : Trial
    meta : DataFrame or array, optional
        An empty result.
    others : mapping of str to array, optional
        Inputs that go with every batch.
    has_warm_up : bool, optional
        Whether the model is opened on all workers now.
    """
    others = others or {}
    steps = replace(steps, form=source.form)
    known: dict[str, TensorSpec] = {}
    for name, found in _inputs(graph, source, steps, others).items():
        known[name] = _with_batch(graph.inputs[name], found)
    if isinstance(source, FrameSource | ArraySource):
        needs_shapes = isinstance(source, ArraySource) and steps.postprocess is None
        trial = replace(trial, needs_shapes=needs_shapes, first=_first(graph, source, steps))
    elif not trial.specs:
        trial = replace(trial, specs={name: graph.spec(name) for name in graph.outputs})
    model = batch_model(graph, known, others, providers, trial)
    if has_warm_up:
        warm_up(model, steps)
    if meta is None and isinstance(source, FrameSource | ArraySource):
        meta = _meta(source, steps, model.specs)
    return write_chunks(model, source, steps, meta, others)


def write_chunks(
    model: BatchModel, source: RowSource, steps: Steps, meta: Any, others: Mapping[str, Any]
) -> Any:
    """Return the collection of results: a task for each chunk."""
    run = uuid.uuid4().hex
    # Dask sorts the keys of frames, which are tuples.
    model_key, name = (f"model-{run}", 0), f"map_batches-{run}"
    function = MapChunk(model.sent, steps, model.specs, source.names)
    tasks: dict[Key, GraphNode] = {model_key: DataNode(model_key, function)}
    constant = checked_others(model, others)
    weights = model.weight_arguments
    for i, arguments in enumerate(source.chunks()):
        tasks[name, i] = Task((name, i), _run_chunk, TaskRef(model_key), *weights, *arguments, *constant)
    return source.collect(tasks, name, meta)


def checked_others(model: BatchModel, others: Mapping[str, Any]) -> list[Any]:
    """Return the values that go with every batch; Futures are checked in its task, so that none is copied."""
    specs = model.run.graph.inputs
    return [
        Task(None, checked, value, name, specs[name], {})
        if isinstance(value, TaskRef) and specs[name].dtype is not None
        else value
        for name, value in others.items()
    ]


def _run_chunk(function: MapChunk, *arguments: Any) -> Any:
    return function(*arguments)


def _inputs(
    graph: Graph, source: RowSource, steps: Steps, others: Mapping[str, Any]
) -> dict[str, TensorSpec | None]:
    """Return the inputs that are batched, with what is known of them besides what the graph tells."""
    if isinstance(source, ArraySource) and steps.preprocess is None:
        return dict(source.specs())
    if not isinstance(source, FrameSource | ArraySource):
        return dict.fromkeys(graph.inputs)
    if others:
        raise UsageError(
            f"with preprocess, all inputs must be Dask arrays, and {next(iter(others))!r} is none; return it "
            "from preprocess with a row for each row"
        )
    if isinstance(source, FrameSource) and steps.preprocess is None:
        source.check(graph.inputs, steps.columns)
    first: Exception | None = None
    for example in source.examples():
        try:
            arrays = steps.read(example, graph.inputs)
        except Exception as error:  # noqa: BLE001 -- of a function of the user
            first = error
            continue
        return {name: TensorSpec.of(array.dtype, array.shape) for name, array in arrays.items()}
    raise _no_rows("the first rows cannot be read as inputs", first) from first


def _no_rows(what: str, first: Exception | None) -> BindError:
    return BindError(f"{what}: {'there are none' if first is None else one_line(first)}")


def _with_batch(wanted: TensorSpec, found: TensorSpec | None) -> TensorSpec:
    """Return an input with the batch in front."""
    dtype, shape = wanted.dtype, wanted.shape
    if found is not None:
        dtype = dtype or found.dtype
        shape = found.shape if shape is None else shape
    return TensorSpec(dtype, (BATCH, *(shape or ())[1:]))


def _first(graph: Graph, source: RowSource, steps: Steps) -> Any:
    """Return the function that returns the first rows as arrays."""

    def first(n: int) -> Sequence[Any]:
        try:
            *_, example = source.examples()
            return [array[:n] for array in steps.read(example, graph.inputs).values()]
        except Exception as error:  # noqa: BLE001 -- a computation of the result raises it again
            logger.info("the first rows cannot be computed to try a model out: %s", error)
            return []

    return first


def _meta(source: FrameSource | ArraySource, steps: Steps, specs: Mapping[str, TensorSpec]) -> Any:
    """Return a result of no rows, which functions make of made-up outputs."""
    if steps.postprocess is None and (steps.preprocess is None or isinstance(source, ArraySource)):
        return source.form.write(source.meta, blank(specs, 0, steps.has_nulls))
    first: Exception | None = None
    for example in source.examples():
        try:
            form, rows = steps.prepared(example)
            result = steps.written(example, rows, blank(specs, form.n_rows(rows), steps.has_nulls))
            result = result if steps.postprocess is None else steps.postprocess(result)
        except Exception as error:  # noqa: BLE001 -- of a function of the user
            first = error
            continue
        if isinstance(result, Mapping):
            return {name: part[:0] for name, part in result.items()}
        return result[:0]
    what = "preprocess or postprocess failed on the first rows with made-up outputs"
    raise BindError(f"{_no_rows(what, first)}; give an empty result as meta=") from first
