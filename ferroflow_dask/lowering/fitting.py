"""Columns, lists and results of functions as the arrays that a model's inputs take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferroflow_dask.exceptions import BindError
from ferroflow_dask.graph.inputs import as_array
from ferroflow_dask.graph.nodes import TensorSpec, with_specs

#: What the inputs of a model must be, by name.
Inputs = Mapping[str, TensorSpec]


def fit(name: str, value: Any, spec: TensorSpec) -> NDArray[Any]:
    """Return rows as an array of the dtype and rank of an input; numbers are converted if none is lost.

    Parameters
    ----------
    name : str
        Of the input, or of its column.
    value : array_like
        One entry for each row.
    spec : TensorSpec
        Of the input; its first dimension is the batch.

    Raises
    ------
    BindError
        The values cannot be converted, or have another shape.
    """
    array = as_array(name, value)
    if spec.dtype is None:  # a sequence or an optional
        return array
    array = _reshaped(array, spec)
    dims = spec.shape or array.shape
    if len(dims) != array.ndim or any(
        isinstance(dim, int) and dim != size for dim, size in zip(dims[1:], array.shape[1:], strict=True)
    ):
        raise BindError(f"{name!r} has shape {list(array.shape)}, the model takes {spec}")
    if array.dtype == spec.dtype and spec.dtype.kind != "O":
        return array
    if spec.dtype.kind == "O":
        return _texts(name, array, spec)
    if not _is_convertible(array, spec.dtype):
        if _has_missing(array):
            raise BindError(
                f"{name!r} has missing values, the model takes {spec}; replace them, as with fillna(0)"
            )
        raise BindError(
            f"{name!r} has dtype {array.dtype}, the model takes {spec}; convert it, as with "
            f"astype({spec.dtype.name!r})"
        )
    return array.astype(spec.dtype)


def fit_all(inputs: Inputs, given: Any) -> dict[str, NDArray[Any]]:
    """Return an array for each input: of a dict by name, or of the only input."""
    if not isinstance(given, Mapping):
        if len(inputs) != 1:
            raise BindError(f"the model takes {with_specs(inputs)}; give a dict of arrays")
        given = {next(iter(inputs)): given}
    missing = [name for name in inputs if name not in given]
    if missing:
        raise BindError(f"input {missing[0]!r} is missing; the model takes {with_specs(inputs)}")
    return {name: fit(name, given[name], spec) for name, spec in inputs.items()}


def _reshaped(array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """Add or remove the last dimension if it is 1, as models of columns differ in that."""
    if spec.shape is None:
        return array
    if array.ndim + 1 == len(spec.shape) and not (isinstance(spec.shape[-1], int) and spec.shape[-1] != 1):
        return array[..., np.newaxis]
    if array.ndim == len(spec.shape) + 1 and array.shape[-1] == 1:
        return array[..., 0]
    return array


def _texts(name: str, array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    if array.dtype.kind not in "USO":
        raise BindError(f"{name!r} has dtype {array.dtype}, the model takes {spec}; pass astype(str)")
    strange = [value for value in array.flat if not isinstance(value, str)] if array.dtype.kind == "O" else []
    if strange:
        raise BindError(
            f"{name!r} has the value {strange[0]!r}, the model takes texts; replace it, as with fillna('')"
        )
    return array.astype(object)


def _has_missing(array: NDArray[Any]) -> bool:
    """Return whether values are NaN or None, for which tables change the dtype of a column."""
    if array.dtype.kind == "O":
        return any(value is None or (isinstance(value, float) and np.isnan(value)) for value in array.flat)
    return array.dtype.kind == "f" and bool(np.isnan(array).any())


def _is_convertible(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if dtype.kind in "fV":
        return array.dtype.kind in "biuf"
    if dtype.kind not in "iu" or array.dtype.kind not in "biu":
        return False
    if np.can_cast(array.dtype, dtype) or not array.size:
        return True
    limits = np.iinfo(dtype)
    return bool(limits.min <= array.min() and array.max() <= limits.max)
