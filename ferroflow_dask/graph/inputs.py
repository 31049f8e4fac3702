"""Values for a graph's inputs: whether those that are given fit, and random ones where there are none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferroflow_dask.counts import checked_count
from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import TensorSpec, with_specs

#: How many inputs that have a default are named in an error.
_DEFAULTS_SHOWN = 3


def check_inputs(
    graph: Graph, inputs: Mapping[str, Any], is_lazy: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
    """Return the values for a graph's inputs as arrays, once they are known to fit.

    Parameters
    ----------
    graph : Graph
    inputs : mapping of str to array
    is_lazy : callable, optional
        Returns whether a value is to become an array later: what is known of it is checked, and it is
        returned as it is. No value may be if left out.

    Raises
    ------
    BindError
        A name is unknown or missing, or a dtype or a shape does not fit.

    Warns
    -----
    UserWarning
        One symbolic dimension has two sizes.
    """
    wanted = taken(graph)
    for name in inputs:
        if name not in graph.inputs:
            raise BindError(f"graph {graph.name!r} has no input {name!r}; it takes {wanted}")
    for name in graph.inputs:
        if name not in inputs:
            raise BindError(f"input {name!r} of graph {graph.name!r} is missing; it takes {wanted}")
    symbols: dict[str, tuple[int, str]] = {}
    checked = {}
    for name, value in inputs.items():
        spec = graph.inputs[name]
        if is_lazy is not None and is_lazy(value):
            if isinstance(getattr(value, "dtype", None), np.dtype):  # delayed values have any attribute
                check_array(name, value, spec, symbols)
            checked[name] = value
        else:
            checked[name] = _check_input(name, value, spec, symbols)
    return checked


def taken(graph: Graph) -> str:
    """Return in words what may be given to a graph."""
    wanted = with_specs(graph.inputs) or "nothing"
    if not graph.defaults:
        return wanted
    # Models of an old format list all of their weights.
    return f"{wanted}; and, if given, {with_specs(graph.defaults, _DEFAULTS_SHOWN)}"


def _check_input(name: str, value: Any, spec: TensorSpec, symbols: dict[str, tuple[int, str]]) -> Any:
    if hasattr(value, "__dask_graph__"):
        raise BindError(f"input {name!r} is a Dask collection; pass the array: {name}=value.compute()")
    if spec.dtype is None:  # a sequence or an optional: the kernel checks it
        return value
    array = as_array(name, value)
    check_array(name, array, spec, symbols, given=value)
    return array


def as_array(name: str, value: Any) -> NDArray[Any]:
    """Return an input's value as an array; raise `BindError` where it is none, as a ragged list is."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise BindError(f"input {name!r} is a {type(value).__name__}, and no array: {error}") from error


def check_dtype(name: str, array: Any, spec: TensorSpec, given: Any = None) -> None:
    """Raise `BindError` where the dtype of an array does not fit; `given` is what it was made of."""
    wanted = spec.dtype
    if wanted is None or array.dtype == wanted or (wanted.kind == "O" and array.dtype.kind in "USO"):
        return
    if isinstance(given, str):
        raise BindError(
            f"input {name!r} is the text {given!r}, the graph takes {spec}; pass an array, as "
            "numpy.load(file) returns that of a .npy file"
        )
    to = "str" if wanted.kind == "O" else repr(wanted.name)
    if hasattr(given, "to_numpy"):
        cure = f"some columns, as frame[names].to_numpy({to})"
    elif given is None or hasattr(given, "astype"):
        cure = f"array.astype({to})"
    else:
        cure = f"numpy.asarray(value, {to})"
    raise BindError(f"input {name!r} has dtype {array.dtype}, the graph takes {spec}; pass {cure}")


def check_array(
    name: str,
    array: Any,
    spec: TensorSpec,
    symbols: dict[str, tuple[int, str]],
    given: Any = None,
) -> None:
    """Raise `BindError` where dtype or shape do not fit; `symbols` has the sizes met before, for warnings."""
    check_dtype(name, array, spec, given)
    if spec.shape is None:
        return
    fits = len(array.shape) == len(spec.shape)
    for size, dim in zip(array.shape, spec.shape, strict=False):
        if isinstance(dim, str):
            known, first = symbols.setdefault(dim, (size, name))
            if size != known:  # onnxruntime takes it: some exporters name all dimensions alike
                told = f"dimension {dim!r} is {known} in input {first!r} and {size} in {name!r}"
                warnings.warn(f"{told}; the model calls them the same", stacklevel=2)
        elif dim is not None and size != dim:
            fits = False
    if not fits:
        raise BindError(f"input {name!r} has shape {list(array.shape)}, the graph takes {spec}")


def random_inputs(graph: Graph, seed: int = 0, rows: int | None = None) -> dict[str, NDArray[Any]]:
    """Draw values for a graph's inputs, for trying it out.

    Parameters
    ----------
    graph : Graph
    seed : int, optional
    rows : int, optional
        Size of the first dimension of all inputs; what the graph says if left out.

    Returns
    -------
    dict of str to array
        Standard normal numbers, or 0 and 1 for integers and booleans; unknown dimensions are 1.

    Raises
    ------
    UsageError
        The rank or the dtype of an input is unknown, or it is no number; or the seed is negative.
    """
    rng = np.random.default_rng(checked_count("seed", seed))
    drawn: dict[str, NDArray[Any]] = {}
    for name, spec in graph.inputs.items():
        if spec.dtype is None or spec.shape is None or spec.dtype.kind in "OSUV":
            # NumPy's files hold no sequences.
            how = f"in Python: load_onnx(file).bind({name}=[…])"
            if not spec.is_sequence:
                how = f"on the command line by --input {name}=FILE"
            raise UsageError(f"input {name!r} ({spec}) cannot be drawn at random; give its value, {how}")
        shape = tuple(dim if isinstance(dim, int) else 1 for dim in spec.shape)
        if rows is not None:
            shape = (rows, *shape[1:])
        is_integer = spec.dtype.kind in "iub"
        values = rng.integers(0, 2, shape) if is_integer else rng.standard_normal(shape)
        drawn[name] = values.astype(spec.dtype)
    return drawn
