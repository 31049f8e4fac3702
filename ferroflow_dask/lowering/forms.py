"""Forms of chunks: how rows are read from arrays and lists, and how outputs are written."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ferroflow_dask.exceptions import BindError, KernelError
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.lowering.fitting import Inputs, fit_all

#: Input names, each with the column or the columns that it is read from; or columns of the only input.
Columns = Mapping[str, str | Sequence[str]] | Sequence[str] | None


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The rows of an output.

    Parameters
    ----------
    value : array
        Rows that failed have any value.
    spec : TensorSpec
        As known before anything ran.
    failed : array of bool, optional
        The rows that are null; None if no row may be.
    """

    value: NDArray[Any]
    spec: TensorSpec
    failed: NDArray[np.bool_] | None = None

    @property
    def is_scalar(self) -> bool:
        """Whether a row is one number or text, and no array."""
        shape = self.value.shape if self.spec.shape is None else self.spec.shape
        return len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)

    @property
    def scalars(self) -> NDArray[Any]:
        """The rows as an array of one dimension."""
        return self.value.reshape(len(self.value))


class Form(Protocol):
    """How chunks of one type are cut, read and written."""

    #: Whether outputs are written next to the rows that they belong to.
    adds_outputs: bool

    def n_rows(self, chunk: Any) -> int:
        """Return the number of rows."""

    def rows(self, chunk: Any, first: int, stop: int) -> Any:
        """Return some of the rows."""

    def read(self, chunk: Any, inputs: Inputs, columns: Columns) -> dict[str, NDArray[Any]]:
        """Return an array for each input."""

    def write(self, chunk: Any, outputs: Mapping[str, Output]) -> Any:
        """Return the chunk of the result."""

    def joined(self, chunks: Sequence[Any]) -> Any:
        """Return several chunks as one."""


class Arrays:
    """A chunk is an array, or a dict of arrays by input; outputs are returned alike."""

    adds_outputs = False

    def n_rows(self, chunk: Any) -> int:
        """Return the number of rows."""
        sizes = {name: len(array) for name, array in _by_name(chunk).items()}
        if len(set(sizes.values())) > 1:
            raise BindError(f"inputs must have as many rows as each other, got {sizes}")
        return next(iter(sizes.values()), 0)

    def rows(self, chunk: Any, first: int, stop: int) -> Any:
        """Return some of the rows."""
        if isinstance(chunk, Mapping):
            return {name: array[first:stop] for name, array in chunk.items()}
        return chunk[first:stop]

    def read(self, chunk: Any, inputs: Inputs, columns: Columns) -> dict[str, NDArray[Any]]:  # noqa: ARG002
        """Return an array for each input."""
        return fit_all(inputs, chunk)

    def write(self, chunk: Any, outputs: Mapping[str, Output]) -> Any:  # noqa: ARG002
        """Return the output, or a dict if there are several."""
        found = {name: nulled(output) for name, output in outputs.items()}
        return next(iter(found.values())) if len(found) == 1 else found

    def joined(self, chunks: Sequence[Any]) -> Any:
        """Return several chunks as one."""
        if isinstance(chunks[0], Mapping):
            return {name: self.joined([chunk[name] for chunk in chunks]) for name in chunks[0]}
        shapes = {np.shape(chunk)[1:] for chunk in chunks}
        if len(shapes) > 1:
            raise KernelError(
                f"rows of one array must have one shape, got {sorted(shapes)} from batches of one chunk"
            )
        return np.concatenate(chunks)


class Items:
    """A chunk is a list of rows, or of dicts with a row for each input; outputs are added to dicts."""

    adds_outputs = True

    def n_rows(self, chunk: Any) -> int:
        """Return the number of rows."""
        return len(chunk)

    def rows(self, chunk: Any, first: int, stop: int) -> Any:
        """Return some of the rows."""
        return chunk[first:stop]

    def read(self, chunk: Any, inputs: Inputs, columns: Columns) -> dict[str, NDArray[Any]]:
        """Return an array for each input."""
        if not chunk:  # whose shape and dtype no item tells
            return {name: empty(spec) for name, spec in inputs.items()}
        if not isinstance(chunk[0], Mapping):
            return fit_all(inputs, chunk)
        names: dict[str, Any] = {name: name for name in inputs}
        if isinstance(columns, Mapping):
            names = {**names, **columns}
        for name, key in names.items():
            if key not in chunk[0]:
                raise BindError(
                    f"input {name!r} is not in the item, which has {', '.join(map(repr, chunk[0]))}; give "
                    f"columns={{{name!r}: …}}"
                )
        return fit_all(inputs, {name: [item[key] for item in chunk] for name, key in names.items()})

    def write(self, chunk: Any, outputs: Mapping[str, Output]) -> Any:
        """Return a list of dicts, or of the rows of the only output."""
        rows = {name: _row_list(output) for name, output in outputs.items()}
        dicts = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        if chunk and isinstance(chunk[0], Mapping):
            return [{**item, **found} for item, found in zip(chunk, dicts, strict=True)]
        return next(iter(rows.values())) if len(rows) == 1 else dicts

    def joined(self, chunks: Sequence[Any]) -> Any:
        """Return several chunks as one."""
        return [item for chunk in chunks for item in chunk]


def form_of(chunk: Any, what: str) -> Form:
    """Return the form of a chunk; `what` names the value in errors."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(chunk, pandas.DataFrame):
        from ferroflow_dask.lowering.frames import Frames

        return Frames()
    if isinstance(chunk, np.ndarray | Mapping):
        return Arrays()
    if isinstance(chunk, list | tuple):
        return Items()
    raise BindError(
        f"{what} must be an array, a dict of arrays, a pandas DataFrame or a list of rows, got a "
        f"{type(chunk).__name__}"
    )


def nulled(output: Output) -> NDArray[Any]:
    """Return an output with NaN in rows that failed: integers become float64, texts None."""
    value = output.value
    if output.failed is None:
        return value
    if value.dtype.kind in "biu":
        value = value.astype(np.float64)
    elif output.failed.any():
        value = value.copy()
    value[output.failed] = None if value.dtype.kind == "O" else np.nan
    return value


def empty(spec: TensorSpec, rows: int = 0) -> NDArray[Any]:
    """Return rows of zeros of a known dtype; dimensions that are not known are 1."""
    shape = tuple(dim if isinstance(dim, int) else 1 for dim in (spec.shape or ())[1:])
    return np.zeros((rows, *shape), spec.dtype or np.float64)


def _by_name(chunk: Any) -> Mapping[str, Any]:
    return chunk if isinstance(chunk, Mapping) else {"": chunk}


def _row_list(output: Output) -> list[Any]:
    # Of one number each: Python's, as of a database.
    rows = output.scalars.tolist() if output.is_scalar else list(output.value)
    if output.failed is not None:
        rows = [None if failed else row for row, failed in zip(rows, output.failed, strict=True)]
    return rows
