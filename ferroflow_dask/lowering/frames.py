"""Data frames of pandas as chunks: columns are inputs, and outputs become columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.nodes import TensorSpec, with_specs
from ferroflow_dask.lowering.fitting import Inputs, fit
from ferroflow_dask.lowering.forms import Columns, Output


class Frames:
    """A chunk is a pandas DataFrame; the result has the outputs as columns after its own."""

    adds_outputs = True

    def n_rows(self, chunk: Any) -> int:
        """Return the number of rows."""
        return len(chunk)

    def rows(self, chunk: Any, first: int, stop: int) -> Any:
        """Return some of the rows."""
        return chunk.iloc[first:stop]

    def read(self, chunk: Any, inputs: Inputs, columns: Columns) -> dict[str, NDArray[Any]]:
        """Return an array for each input."""
        chosen = columns_of(list(chunk.columns), inputs, columns)
        return {name: _read(chunk, chosen[name], spec, name) for name, spec in inputs.items()}

    def write(self, chunk: Any, outputs: Mapping[str, Output]) -> Any:
        """Return the frame with a column for each output."""
        twice = [name for name in outputs if name in chunk.columns]
        if twice:
            raise BindError(
                f"output {twice[0]!r} of the model is a column of the frame already; rename that: "
                f"frame.rename(columns={{{twice[0]!r}: …}})"
            )
        return chunk.assign(**{name: _column(output, chunk.index) for name, output in outputs.items()})

    def joined(self, chunks: Sequence[Any]) -> Any:
        """Return several chunks as one."""
        return pd.concat(chunks)


def columns_of(names: Sequence[Any], inputs: Inputs, columns: Columns) -> dict[str, Any]:
    """Return the column of each input, or a list of columns that make it up.

    Parameters
    ----------
    names : sequence
        All columns.
    inputs : mapping of str to TensorSpec
    columns : Columns
        The default is the column of an input's name, or all columns for the only input.

    Raises
    ------
    BindError
        A column is missing, or it is not clear which columns are meant.
    UsageError
        `columns` has another form.
    """
    only = next(iter(inputs), "")
    form = "columns must be a dict of inputs like {'x': 'a'}, or a list for the only input"
    chosen: dict[str, Any]
    if columns is None:
        if all(name in names for name in inputs):
            chosen = {name: name for name in inputs}
        elif len(inputs) == 1:
            chosen = {only: list(names)}
        else:
            missing = next(name for name in inputs if name not in names)
            raise BindError(
                f"columns must have the names of the inputs ({with_specs(inputs)}), got {list(names)}; "
                f"rename one to {missing!r}, or give columns={{{missing!r}: …}}"
            )
    elif isinstance(columns, Mapping):
        chosen = {name: columns.get(name, name) for name in inputs}
        strange = [name for name in columns if name not in inputs]
        if strange:
            raise BindError(f"columns names {strange[0]!r}; the model takes {with_specs(inputs)}")
    elif isinstance(columns, str) or not isinstance(columns, Sequence) or len(inputs) != 1:
        raise UsageError(f"{form}, got {columns!r} for {with_specs(inputs)}")
    else:
        chosen = {only: list(columns)}
    for found in chosen.values():
        for name in [found] if isinstance(found, str) else found:
            if name not in names:
                raise BindError(f"columns must be of {list(names)}, got {name!r}{_meant(name, names)}")
    return chosen


def _meant(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, [known for known in names if isinstance(known, str)], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _read(frame: Any, columns: Any, spec: TensorSpec, name: str) -> NDArray[Any]:
    if isinstance(columns, str):
        return fit(columns, _values(frame[columns], spec), spec)
    width = spec.shape[1] if spec.shape is not None and len(spec.shape) == 2 else None
    if len(columns) == 1 and spec.shape is not None and len(spec.shape) != 2:
        return fit(columns[0], _values(frame[columns[0]], spec), spec)
    if isinstance(width, int) and width != len(columns):
        raise BindError(
            f"input {name!r} takes {width} columns, got {len(columns)}: {list(columns)}; choose them with "
            "columns=[…], or --columns"
        )
    chosen = frame if list(frame.columns) == list(columns) else frame[list(columns)]
    is_float = spec.dtype is not None and spec.dtype.kind == "f"
    if is_float and all(isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in chosen.dtypes):
        return fit(name, chosen.to_numpy(), spec)  # without a copy if pandas has one block of numbers
    fitted = [
        fit(column, _values(frame[column], spec), TensorSpec(spec.dtype, (None,))) for column in columns
    ]
    return np.stack(fitted, axis=1)


def _values(series: Any, spec: TensorSpec) -> Any:
    """Return the values of a column as NumPy has them; missing numbers are NaN."""
    dtype = series.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return _values(series.astype(dtype.categories.dtype), spec)
    if isinstance(dtype, np.dtype):
        values = series.to_numpy()
        is_nested = dtype.kind == "O" and len(values) and isinstance(values[0], np.ndarray | list | tuple)
        if not is_nested:
            return values
        try:
            return np.stack([_dense(value) for value in values])
        except ValueError as error:
            raise BindError(f"rows of column {series.name!r} have different shapes: {error}") from error
    if pd.api.types.is_numeric_dtype(dtype):  # nullable, or Arrow's
        if series.isna().any():
            return series.to_numpy(np.float64, na_value=np.nan)
        numpy_dtype = getattr(dtype, "numpy_dtype", None)
        return series.to_numpy(numpy_dtype)
    return series.to_numpy(object)


def _dense(value: Any) -> NDArray[Any]:
    """Return a row of a column of arrays, which are arrays of arrays if they come from Arrow."""
    array = np.asarray(value)
    is_filled = array.dtype == object and array.ndim and array.size
    if not (is_filled and isinstance(array[0], np.ndarray | list)):
        return array
    return np.stack([_dense(part) for part in array])


def _column(output: Output, index: Any) -> Any:
    """Return an output as a column: of numbers or texts, or of an array for each row."""
    failed, spec = output.failed, output.spec
    if output.is_scalar:
        values = output.scalars
        if values.dtype.kind == "V":  # bfloat16, which pandas does not know
            values = values.astype(np.float32)
        if values.dtype.kind == "O":
            is_text = spec.dtype is not None and spec.dtype.kind == "O"  # or dicts of a ZipMap
            dtype = pd.Series(["a"]).dtype if is_text else object
            column = pd.Series(values.tolist(), index=index, dtype=dtype)
        else:
            column = pd.Series(values, index=index)
        if failed is None:
            return column
        if values.dtype.kind in "biu":
            names = {"b": "boolean", "i": "Int", "u": "UInt"}
            bits = "" if values.dtype.kind == "b" else str(8 * values.dtype.itemsize)
            column = column.astype(names[values.dtype.kind] + bits)
        return column.mask(failed) if failed.any() else column
    rows = list(output.value) if output.value.ndim <= 2 else output.value.tolist()
    if failed is not None:
        rows = [None if is_null else row for row, is_null in zip(rows, failed, strict=True)]
    return pd.Series(np.fromiter(rows, object, len(rows)), index=index, dtype=object)
