"""Batch inference: a whole model on each worker, the batches of Dask arrays spread over them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import dask.array as da
import numpy as np
from dask._task_spec import DataNode, Dict, GraphNode, Task, TaskRef
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.sizeof import sizeof
from dask.typing import Key

from ferroflow_dask.exceptions import BindError, FerroflowError, UsageError
from ferroflow_dask.graph.batching import BATCH, Batching, batching_of, inferred
from ferroflow_dask.graph.ir import Graph, Source, TensorSpec
from ferroflow_dask.kernels.registry import check_supported, provider_names
from ferroflow_dask.kernels.session import failed, runner_of
from ferroflow_dask.lowering.execution import Results

logger = logging.getLogger("ferroflow_dask")

#: Rows of a batch where nobody says how many.
_ROWS = 32

#: What tells graphs apart on workers, which keep sessions of them.
_tokens: WeakKeyDictionary[Graph, str] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The large constants of a model, which travel as one value, to each worker once."""

    arrays: Mapping[str, Any]


def _nbytes(weights: Weights) -> int:
    return sum(sizeof(array) for array in weights.arrays.values())


sizeof.register(Weights, _nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class RunModel:
    """Computes a model on one batch.

    Parameters
    ----------
    graph : Graph
        Without its large constants.
    token : str
        The same for equal models with equal constants only.
    providers : tuple of str
    inputs : tuple of str
        Names of the arrays that it is called with; those that are `batched` have the batch in front.
    batched : frozenset of str
    rows : int or None
        How many rows the graph takes at a time; None for any number.
    """

    graph: Graph
    token: str
    providers: tuple[str, ...]
    inputs: tuple[str, ...]
    batched: frozenset[str]
    rows: int | None

    def __call__(self, weights: Mapping[str, Any], *arrays: Any) -> Results:
        """Return the outputs, in the order in which the graph names them.

        Raises
        ------
        KernelError
            The model fails on these values.
        """
        values = dict(zip(self.inputs, arrays, strict=True))
        runner = runner_of(self.graph, self.token, weights, self.providers)
        try:
            if self.rows is None:
                outputs = runner(values)
                return Results(tuple(outputs[name] for name in self.graph.outputs))
            pieces = [runner({**values, **piece}) for piece in self._pieces(values)]
        except FerroflowError:
            raise
        except Exception as error:
            raise failed(self.graph, values, error) from error
        n = len(values[next(iter(self.batched))])
        return Results(
            tuple(np.concatenate([piece[name] for piece in pieces])[:n] for name in self.graph.outputs)
        )

    def _pieces(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        # What is missing in the last piece is the last row again: it is cut off afterwards.
        assert self.rows is not None
        n = len(values[next(iter(self.batched))])
        places = [np.minimum(np.arange(at, at + self.rows), n - 1) for at in range(0, n, self.rows)]
        return [{name: values[name][place] for name in self.batched} for place in places]


def _run(model: RunModel, weights: Weights | Mapping[str, Any], *arrays: Any) -> Any:
    arrays_of = weights.arrays if isinstance(weights, Weights) else weights
    results = model(arrays_of, *arrays)
    return results[0] if len(results.values) == 1 else results


def _item(results: Results, item: int) -> Any:
    return results[item]


def map_batches(
    graph: Graph, x: Any, *, batch: int | None = None, providers: Sequence[str] | None = None
) -> Any:
    """Compute a model on each batch of Dask arrays, lazily; see `Graph.map_batches`."""
    names = provider_names(providers)
    check_supported(graph, names)
    given = _arrays(graph, x, batch)
    batched = {name: value for name, value in given.items() if isinstance(value, da.Array)}
    known = {name: TensorSpec(value.dtype, (BATCH, *value.shape[1:])) for name, value in batched.items()}
    batching = batching_of(graph, known)
    if batching.was_fixed or batching.rows is not None:
        logger.info("model %r: %s", graph.name, batching)
    specs = _output_specs(batching, known, {n: v for n, v in given.items() if n not in batched}, names)
    return _arrays_of(batching, given, batched, specs, names)


def _arrays(graph: Graph, x: Any, batch: int | None) -> dict[str, Any]:
    """Return a value for each input, those to be batched as Dask arrays with equal chunks of whole rows."""
    wanted = ", ".join(f"{name}: {spec}" for name, spec in graph.inputs.items()) or "nothing"
    if not isinstance(x, Mapping):
        if len(graph.inputs) != 1:
            raise BindError(f"graph {graph.name!r} takes {wanted}; give a dict of arrays")
        x = {next(iter(graph.inputs)): x}
        if not isinstance(next(iter(x.values())), da.Array):
            x = {
                name: da.from_array(np.asarray(value), chunks=_chunks(value, batch))
                for name, value in x.items()
            }
    for name in (*x, *graph.inputs):
        if name not in graph.inputs or name not in x:
            what = "is missing" if name in graph.inputs else "is none of them"
            raise BindError(f"graph {graph.name!r} takes {wanted}; {name!r} {what}")
    if batch is not None and not (isinstance(batch, int) and batch >= 1):
        raise UsageError(f"batch is {batch!r}; it must be a number of rows, at least 1")
    arrays = {name: x[name] for name in graph.inputs}
    batched = {name: value for name, value in arrays.items() if isinstance(value, da.Array)}
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


def _chunks(value: Any, batch: int | None) -> tuple[int, ...]:
    return (batch if isinstance(batch, int) and batch > 0 else _ROWS, *(-1,) * (np.ndim(value) - 1))


def _check(name: str, value: Any, spec: TensorSpec) -> None:
    if value.ndim == 0 or np.isnan(value.shape).any():
        raise BindError(
            f"input {name!r} has shape {value.shape}; rows must be known: call compute_chunk_sizes()"
        )
    if spec.dtype is not None and value.dtype != spec.dtype:
        raise BindError(
            f"input {name!r} has dtype {value.dtype}, the graph takes {spec}; "
            f"pass x.astype({spec.dtype.name!r})"
        )
    if spec.shape is not None:
        fits = len(spec.shape) == value.ndim and all(
            not isinstance(dim, int) or dim == size
            for dim, size in zip(spec.shape[1:], value.shape[1:], strict=True)
        )
        if not fits:
            raise BindError(f"input {name!r} has shape {list(value.shape)}, the graph takes {spec}")


def _output_specs(
    batching: Batching, known: Mapping[str, TensorSpec], others: Mapping[str, Any], providers: tuple[str, ...]
) -> dict[str, TensorSpec]:
    """Return dtype and shape of each output, its first dimension being the batch."""
    graph, rows = batching.graph, batching.rows
    first: Any = BATCH if rows is None else rows
    specs = {name: TensorSpec(spec.dtype, (first, *(spec.shape or ())[1:])) for name, spec in known.items()}
    found = inferred(graph, specs)
    if not all(_is_told(spec, first) for spec in found.values()):
        found = _tried(graph, specs, others, 2 if rows is None else rows, providers)
    return found


def _is_told(spec: TensorSpec, first: Any) -> bool:
    return (
        spec.dtype is not None
        and bool(spec.shape)
        and (spec.shape or ())[0] == first
        and all(isinstance(dim, int) for dim in (spec.shape or ())[1:])
    )


def _tried(
    graph: Graph,
    specs: Mapping[str, TensorSpec],
    others: Mapping[str, Any],
    rows: int,
    providers: tuple[str, ...],
) -> dict[str, TensorSpec]:
    """Return what comes out when a few rows of zeros go in, where ONNX cannot tell."""
    if any(source.is_placed and not source.is_small for source in graph.sources):
        raise UsageError(
            f"the shapes of the outputs of {graph.name!r} have to be tried out, and its constants are on a "
            "cluster; call map_batches on the graph as it was before"
        )
    zeros = {name: np.zeros((rows, *_row(spec)), spec.dtype or float) for name, spec in specs.items()}
    outputs = runner_of(
        replace(graph, sources=tuple(map(_here, graph.sources))), _token(graph), {}, providers
    )({**others, **zeros})
    for name, value in outputs.items():
        if not np.ndim(value) or len(value) != rows:
            raise BindError(
                f"output {name!r} of {graph.name!r} has shape {np.shape(value)} for {rows} rows: "
                "it has no batch dimension"
            )
    return {name: TensorSpec.of(value.dtype, value.shape) for name, value in outputs.items()}


def _token(graph: Graph) -> str:
    return _tokens.setdefault(graph, uuid.uuid4().hex)


def _arrays_of(
    batching: Batching,
    given: Mapping[str, Any],
    batched: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    providers: tuple[str, ...],
) -> Any:
    graph = batching.graph
    run = uuid.uuid4().hex
    large = {s.name: s.value for s in graph.sources if not (s.is_input or s.is_small)}
    light = replace(graph, sources=tuple(map(_light, graph.sources)))
    model = RunModel(light, _token(graph), providers, tuple(given), frozenset(batched), batching.rows)
    model_key, weights_key = f"model-{run}", f"weights-{run}"
    tasks: dict[Key, GraphNode] = {model_key: DataNode(model_key, model)}
    weights: Any = TaskRef(weights_key)
    if any(source.is_placed and not source.is_small for source in graph.sources):
        weights = Dict(dict(large))  # of futures, which are references
    else:
        tasks[weights_key] = DataNode(weights_key, Weights(large))
    first = next(iter(batched.values()))
    is_one = len(specs) == 1
    name = f"map_batches-{run}"
    single = next(iter(specs.values()))
    for i in range(len(first.chunks[0])):
        operands = [
            TaskRef((value.name, i, *(0,) * (value.ndim - 1))) if input_name in batched else value
            for input_name, value in ((n, batched.get(n, v)) for n, v in given.items())
        ]
        key: Key = _key(name, i, single) if is_one else (name, i)
        tasks[key] = Task(key, _run, TaskRef(model_key), weights, *operands)
    graph_of = HighLevelGraph.from_collections(name, tasks, dependencies=list(batched.values()))
    if is_one:
        return da.Array(graph_of, name, _chunks_of(first, single), dtype=single.dtype)
    return {
        output: _output(graph_of, name, item, first, spec)
        for item, (output, spec) in enumerate(specs.items())
    }


def _light(source: Source) -> Source:
    """Return the source without its value if that is large."""
    if source.is_input:
        return source
    if not source.is_small:
        return replace(source, value=None, is_placed=False)
    return _here(source)


def _here(source: Source) -> Source:
    return replace(source, value=source.known, is_placed=False) if source.is_placed else source


def _chunks_of(first: Any, spec: TensorSpec) -> tuple[tuple[int, ...], ...]:
    return (first.chunks[0], *((size,) for size in _row(spec)))


def _row(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a row."""
    return tuple(dim for dim in (spec.shape or ())[1:] if isinstance(dim, int))


def _key(name: str, i: int, spec: TensorSpec) -> Key:
    return (name, i, *(0 for _ in _row(spec)))


def _output(graph: HighLevelGraph, name: str, item: int, first: Any, spec: TensorSpec) -> Any:
    own = f"{name}-{item}"
    keys = [_key(own, i, spec) for i in range(len(first.chunks[0]))]
    tasks = {key: Task(key, _item, TaskRef((name, i)), item) for i, key in enumerate(keys)}
    layers = {**graph.layers, own: MaterializedLayer(tasks)}
    dependencies = {**graph.dependencies, own: {name}}
    return da.Array(HighLevelGraph(layers, dependencies), own, _chunks_of(first, spec), dtype=spec.dtype)
