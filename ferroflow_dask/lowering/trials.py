"""Models tried out: what ONNX cannot prove of them, as whether their rows depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from dask._task_spec import TaskRef

from ferroflow_dask.exceptions import KernelError, UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.graph.protos import nested_nodes, subgraphs
from ferroflow_dask.kernels.op_model import DRAWN
from ferroflow_dask.lowering.mapped import arrived, client_of_files, files_of_arrays

if TYPE_CHECKING:
    from ferroflow_dask.bundling.results import Results
    from ferroflow_dask.lowering.batch_model import RunModel


class Rows:
    """Rows to try a model out on: made up, or the first ones that it will get.

    Parameters
    ----------
    batched : mapping of str to TensorSpec
    first : callable, optional
        Returns the first rows of each input, at most so many. They are asked for only if the model fails on
        rows that are made up, as those of categories, indices and texts may be.
    """

    def __init__(
        self,
        batched: Mapping[str, TensorSpec],
        first: Callable[[int], Sequence[Any]] | None = None,
    ) -> None:
        self._batched = batched
        self._first = first

    def drawn(self, n: int) -> Iterator[list[Any]]:
        """Yield n random rows of each input, then n real ones."""
        if self._are_shapes_known:
            yield _drawn(self._batched, n)
        yield from self.real(n)

    def zeros(self, n: int) -> Iterator[list[Any]]:
        """Yield n rows of zeros of each input, then n real ones."""
        specs = self._batched.values()
        if self._are_shapes_known:
            yield [nothing((n, *row_shape(spec)), spec.dtype or np.dtype(float)) for spec in specs]
        yield from self.real(n)

    @property
    def _are_shapes_known(self) -> bool:
        return all(len(row_shape(spec)) == len((spec.shape or ())[1:]) for spec in self._batched.values())

    def real(self, n: int) -> Iterator[list[Any]]:
        """Yield the first n rows of each input if there are any, the same ones again if there are fewer."""
        found = [] if self._first is None else [np.asarray(array) for array in self._first(n)]
        if found and all(map(len, found)):
            yield [array[np.arange(n) % len(array)] for array in found]


def agree(
    freed: RunModel, as_given: RunModel, weights: Mapping[str, Any], rows: Rows, others: Mapping[str, Any]
) -> bool:
    """Return whether rows give the same beside others as in batches of the size that a model was made for."""
    for arrays in rows.drawn(2 * (as_given.rows or 1) + 1):
        try:
            found, expected = (try_out(run, weights, *arrays, *others.values()) for run in (freed, as_given))
        except KernelError:
            continue
        return all(map(_are_alike, found, expected))
    return False


def are_rows_independent(
    run: RunModel,
    graph: Graph,
    weights: Mapping[str, Any],
    rows: Rows,
    others: Mapping[str, Any],
) -> bool:
    """Return whether rows give the same whatever is beside them; True where that cannot be tried out.

    Two rows are compared with each of them twice: batches of one size, in which a row's place is the same,
    are computed alike to the last digit. A row alone may be rounded otherwise, which some models magnify:
    only gross differences tell that the number of rows, or a row's place, matters.

    Parameters
    ----------
    run : RunModel
    graph : Graph
        What it computes.
    weights : mapping of str to array or Future
    rows : Rows
    others : mapping of str to array
    """
    if run.rows == 1 or _has_noise(graph):
        return True
    for both in rows.drawn(2):
        first, last = ([array[[i, i]] for array in both] for i in (0, 1))
        batches = (both, first, last, [array[1:] for array in both])
        try:
            found, firsts, lasts, alone = (try_out(run, weights, *some, *others.values()) for some in batches)
        except KernelError:
            continue
        except UsageError:
            break
        return all(
            _are_alike(two[:1], one[:1])
            and _are_alike(two[1:], other[1:])
            and (two.dtype.kind not in "fcV" or _are_alike(two[1:], single, _GROSS))
            for two, one, other, single in zip(found, firsts, lasts, alone, strict=True)
        )
    return True  # who computes something will be told of it


def _has_noise(graph: Graph) -> bool:
    """Return whether numbers are drawn, or rounded by the range of the whole batch, as is meant to be."""
    return any(
        op_type in DRAWN
        or "DynamicQuantize" in op_type
        or (op_type == "Dropout" and _is_training(inputs, graph))
        for op_type, inputs in _nodes(graph)
    )


def _is_training(inputs: Sequence[str], graph: Graph) -> bool:
    mode = graph.constants.get(inputs[2]) if len(inputs) > 2 else False
    return bool(mode) if isinstance(mode, bool | np.ndarray) else bool(inputs[2])


def _nodes(graph: Graph) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield operator type and operands of the ops of a graph, and of those inside of them however deep."""
    for op in graph.live_ops:
        yield op.op_type, op.inputs
        for inner in subgraphs(op.attributes):
            for node in nested_nodes(inner.node):
                yield node.op_type, node.input


def _drawn(batched: Mapping[str, TensorSpec], rows: int) -> list[Any]:
    """Return random rows for each input, the first two of which differ."""
    rng = np.random.default_rng(0)
    drawn = []
    for spec in batched.values():
        shape = (rows, *row_shape(spec))
        if spec.dtype is None or spec.dtype.kind in "fV":
            drawn.append(rng.standard_normal(shape).astype(spec.dtype or float))
        else:
            integers = rng.integers(0, 2, shape)
            integers[1] = 1 - integers[0]
            is_text = spec.dtype.kind == "O"
            drawn.append((np.where(integers, "a", "b") if is_text else integers).astype(spec.dtype))
    return drawn


def nothing(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an array of zeros, or of texts: empty ones may be left out."""
    return np.full(shape, "a", dtype) if dtype.kind == "O" else np.zeros(shape, dtype)


#: The priority of what is tried out.
_FIRST = 10**6

#: How far two computations of the same may lie apart, usually and at most.
_RTOL, _GROSS = 1e-3, 0.2


def _are_alike(one: Any, other: Any, rtol: float = _RTOL) -> bool:
    if one.dtype.kind == "O" and one.shape == other.shape and one.size and isinstance(one.flat[0], dict):
        one, other = (np.array([list(row.values()) for row in rows]) for rows in (one, other))
    if one.dtype.kind == "V":  # bfloat16
        one, other = one.astype(np.float32), other.astype(np.float32)
    if one.shape != other.shape or one.dtype.kind not in "fc":
        return np.array_equal(one, other)
    scale = float(np.nanmax(np.abs(other), initial=0.0))
    return np.allclose(one, other, rtol=rtol, atol=rtol / 10 * scale, equal_nan=True)


def try_out(run: RunModel, weights: Mapping[str, Any], *arrays: Any) -> tuple[Any, ...]:
    """Run a model once: where its weights are, or on a worker if workers map them from files.

    That worker keeps the session open for the batches, and this process does not read the files.
    """
    values = (*weights.values(), *arrays)
    placed = next((value for value in values if isinstance(value, TaskRef)), None)
    if placed is None:
        client = client_of_files(weights)
        if client is None:
            return run(weights, *arrays).values
        sent = {**weights, **files_of_arrays(weights, client)}
        there = client.submit(_run_with_files, run, sent, *arrays, pure=False, priority=_FIRST)
        results_there: Results = there.result()
        return results_there.values
    client = placed.client  # type: ignore[attr-defined] # of a Future
    if client.asynchronous:
        raise UsageError(
            f"the shapes of the outputs of {run.graph.name!r} have to be tried out, and its constants are on "
            "a cluster; call map_batches on the graph as it was before, or with a synchronous client"
        )
    if not client.nthreads():
        raise UsageError(f"model {run.graph.name!r} has to be tried out on a cluster that has no workers")
    # Before all that waits there.
    found = client.submit(run, dict(weights), *arrays, pure=False, priority=_FIRST)
    results: Results = found.result()
    return results.values


def _run_with_files(run: RunModel, sent: Mapping[str, Any], *arrays: Any) -> Results:
    return run({name: arrived(value) for name, value in sent.items()}, *arrays)


def row_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a row."""
    return tuple(dim for dim in (spec.shape or ())[1:] if isinstance(dim, int))
