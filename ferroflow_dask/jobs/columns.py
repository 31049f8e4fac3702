"""Columns of tables as inputs of models, and outputs of models as columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph.nodes import TensorSpec


def arrow() -> Any:
    """Return the package pyarrow; raises `UsageError` if it or pandas is not installed."""
    try:
        import pandas  # noqa: F401 -- by which columns are read
        import pyarrow
    except ImportError as error:
        raise UsageError("tables need pandas and pyarrow; in the clone: pip install '.[tables]'") from error
    return pyarrow


def arrays_of(table: Any, columns: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return an array for each input, from the columns of a table of pyarrow.

    The columns are read as those of a DataFrame, so that a job and `map_batches` convert alike.

    Parameters
    ----------
    table : pyarrow.Table
    columns : mapping of str to str or list of str
        Of each input.
    specs : mapping of str to TensorSpec
        The inputs.
    """
    from ferroflow_dask.lowering.frames import Frames  # imports pandas

    names: dict[str, None] = {}
    for chosen in columns.values():
        names.update(dict.fromkeys([chosen] if isinstance(chosen, str) else chosen))
    frame = table.select(list(names)).to_pandas(ignore_metadata=True)
    return Frames().read(frame, specs, columns)


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
