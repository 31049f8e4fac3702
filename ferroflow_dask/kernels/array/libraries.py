"""Where libraries with NumPy's interface differ: chosen by the library that an array is of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

#: NumPy has no error function. Being a ufunc, this one reaches whoever wraps NumPy.
_ERF = np.frompyfunc(math.erf, 1, 1)


def _is_cupy(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "cupy"


def erf(x: Any) -> Any:
    """Return the error function of x, to full precision."""
    if _is_cupy(x):
        from cupyx.scipy.special import erf as cupy_erf

        return cupy_erf(x)
    # Flat, since of a scalar it would make a bare Python number.
    return _ERF(x.reshape(-1)).astype(x.dtype).reshape(x.shape)


def sliding_windows(x: Any, spans: Sequence[int]) -> Any:
    """Return a view of all windows over the last axes.

    Parameters
    ----------
    x : array of shape (…, sizes)
    spans : sequence of int
        Of the window, one for each of the last axes.

    Returns
    -------
    array of shape (…, sizes - spans + 1, spans)
    """
    n = len(spans)
    if not _is_cupy(x):
        return np.lib.stride_tricks.sliding_window_view(
            x, tuple(spans), axis=tuple(range(x.ndim - n, x.ndim))
        )
    # CuPy's own function of that name copies the spans to the device to look at them.
    from cupy.lib.stride_tricks import as_strided

    positions = tuple(size - span + 1 for size, span in zip(x.shape[-n:], spans, strict=True))
    return as_strided(x, (*x.shape[:-n], *positions, *spans), (*x.strides, *x.strides[-n:]))
