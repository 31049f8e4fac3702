"""An array that, like one on a device, is only computed with: nothing may look at its values from here."""

from __future__ import annotations

from typing import Any

import numpy as np

#: What CuPy's arrays answer to when NumPy's functions meet them (and `numpy.ufunc` of that name).
CUPY_ANSWERS = frozenset({
    *("absolute", "add", "ceil", "divide", "equal", "exp", "expm1", "floor", "floor_divide", "fmax"),
    *("greater", "greater_equal", "less", "less_equal", "log", "logaddexp", "logical_and", "logical_not"),
    *("logical_or", "logical_xor", "matmul", "maximum", "minimum", "multiply", "negative", "not_equal"),
    *("power", "reciprocal", "remainder", "rint", "sqrt", "subtract", "tanh"),
    *("argmax", "argmin", "broadcast_to", "concatenate", "einsum", "full_like", "max", "mean", "min", "pad"),
    *("prod", "sum", "take", "tile", "where"),
})  # fmt: skip

#: Where kernels choose by the library: CuPy has another function.
CHOSEN_BY_LIBRARY = frozenset({"erf (vectorized)", "sliding_window_view"})


class StrictArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A NumPy array that is out of reach: only NumPy's own functions, handed this object, compute with it."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self._values = values

    shape = property(lambda self: self._values.shape)
    dtype = property(lambda self: self._values.dtype)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)
    nbytes = property(lambda self: self._values.nbytes)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _call(getattr(ufunc, method), ufunc.__name__, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _call(function, function.__name__, args, kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("its values were asked for")

    __float__ = __int__ = __index__ = __bool__ = __iter__ = __len__ = __array__

    def __getitem__(self, index: Any) -> StrictArray:
        return _wrapped(self._values[index])

    def astype(self, *args: Any, **kwargs: Any) -> StrictArray:
        return _wrapped(self._values.astype(*args, **kwargs))

    def reshape(self, *args: Any) -> StrictArray:
        return _wrapped(self._values.reshape(*args))

    def transpose(self, *args: Any) -> StrictArray:
        return _wrapped(self._values.transpose(*args))

    def mean(self, **kwargs: Any) -> StrictArray:
        return _wrapped(self._values.mean(**kwargs))


def values_of(array: Any) -> Any:
    """What is in it, for the test alone."""
    return array._values if isinstance(array, StrictArray) else array


def _call(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name not in CUPY_ANSWERS | CHOSEN_BY_LIBRARY:
        raise NotImplementedError(f"CuPy's arrays do not answer to {name}, or nobody looked whether they do")
    return _wrapped(function(*_unwrapped(args), **_unwrapped(kwargs)))


def _wrapped(value: Any) -> StrictArray:
    return StrictArray(np.asarray(value))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        raise TypeError("arrays of the host and of the device were mixed")
    if isinstance(value, list | tuple):
        return type(value)(map(_unwrapped, value))
    if isinstance(value, dict):
        return {name: _unwrapped(item) for name, item in value.items()}
    return values_of(value)
