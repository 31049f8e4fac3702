"""Columns of tables as inputs of models, and outputs of models as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.nodes import TensorSpec, with_specs


def arrow() -> Any:
    """Return the package pyarrow; raises `UsageError` if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError("tables need pyarrow: pip install 'ferroflow-dask[tables]'") from error
    return pyarrow


def columns_of_inputs(
    names: Sequence[str], specs: Mapping[str, TensorSpec], chosen: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """Return the columns that each input gets.

    Parameters
    ----------
    names : sequence of str
        Columns of the table.
    specs : mapping of str to TensorSpec
        The inputs.
    chosen : sequence of str, optional
        Columns for the only input. The default is the column of its name, or all columns if their number is
        that of the input's columns.

    Raises
    ------
    BindError
        Columns are missing.
    """
    if chosen is not None:
        if len(specs) != 1:
            raise BindError(f"--columns is for models with one input, got {with_specs(specs)}")
        if missing := [name for name in chosen if name not in names]:
            raise BindError(f"--columns must be of {', '.join(names)}; got {missing[0]!r}")
        return {next(iter(specs)): tuple(chosen)}
    if all(name in names for name in specs):
        return {name: (name,) for name in specs}
    if len(specs) == 1:
        ((name, spec),) = specs.items()
        if spec.shape and len(spec.shape) == 2 and spec.shape[1] in (len(names), None):
            return {name: tuple(names)}
    cure = "rename them, or choose some with --columns" if len(specs) == 1 else "rename them"
    wanted = f"the names of the inputs ({with_specs(specs)})"
    raise BindError(f"columns must have {wanted}, got {', '.join(names)}; {cure}")


def arrays_of(
    table: Any, columns: Mapping[str, tuple[str, ...]], specs: Mapping[str, TensorSpec]
) -> dict[str, Any]:
    """Return an array for each input, from the columns of a table of pyarrow."""
    arrays = {}
    for name, of_input in columns.items():
        found = [_array(column, table.column(column), specs[name]) for column in of_input]
        array = found[0] if len(found) == 1 else np.stack(found, axis=1)
        rank = None if specs[name].shape is None else len(specs[name].shape or ())
        arrays[name] = array[:, np.newaxis] if array.ndim == 1 and rank == 2 else array
    return arrays


def _array(name: str, column: Any, spec: TensorSpec) -> Any:
    """Return a column as an array of an input's dtype; lists become further dimensions."""
    types = arrow().types
    column, lists = column.combine_chunks(), (types.is_list, types.is_large_list, types.is_fixed_size_list)
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if any(is_list(column.type) for is_list in lists):
        try:
            array = np.array(column.to_pylist())
        except ValueError as error:
            raise BindError(f"lists of column {name!r} must have one length: {error}") from error
    elif types.is_string(column.type) or types.is_large_string(column.type):
        array = np.array(column.to_pylist(), object)
    else:
        array = column.to_numpy(zero_copy_only=False)
    if column.null_count and (spec.dtype is None or spec.dtype.kind != "f" or array.dtype.kind != "f"):
        raise BindError(f"column {name!r} must have no empty values for an input of type {spec}")
    if spec.dtype is None or array.dtype == spec.dtype:
        return array
    if array.dtype == object or not np.can_cast(array.dtype, spec.dtype, "same_kind"):
        raise BindError(f"column {name!r} must be of the type of its input, {spec}, got {column.type}")
    return array.astype(spec.dtype)


def appended(table: Any, outputs: Mapping[str, Any], is_flat: bool) -> Any:
    """Return a table with outputs as further columns.

    Parameters
    ----------
    table : pyarrow.Table
    outputs : mapping of str to array
    is_flat : bool
        Whether a row of several numbers becomes several columns and not a list.
    """
    for name, array in outputs.items():
        for column, values in _columns(name, array, is_flat).items():
            # The output of some models has the name of an input.
            taken = column in table.column_names
            table = table.append_column(f"{column}_output" if taken else column, values)
    return table


def _columns(name: str, array: Any, is_flat: bool) -> dict[str, Any]:
    arrow_ = arrow()
    rows = array.reshape(len(array)) if array.ndim == 2 and array.shape[1] == 1 else array
    if rows.ndim == 1:
        return {name: arrow_.array(rows)}
    flat = rows.reshape(len(rows), -1)
    if is_flat:
        return {f"{name}_{i}": arrow_.array(np.ascontiguousarray(flat[:, i])) for i in range(flat.shape[1])}
    values = arrow_.array(flat.ravel())
    for size in reversed(rows.shape[1:]):
        values = arrow_.FixedSizeListArray.from_arrays(values, size)
    return {name: values}
