"""Batch inference: a whole model on each worker, the batches of Dask arrays spread over them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from dask._task_spec import DataNode, Dict, GraphNode, Task, TaskRef
from dask.base import compute
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.typing import Key

from ferroflow_dask.bundling.results import Results
from ferroflow_dask.counts import as_count
from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.batching import BATCH
from ferroflow_dask.graph.defaults import with_inputs
from ferroflow_dask.graph.inputs import as_array, check_array, taken
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.graph.outputs import with_outputs
from ferroflow_dask.kernels.choice import check_supported, provider_names
from ferroflow_dask.lowering.batch_model import BatchModel, LoadedModel, RunModel, Trial, batch_model
from ferroflow_dask.lowering.placement import check_placed
from ferroflow_dask.lowering.sources import (
    check_sizes,
    checked,
    is_dask_array,
    is_expression,
    is_lazy,
    no_array,
)
from ferroflow_dask.lowering.trials import row_shape

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


def map_batches(
    graph: Graph,
    x: Any,
    *,
    batch: int | None = None,
    providers: Sequence[str] | None = None,
    check_rows: bool = True,
    outputs: Outputs | None = None,
) -> Any:
    """Compute a model on each batch of Dask arrays, lazily; see `ferroflow_dask.Model.map_batches`."""
    specs = _specs_of(outputs)
    if outputs is not None:
        graph = with_outputs(graph, list(outputs))
    model, batched, others = _prepared(graph, x, batch, providers, Trial(check_rows, specs))
    return _write(model, batched, others)


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
    names = provider_names(providers)
    check_placed(graph)
    if isinstance(x, Mapping):
        graph = with_inputs(graph, x)
    check_supported(graph, names)
    given = _arrays(graph, x, batch)
    batched = {name: value for name, value in given.items() if is_dask_array(value)}
    known = {name: TensorSpec(value.dtype, (BATCH, *value.shape[1:])) for name, value in batched.items()}
    others = {name: value for name, value in given.items() if name not in batched}
    trial = replace(trial, first=partial(_first_rows, list(batched.values())))
    return batch_model(graph, known, others, names, trial), batched, others


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
    if batch is not None and not as_count(batch):
        raise UsageError(f"batch is {batch!r}; it must be a number of rows, at least 1")
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
    if any(is_expression(value) for value in batched.values()):
        raise BindError(
            "map_batches does not work with Dask's query planning of arrays; set array.query-planning to "
            "false in Dask's configuration, before dask.array is imported"
        )
    if not batched:
        raise BindError("no input is a Dask array; wrap what is to be batched in dask.array.from_array")
    rows: Any = None
    for name, value in batched.items():
        _check(name, value, graph.inputs[name])
        chunks = value.chunks[0] if batch is None else value.rechunk({0: batch}).chunks[0]
        rows = chunks if rows is None else rows
        if len(value) != sum(rows):
            raise BindError(f"input {name!r} has {len(value)} rows, others have {sum(rows)}")
        arrays[name] = value.rechunk({0: rows, **dict.fromkeys(range(1, value.ndim), -1)})
    return arrays


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
    are_placed = any(isinstance(value, TaskRef) for value in model.weights.values())  # Futures are
    weights = [Dict(dict(model.weights))] if are_placed else []
    sent = model.run if are_placed else LoadedModel(model.run, model.weights)
    tasks: dict[Key, GraphNode] = {model_key: DataNode(model_key, sent)}
    arguments = _checked_others(model, others)
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


def _checked_others(model: BatchModel, others: Mapping[str, Any]) -> list[Any]:
    """Return the values that go with every batch; Futures are checked in its task, so that none is copied."""
    specs = model.run.graph.inputs
    return [
        Task(None, checked, value, name, specs[name], {})
        if isinstance(value, TaskRef) and specs[name].dtype is not None
        else value
        for name, value in others.items()
    ]


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
