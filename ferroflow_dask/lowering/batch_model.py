"""A model that takes batches: prepared once, computed on a batch by the function of a Dask task."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from dask._task_spec import Dict, TaskRef
from dask.base import tokenize
from dask.sizeof import sizeof
from zict import LRU

from ferroflow_dask.bundling.results import Results
from ferroflow_dask.devices import host_value
from ferroflow_dask.exceptions import BindError, FerroflowError, KernelError
from ferroflow_dask.graph.batching import BATCH, Batching, batching_of, output_specs
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.kernels.provider import Runner
from ferroflow_dask.kernels.session import failed
from ferroflow_dask.kernels.session_settings import DEFAULT, SessionSettings
from ferroflow_dask.lowering.mapped import arrived, files_of_arrays
from ferroflow_dask.lowering.sealed import Sealed, large_constants, runner_here
from ferroflow_dask.lowering.trials import Rows, agree, are_rows_independent, nothing, row_shape, try_out

logger = logging.getLogger("ferroflow_dask")


@dataclass(frozen=True, slots=True, eq=False)
class RunModel:
    """Computes a model on one batch.

    Parameters
    ----------
    sealed : Sealed
    providers : tuple of str
    inputs : tuple of str
        Names of the arrays that it is called with; those that are `batched` have the batch in front.
    batched : frozenset of str
    rows : int or None
        How many rows the graph takes at a time; None for any number.
    settings : SessionSettings
    """

    sealed: Sealed
    providers: tuple[str, ...]
    inputs: tuple[str, ...]
    batched: frozenset[str]
    rows: int | None
    settings: SessionSettings = DEFAULT

    @property
    def graph(self) -> Graph:
        """The model without its large constants."""
        return self.sealed.graph

    def __call__(self, weights: Mapping[str, Any], *arrays: Any) -> Results:
        """Return the outputs, in the order in which the graph names them.

        Raises
        ------
        KernelError
            The model fails on these values.
        """
        values = dict(zip(self.inputs, arrays, strict=True))
        n = len(values[next(iter(self.batched))])
        runner = self.opened(weights)
        try:
            pieces = (
                [values] if self.rows is None else [{**values, **piece} for piece in self._pieces(values)]
            )
            found = [runner({**weights, **piece}) for piece in pieces]
        except FerroflowError:
            raise
        except Exception as error:
            raise failed(self.graph, values, error) from error
        return Results(tuple(self._output(name, found, n) for name in self.graph.outputs))

    def opened(self, weights: Mapping[str, Any]) -> Runner:
        """Return the session of the model, which is opened here if it is not open."""
        return runner_here(self.sealed, weights, self.providers, settings=self.settings)

    def _output(self, name: str, found: Sequence[Mapping[str, Any]], n: int) -> Any:
        parts = [_as_rows(host_value(piece[name])) for piece in found]
        expected = n if self.rows is None else self.rows
        for part in parts:
            if isinstance(part, list):
                raise KernelError(
                    f"output {name!r} of model {self.graph.name!r} is a sequence of tensors: it has no batch "
                    "dimension"
                )
            if not np.ndim(part) or len(part) != expected:
                raise KernelError(
                    f"output {name!r} of model {self.graph.name!r} has shape {np.shape(part)} for "
                    f"{expected} rows: it has no batch dimension"
                )
        return parts[0] if len(parts) == 1 and expected == n else np.concatenate(parts)[:n]

    def _pieces(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        # What is missing in the last piece is the last row again: it is cut off afterwards.
        assert self.rows is not None
        n = len(values[next(iter(self.batched))])
        if not n:
            empty = {name: values[name] for name in self.batched}
            return [{name: nothing((self.rows, *x.shape[1:]), x.dtype) for name, x in empty.items()}]
        places = [np.minimum(np.arange(at, at + self.rows), n - 1) for at in range(0, n, self.rows)]
        return [{name: values[name][place] for name in self.batched} for place in places]


def _as_rows(value: Any) -> Any:
    """Return a list of maps, as of ZipMap, as an array of dicts; any other value as it is."""
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        return np.fromiter(value, object, len(value))
    return value


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model with its large constants, which travel as one value, to each worker once."""

    run: RunModel
    weights: Mapping[str, Any]

    def __call__(self, *arrays: Any) -> Results:
        """Compute a batch."""
        return self.run(self.arrays, *arrays)

    @property
    def arrays(self) -> dict[str, Any]:
        """The large constants; those in files are mapped."""
        return {name: arrived(value) for name, value in self.weights.items()}


def nbytes_of(model: RunModel | LoadedModel) -> int:
    """Return what a model takes up in a worker's memory [B]."""
    if isinstance(model, RunModel):
        return len(model.sealed.content)
    return nbytes_of(model.run) + sum(int(sizeof(array)) for array in model.weights.values())


sizeof.register(LoadedModel, nbytes_of)


@dataclass(frozen=True, slots=True, eq=False)
class BatchModel:
    """A model that is ready for batches.

    Parameters
    ----------
    how : str
        How it takes them.
    run : RunModel
    weights : mapping of str to array or Future
        The large constants.
    specs : mapping of str to TensorSpec
        Of each output; the first dimension is the batch.
    """

    how: str
    run: RunModel
    weights: Mapping[str, Any]
    specs: Mapping[str, TensorSpec]

    @property
    def is_scattered(self) -> bool:
        """Whether large constants are on the cluster, as Futures; then they are an argument of each batch."""
        return any(isinstance(value, TaskRef) for value in self.weights.values())

    @property
    def sent(self) -> RunModel | LoadedModel:
        """What travels to each worker: large constants included, unless they are scattered."""
        return self.run if self.is_scattered else self.loaded

    @property
    def loaded(self) -> LoadedModel:
        """The model with its large constants; workers map those that are in files."""
        return LoadedModel(self.run, {**self.weights, **files_of_arrays(self.weights)})

    @property
    def weight_arguments(self) -> list[Any]:
        """The argument of a batch's task that has the large constants; none if they travel with the model."""
        return [Dict(dict(self.weights))] if self.is_scattered else []


#: Values of the other inputs for which what was found out is kept, of each graph.
_VALUES_KEPT = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """A way in which a graph may take batches; `freed` is the graph with a free batch, if that is the way."""

    how: str
    run: RunModel
    freed: Graph | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """What holds for all values of the other inputs, and by value what was found out with them.

    A model has one name for all values, by which workers know that they have it open.
    """

    ways: tuple[_Way, ...]
    weights: Mapping[str, Any]
    by_values: LRU[str, BatchModel] = field(default_factory=lambda: LRU(_VALUES_KEPT, {}))


_prepared: WeakKeyDictionary[Graph, dict[Any, _Prepared]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """How much of a model is tried out before it takes batches.

    Parameters
    ----------
    checks_rows : bool
        Whether rows must not depend on each other.
    specs : mapping of str to TensorSpec
        Of outputs, as far as the caller tells them; the first dimension is the batch.
    first : callable, optional
        As in `Rows`.
    needs_shapes : bool
        Whether the shape of a row of each output must be known, and not only how many dimensions it has.
    settings : SessionSettings
        Of the session that is tried out and kept.
    """

    checks_rows: bool = True
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    first: Callable[[int], Sequence[Any]] | None = None
    needs_shapes: bool = True
    settings: SessionSettings = DEFAULT


def batch_model(
    graph: Graph,
    batched: Mapping[str, TensorSpec],
    others: Mapping[str, Any],
    providers: tuple[str, ...],
    trial: Trial,
) -> BatchModel:
    """Prepare a graph for batches; what was prepared once is kept as long as the graph.

    Parameters
    ----------
    graph : Graph
    batched : mapping of str to TensorSpec
        The inputs that are batched along their first dimension.
    others : mapping of str to array
        The other ones.
    providers : tuple of str
    trial : Trial
    """
    shapes = tuple((name, spec.dtype, row_shape(spec)) for name, spec in batched.items())
    key = (shapes, tuple(others), providers, trial.settings)
    by_key = _prepared.setdefault(graph, {})
    if key not in by_key:
        by_key[key] = _prepare(graph, batched, tuple(others), providers, trial.settings)
    prepared = by_key[key]
    # Shapes of outputs may depend on the values of the others, and whether rows depend on each other.
    values = tokenize(dict(others), trial.checks_rows, list(trial.specs.items()), trial.needs_shapes)
    known: BatchModel | None = prepared.by_values.get(values)
    if known is None:
        known = prepared.by_values[values] = _find_out(graph, prepared, batched, others, trial)
    return known


def _prepare(
    graph: Graph,
    batched: Mapping[str, TensorSpec],
    others: tuple[str, ...],
    providers: tuple[str, ...],
    settings: SessionSettings,
) -> _Prepared:
    batching = batching_of(graph, batched)

    def way_of(batching: Batching) -> _Way:
        sealed = Sealed.of(batching.graph, uuid.uuid4().hex)
        inputs = (*batched, *others)
        run = RunModel(sealed, providers, inputs, frozenset(batched), batching.rows, settings)
        # Not the graph itself, or it would keep alive what it is prepared for.
        return _Way(str(batching), run, None if batching.graph is graph else batching.graph)

    ways = [way_of(batching)]
    if batching.freed_of is not None:
        ways.append(way_of(Batching(graph, rows=batching.freed_of)))
    weights = {name: source.value for name, source in large_constants(graph).items()}
    return _Prepared(tuple(ways), weights)


def _find_out(
    graph: Graph,
    prepared: _Prepared,
    batched: Mapping[str, TensorSpec],
    others: Mapping[str, Any],
    trial: Trial,
) -> BatchModel:
    """Return the model as it takes batches beside these values."""
    way, weights, rows = prepared.ways[0], prepared.weights, Rows(batched, trial.first)
    is_freed = way.freed is not None and agree(way.run, prepared.ways[1].run, weights, rows, others)
    way = way if is_freed else prepared.ways[-1]
    if len(prepared.ways) > 1 or way.run.rows is not None:
        logger.info("model %r: %s", graph.name, way.how)
    specs = trial.specs or _output_specs(
        way.freed or graph, way.run, weights, batched, others, samples=rows, needs_shapes=trial.needs_shapes
    )
    is_checked = is_freed or not trial.checks_rows
    if not (is_checked or are_rows_independent(way.run, graph, weights, rows, others)):
        raise BindError(
            f"rows of model {graph.name!r} depend on each other or on their place: what one gives "
            "changes with those beside it; compute all rows at once: with bind, or without --batch"
        )
    return BatchModel(way.how, way.run, weights, specs)


def _output_specs(
    graph: Graph,
    run: RunModel,
    weights: Mapping[str, Any],
    batched: Mapping[str, TensorSpec],
    others: Mapping[str, Any],
    *,
    samples: Rows,
    needs_shapes: bool,
) -> dict[str, TensorSpec]:
    """Return dtype and shape of each output, its first dimension being the batch."""
    first: Any = BATCH if run.rows is None else run.rows
    specs = {name: TensorSpec(spec.dtype, (first, *(spec.shape or ())[1:])) for name, spec in batched.items()}
    found = output_specs(graph, specs)
    if not needs_shapes and all(spec.shape or spec.is_sequence for spec in found.values()):
        return found
    if all(_is_told(spec) and spec.shape and spec.shape[0] == first for spec in found.values()):
        return found
    # ONNX cannot tell: see what comes out when a few rows of zeros go in. Two numbers of rows, since one
    # may happen to be what a dimension is that has nothing to do with rows.
    tried: dict[str, TensorSpec] = {}
    for rows in (2, 3) if run.rows is None else (run.rows,):
        outputs = _outputs_of(run, weights, samples.zeros(rows), others)
        for name, value in zip(graph.outputs, outputs, strict=True):
            known = tried.setdefault(name, TensorSpec.of(value.dtype, value.shape))
            if row_shape(known) != value.shape[1:]:
                raise BindError(
                    f"output {name!r} of model {graph.name!r} has rows of shape {row_shape(known)} in a "
                    f"batch of 2 and {value.shape[1:]} in one of {rows}; they must be alike to make an array"
                )
    return tried


def _outputs_of(
    run: RunModel, weights: Mapping[str, Any], tries: Iterable[list[Any]], others: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the outputs for the first inputs that the model takes."""
    first: KernelError | None = None
    for arrays in tries:
        try:
            return try_out(run, weights, *arrays, *others.values())
        except KernelError as error:
            first = first or error
    whole = "".join(f"; {name!r} goes whole with every batch" for name in others)
    raise BindError(f"the shapes of the outputs had to be tried out with zeros: {first}{whole}") from first


def _is_told(spec: TensorSpec) -> bool:
    """Return whether the type is known, and the shape of a row."""
    return spec.dtype is not None and bool(spec.shape) and len(row_shape(spec)) == len(spec.shape or ()) - 1
