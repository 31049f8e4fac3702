"""A whole model as the function of a Dask task, its large constants beside it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from dask.sizeof import sizeof

from ferroflow_dask.exceptions import BindError, FerroflowError, KernelError, UsageError
from ferroflow_dask.graph.batching import BATCH, Batching, batching_of, inferred
from ferroflow_dask.graph.ir import Graph, Source, TensorSpec
from ferroflow_dask.kernels.session import failed, runner_of
from ferroflow_dask.lowering.execution import Results

logger = logging.getLogger("ferroflow_dask")


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
        n = len(values[next(iter(self.batched))])
        runner = runner_of(self.graph, self.token, weights, self.providers)
        try:
            pieces = (
                [values] if self.rows is None else [{**values, **piece} for piece in self._pieces(values)]
            )
            found = [runner(piece) for piece in pieces]
        except FerroflowError:
            raise
        except Exception as error:
            raise failed(self.graph, values, error) from error
        return Results(tuple(self._output(name, found, n) for name in self.graph.outputs))

    def _output(self, name: str, found: Sequence[Mapping[str, Any]], n: int) -> Any:
        parts = [piece[name] for piece in found]
        expected = n if self.rows is None else self.rows
        for part in parts:
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
        places = [np.minimum(np.arange(at, at + self.rows), n - 1) for at in range(0, n, self.rows)]
        return [{name: values[name][place] for name in self.batched} for place in places]


@dataclass(frozen=True, slots=True, eq=False)
class BatchModel:
    """A model that is ready for batches.

    Parameters
    ----------
    run : RunModel
    weights : mapping of str to array or Future
        The large constants.
    specs : mapping of str to TensorSpec
        Of each output; the first dimension is the batch.
    """

    run: RunModel
    weights: Mapping[str, Any]
    specs: Mapping[str, TensorSpec]


#: What was prepared of a graph; it has names of its own, by which workers know what they have open.
_prepared: WeakKeyDictionary[Graph, dict[Any, BatchModel]] = WeakKeyDictionary()


def batch_model(
    graph: Graph, batched: Mapping[str, TensorSpec], others: Mapping[str, Any], providers: tuple[str, ...]
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
    """
    shapes = tuple((name, spec.dtype, row_shape(spec)) for name, spec in batched.items())
    key = (shapes, tuple((name, np.shape(value)) for name, value in others.items()), providers)
    known = _prepared.setdefault(graph, {})
    if key not in known:
        known[key] = _prepare(graph, batched, others, providers)
    return known[key]


def _prepare(
    graph: Graph, batched: Mapping[str, TensorSpec], others: Mapping[str, Any], providers: tuple[str, ...]
) -> BatchModel:
    batching = batching_of(graph, batched)
    if batching.was_fixed or batching.rows is not None:
        logger.info("model %r: %s", graph.name, batching)
    token = uuid.uuid4().hex
    graph = batching.graph
    return BatchModel(
        RunModel(
            replace(graph, sources=tuple(map(_light, graph.sources))),
            token,
            providers,
            (*batched, *others),
            frozenset(batched),
            batching.rows,
        ),
        {source.name: source.value for source in graph.sources if _is_large(source)},
        _output_specs(batching, batched, others, providers),
    )


def _output_specs(
    batching: Batching,
    batched: Mapping[str, TensorSpec],
    others: Mapping[str, Any],
    providers: tuple[str, ...],
) -> dict[str, TensorSpec]:
    """Return dtype and shape of each output, its first dimension being the batch."""
    graph, rows = batching.graph, batching.rows
    first: Any = BATCH if rows is None else rows
    specs = {name: TensorSpec(spec.dtype, (first, *(spec.shape or ())[1:])) for name, spec in batched.items()}
    found = inferred(graph, specs)
    if all(_is_told(spec) and spec.shape and spec.shape[0] == first for spec in found.values()):
        return found
    if not any(source.is_placed and _is_large(source) for source in graph.sources):
        return _tried(graph, specs, others, 2 if rows is None else rows, providers)
    # Without constants nothing can be tried. Whether what is not a number is the batch, runs will tell.
    for name, spec in found.items():
        if not _is_told(spec) or not spec.shape or spec.shape[0] not in (first, None, *_symbols(spec)):
            raise UsageError(
                f"ONNX cannot tell the shape of output {name!r} of {graph.name!r}, and its constants are on "
                "a cluster; call map_batches on the graph as it was before"
            )
    return found


def _is_told(spec: TensorSpec) -> bool:
    """Return whether the type is known, and the shape of a row."""
    return spec.dtype is not None and bool(spec.shape) and len(row_shape(spec)) == len(spec.shape or ()) - 1


def _symbols(spec: TensorSpec) -> tuple[str, ...]:
    return tuple(dim for dim in spec.shape or () if isinstance(dim, str))


def _tried(
    graph: Graph,
    specs: Mapping[str, TensorSpec],
    others: Mapping[str, Any],
    rows: int,
    providers: tuple[str, ...],
) -> dict[str, TensorSpec]:
    """Return what comes out when a few rows of zeros go in, where ONNX cannot tell."""
    zeros = {name: np.zeros((rows, *row_shape(spec)), spec.dtype or float) for name, spec in specs.items()}
    outputs = runner_of(
        replace(graph, sources=tuple(map(_here, graph.sources))), uuid.uuid4().hex, {}, providers
    )({**others, **zeros})
    for name, value in outputs.items():
        if not np.ndim(value) or len(value) != rows:
            raise BindError(
                f"output {name!r} of {graph.name!r} has shape {np.shape(value)} for {rows} rows: "
                "it has no batch dimension"
            )
    return {name: TensorSpec.of(value.dtype, value.shape) for name, value in outputs.items()}


def _is_large(source: Source) -> bool:
    return not (source.is_input or source.is_small)


def _light(source: Source) -> Source:
    """Return the source without its value if that is large."""
    if source.is_input:
        return source
    if _is_large(source):
        return replace(source, value=None, is_placed=False)
    return _here(source)


def _here(source: Source) -> Source:
    return replace(source, value=source.known, is_placed=False) if source.is_placed else source


def row_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a row."""
    return tuple(dim for dim in (spec.shape or ())[1:] if isinstance(dim, int))
