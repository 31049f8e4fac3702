"""Batch inference: a whole model on each worker, the batches of Dask arrays spread over them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from dask._task_spec import DataNode, GraphNode, Task, TaskRef
from dask.base import compute
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.typing import Key

from ferroflow_dask.bundling.results import Results
from ferroflow_dask.counts import as_count
from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.batch_axes import BatchAxis, with_rows_first
from ferroflow_dask.graph.batching import BATCH
from ferroflow_dask.graph.defaults import with_inputs
from ferroflow_dask.graph.inputs import as_array, check_array, taken
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.graph.outputs import with_outputs
from ferroflow_dask.kernels.choice import check_supported, provider_names
from ferroflow_dask.kernels.session_settings import SessionSettings
from ferroflow_dask.lowering.batch_model import BatchModel, LoadedModel, RunModel, Trial, batch_model
from ferroflow_dask.lowering.forms import Columns
from ferroflow_dask.lowering.map_rows import checked_others, map_rows
from ferroflow_dask.lowering.row_sources import ArraySource, source_of
from ferroflow_dask.lowering.row_steps import Steps, function_of
from ferroflow_dask.lowering.scattering import check_scattered
from ferroflow_dask.lowering.sources import (
    check_sizes,
    checked,
    is_dask_array,
    is_expression,
    is_lazy,
    no_array,
)
from ferroflow_dask.lowering.trials import row_shape
from ferroflow_dask.lowering.warm_up import warm_up

logger = logging.getLogger("ferroflow_dask")

#: Rows of a batch where nobody says how many.
_ROWS = 32


def _run(model: RunModel | LoadedModel, *arguments: Any) -> Any:
    results = model(*arguments)
    return results[0] if len(results.values) == 1 else results


def _item(results: Results, item: int) -> Any:
    return results[item]


#: Names of outputs, or by these the dtype and the shape of a row.
Outputs = Sequence[str] | Mapping[str, tuple[Any, Sequence[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """What `Model.map_batches` is given besides data, model and trials; see there."""

    columns: Columns = None
    batch_size: int | None = None
    preprocess: Any = None
    postprocess: Any = None
    on_error: str = "raise"
    meta: Any = None
    session_options: Mapping[str, Any] | None = None
    intra_op_num_threads: int | None = None
    warm_up: bool = False

    def steps(self) -> Steps:
        """Return the steps that rows go through."""
        if self.batch_size is not None and not as_count(self.batch_size):
            raise UsageError(f"batch_size must be a number of rows, at least 1, got {self.batch_size!r}")
        if self.on_error not in ("raise", "null"):
            raise UsageError(f'on_error must be "raise" or "null", got {self.on_error!r}')
        return Steps(
            columns=self.columns,
            preprocess=function_of("preprocess", self.preprocess),
            postprocess=function_of("postprocess", self.postprocess),
            batch_size=as_count(self.batch_size),
            has_nulls=self.on_error == "null",
        )


def map_batches(
    graph: Graph,
    data: Any,
    *,
    batch: int | None = None,
    batch_axis: BatchAxis = 0,
    providers: Sequence[str] | None = None,
    check_rows: bool = True,
    outputs: Outputs | None = None,
    **options: Any,
) -> Any:
    """Compute a model on batches of rows, lazily; see `ferroflow_dask.Model.map_batches`."""
    specs = _specs_of(outputs)
    if outputs is not None:
        graph = with_outputs(graph, list(outputs))
    graph = with_rows_first(graph, batch_axis)
    rows = RowOptions(**options)
    settings = SessionSettings.of(rows.session_options, rows.intra_op_num_threads)
    steps, trial = rows.steps(), Trial(check_rows, specs, settings=settings)
    if batch is not None and not as_count(batch):
        raise UsageError(f"batch is {batch!r}; it must be a number of rows, at least 1")
    source = source_of(data, as_count(batch))
    if source is not None:
        names = provider_names(providers)
        check_scattered(graph)
        check_supported(graph, names)
        return map_rows(graph, source, names, steps, trial, meta=rows.meta, has_warm_up=rows.warm_up)
    if rows.columns is not None:
        raise UsageError("columns are of data frames and bags, and data is an array; pass a dict of arrays")
    if steps.is_plain:
        model, batched, others = _prepared(graph, data, batch, providers, trial)
        if rows.warm_up:
            warm_up(model, steps)
        return _write(model, batched, others)
    has_functions = not (steps.preprocess is None and steps.postprocess is None)
    if steps.preprocess is None:
        graph, names, batched, others = _given(graph, data, batch, providers)
    else:
        check_scattered(graph)
        names = provider_names(providers)
        check_supported(graph, names)
        batched, others = unchecked(data, batch), {}
    arrays = ArraySource(batched, isinstance(data, Mapping), has_functions)
    return map_rows(
        graph, arrays, names, steps, trial, meta=rows.meta, others=others, has_warm_up=rows.warm_up
    )


def _specs_of(outputs: Outputs | None) -> dict[str, TensorSpec]:
    """Return what a caller tells of outputs; nothing if it tells names only."""
    form = "outputs must be a list of names, or a dict like {'y': ('float32', (10,))}"
    if isinstance(outputs, str) or not (outputs is None or isinstance(outputs, Sequence | Mapping)):
        raise UsageError(f"{form}, got {outputs!r}")
    if outputs is not None and not outputs:
        raise UsageError(f"{form}, got none")
    if not isinstance(outputs, Mapping):
        return {}
    specs = {}
    for name, told in outputs.items():
        try:
            dtype, shape = told
            is_text = np.dtype(dtype).kind in "SU"
            specs[name] = TensorSpec.of(object if is_text else dtype, (BATCH, *map(int, shape)))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{form}, got {told!r} for {name!r}") from error
    return specs


def how_batched(graph: Graph, x: Any, *, providers: Sequence[str] | None = None) -> str:
    """Return how `map_batches` of the same arguments takes batches, in words."""
    model, _, _ = _prepared(graph, x, None, providers, Trial())
    return model.how


def _prepared(
    graph: Graph, x: Any, batch: int | None, providers: Sequence[str] | None, trial: Trial
) -> tuple[BatchModel, dict[str, Any], dict[str, Any]]:
    """Return the model, the inputs that are batched, and the others."""
    graph, names, batched, others = _given(graph, x, batch, providers)
    known = {name: TensorSpec(value.dtype, (BATCH, *value.shape[1:])) for name, value in batched.items()}
    trial = replace(trial, first=partial(_first_rows, list(batched.values())))
    return batch_model(graph, known, others, names, trial), batched, others


def _given(
    graph: Graph, x: Any, batch: int | None, providers: Sequence[str] | None
) -> tuple[Graph, tuple[str, ...], dict[str, Any], dict[str, Any]]:
    """Return the graph, its providers, the inputs that are batched, and the others."""
    names = provider_names(providers)
    check_scattered(graph)
    if isinstance(x, Mapping):
        graph = with_inputs(graph, x)
    check_supported(graph, names)
    given = _arrays(graph, x, batch)
    batched = {name: value for name, value in given.items() if is_dask_array(value)}
    return graph, names, batched, {name: value for name, value in given.items() if name not in batched}


def unchecked(data: Any, batch: int | None) -> dict[str, Any]:
    """Return arrays that a function makes the inputs of, with equal chunks of whole rows."""
    given = data if isinstance(data, Mapping) else {"data": data}
    arrays = {
        name: value if is_dask_array(value) else _as_batches(name, value, as_count(batch))
        for name, value in given.items()
    }
    _check_expressions(arrays.values())
    for name, value in arrays.items():
        check_sizes(name, value)
    return _aligned(arrays, batch)


def _aligned(arrays: Mapping[str, Any], batch: int | None) -> dict[str, Any]:
    """Return arrays in equal chunks of whole rows: those of the first array, or of `batch` rows."""
    first = next(iter(arrays.values()))
    rows = first.chunks[0] if batch is None else first.rechunk({0: batch}).chunks[0]
    found = {}
    for name, value in arrays.items():
        if len(value) != sum(rows):
            raise BindError(f"input {name!r} has {len(value)} rows, others have {sum(rows)}")
        found[name] = value.rechunk({0: rows, **dict.fromkeys(range(1, value.ndim), -1)})
    return found


def _check_expressions(arrays: Iterable[Any]) -> None:
    if any(is_expression(value) for value in arrays):
        raise BindError(
            "map_batches does not work with Dask's query planning of arrays; set array.query-planning to "
            "false in Dask's configuration, before dask.array is imported"
        )


def _first_rows(arrays: Sequence[Any], n: int) -> list[Any]:
    """Return the first n rows of Dask arrays; nothing where they cannot be had now."""
    try:
        found = compute(*(array[:n] for array in arrays))
    except Exception as error:  # noqa: BLE001 -- whatever it is, a computation of the result raises it again
        logger.info("the first rows cannot be computed to try a model out: %s", error)
        return []
    # An asynchronous client would have to be waited for.
    return list(found) if isinstance(found, tuple) else []


def _arrays(graph: Graph, x: Any, batch: int | None) -> dict[str, Any]:
    """Return a value for each input, those to be batched as Dask arrays with equal chunks of whole rows."""
    wanted = taken(graph)
    batch = as_count(batch)
    if not isinstance(x, Mapping):
        if len(graph.inputs) != 1:
            raise BindError(f"graph {graph.name!r} takes {wanted}; give a dict of arrays")
        name = next(iter(graph.inputs))
        x = {name: x if is_dask_array(x) else _as_batches(name, x, batch)}
    for name in (*x, *graph.inputs):
        if name not in graph.inputs or name not in x:
            what = "is missing" if name in graph.inputs else "is none of them"
            raise BindError(f"graph {graph.name!r} takes {wanted}; {name!r} {what}")
    arrays = {
        name: x[name] if is_dask_array(x[name]) else _other(name, x[name], spec)
        for name, spec in graph.inputs.items()
    }
    batched = {name: value for name, value in arrays.items() if is_dask_array(value)}
    _check_expressions(batched.values())
    if not batched:
        raise BindError("no input is a Dask array; wrap what is to be batched in dask.array.from_array")
    for name, value in batched.items():
        _check(name, value, graph.inputs[name])
    return {**arrays, **_aligned(batched, batch)}


def _as_batches(name: str, value: Any, batch: int | None) -> Any:
    if is_lazy(value):
        raise no_array(name, value)
    array = as_array(name, value)
    if not array.ndim:
        raise BindError(f"input {name!r} has shape (); its first dimension must be the batch")
    from dask.array import from_array  # takes long to import

    return from_array(array, chunks=(batch or _ROWS, *(-1,) * (array.ndim - 1)))


def _other(name: str, value: Any, spec: TensorSpec) -> Any:
    """Return a value that goes with every batch."""
    if isinstance(value, TaskRef):  # a Future, which is checked where it is
        return value
    if is_lazy(value):
        raise no_array(name, value)
    return value if spec.dtype is None else checked(value, name, spec, {})


def _check(name: str, value: Any, spec: TensorSpec) -> None:
    if value.ndim == 0:
        raise BindError(f"input {name!r} has shape (); its first dimension must be the batch")
    check_sizes(name, value)
    # However many rows the graph was made for.
    any_rows = spec.shape and (None, *spec.shape[1:])
    check_array(name, value, TensorSpec(spec.dtype, any_rows), {})


def _write(model: BatchModel, batched: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """Return the outputs as Dask arrays: a task for each batch."""
    from dask.array import Array

    run = uuid.uuid4().hex
    model_key, name = f"model-{run}", f"map_batches-{run}"
    tasks: dict[Key, GraphNode] = {model_key: DataNode(model_key, model.sent)}
    arguments = checked_others(model, others)
    weights = model.weight_arguments
    first, single = next(iter(batched.values())), next(iter(model.specs.values()))
    for i in range(len(first.chunks[0])):
        chunks = [TaskRef((value.name, i, *(0,) * (value.ndim - 1))) for value in batched.values()]
        key: Key = _key(name, i, single) if len(model.specs) == 1 else (name, i)
        tasks[key] = Task(key, _run, TaskRef(model_key), *weights, *chunks, *arguments)
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=list(batched.values()))
    if len(model.specs) == 1:
        return Array(graph, name, _chunks_of(first, single), dtype=single.dtype)
    return {
        output: _output(graph, name, item, first, spec)
        for item, (output, spec) in enumerate(model.specs.items())
    }


def _chunks_of(first: Any, spec: TensorSpec) -> tuple[tuple[int, ...], ...]:
    return (first.chunks[0], *((size,) for size in row_shape(spec)))


def _key(name: str, i: int, spec: TensorSpec) -> Key:
    return (name, i, *(0 for _ in row_shape(spec)))


def _output(graph: HighLevelGraph, name: str, item: int, first: Any, spec: TensorSpec) -> Any:
    from dask.array import Array

    own = f"{name}-{item}"
    keys = [_key(own, i, spec) for i in range(len(first.chunks[0]))]
    tasks = {key: Task(key, _item, TaskRef((name, i)), item) for i, key in enumerate(keys)}
    layers = {**graph.layers, own: MaterializedLayer(tasks)}
    dependencies = {**graph.dependencies, own: {name}}
    return Array(HighLevelGraph(layers, dependencies), own, _chunks_of(first, spec), dtype=spec.dtype)
