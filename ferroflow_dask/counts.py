"""Whole numbers that callers give: NumPy's are as good as Python's, booleans are none."""

from __future__ import annotations

import operator
from typing import Any

from ferroflow_dask.exceptions import UsageError


def as_count(value: Any) -> int | None:
    """Return a whole number from 0 up as Python's; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        found = operator.index(value)
    except TypeError:
        return None
    return found if found >= 0 else None


def checked_count(name: str, value: Any, least: int = 0) -> int:
    """Return an argument that counts something, or a seed, as Python's integer.

    Raises
    ------
    UsageError
        It is none, or less than `least`.
    """
    found = as_count(value)
    if found is None or found < least:
        raise UsageError(f"{name} is {value!r}; it must be a whole number, at least {least}")
    return found
