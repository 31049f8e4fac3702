"""Which precision NumPy computes narrow floating-point numbers in."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Bytes of the narrowest numbers that are computed as they are [B].
_NARROWEST = 4


def wide(value: Any) -> Any:
    """Return floating-point numbers of half the width (float16, bfloat16) in single precision.

    That is exact, and results are then rounded once, where NumPy would round after each step. Other values
    are returned as they are.
    """
    array = np.asarray(value)
    # ml_dtypes' bfloat16 is of kind V.
    is_narrow = array.dtype.kind in "fV" and array.dtype.itemsize < _NARROWEST
    return array.astype(np.float32) if is_narrow else array
