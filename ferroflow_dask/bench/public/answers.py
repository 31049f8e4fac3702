"""Comparing answers: numbers within a tolerance, all else exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: Sums of doubles in another order differ by less than this, relative to the value itself, and, where terms
#: cancel, by less than `CANCELLATION` relative to the largest value.
TOLERANCE, CANCELLATION = 1e-9, 1e-12


def difference(found: Any, expected: Any) -> str:
    """Say in one line how an answer differs from what is expected; "" if it does not.

    Frames and series are compared by columns and rows in their order, mappings by keys, sequences by items.
    """
    if (problem := _by_type(found, expected)) is not None:
        return problem
    if isinstance(expected, float | np.ndarray | np.floating) or hasattr(expected, "__array__"):
        return _numeric(found, expected)
    return "" if found == expected else f"the value is {found!r:.80}, expected {expected!r:.80}"


def _by_type(found: Any, expected: Any) -> str | None:
    """Compare what has parts; None for a value or an array."""
    if hasattr(expected, "to_dataarray"):  # an xarray.Dataset
        return _mapping(dict(getattr(found, "data_vars", {})), dict(expected.data_vars))
    if hasattr(expected, "columns") and hasattr(expected, "iloc"):
        return _frame(found, expected)
    if isinstance(expected, Mapping):
        return _mapping(found, expected)
    if isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        if not isinstance(found, Sequence) or len(found) != len(expected):
            return f"{_described(found)}, expected {_described(expected)}"
        return _first(
            (f"value {n}", difference(*pair)) for n, pair in enumerate(zip(found, expected, strict=True))
        )
    return None


def _mapping(found: Any, expected: Mapping[Any, Any]) -> str:
    if not isinstance(found, Mapping) or set(found) != set(expected):
        return f"{_described(found)}, expected keys {sorted(map(str, expected))!r:.80}"
    return _first((f"value {name}", difference(found[name], one)) for name, one in expected.items())


def _frame(found: Any, expected: Any) -> str:
    if not hasattr(found, "columns") or list(found.columns) != list(expected.columns):
        return f"{_described(found)}, expected columns {list(expected.columns)!r:.80}"
    if len(found) != len(expected):
        return f"{len(found)} rows, expected {len(expected)}"
    return _first((f"column {name}", _numeric(found[name], expected[name])) for name in expected.columns)


def _first(problems: Any) -> str:
    return next((f"{where}: {problem}" for where, problem in problems if problem), "")


def _described(value: Any) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"the result is a {type(value).__name__}{size}"


def _numeric(found: Any, expected: Any) -> str:
    values, wanted = np.asarray(found), np.asarray(expected)
    if values.shape != wanted.shape:
        return f"shape {values.shape}, expected {wanted.shape}"
    if wanted.dtype.kind not in "fc" and values.dtype.kind not in "fc":
        is_wrong = np.asarray(values != wanted)
        is_wrong &= ~(_is_null(values) & _is_null(wanted))
    else:
        values, wanted = (x.astype(complex if x.dtype.kind == "c" else float) for x in (values, wanted))
        sizes = np.abs(wanted)
        largest = np.max(sizes, initial=0, where=np.isfinite(sizes))
        # Written so that NaN counts as wrong, unless it is expected.
        is_wrong = ~(np.abs(values - wanted) <= TOLERANCE * sizes + CANCELLATION * largest)
        is_wrong &= ~((values == wanted) | (np.isnan(values) & np.isnan(wanted)))
    if not is_wrong.any():
        return ""
    first = tuple(int(i) for i in np.argwhere(is_wrong)[0])
    where = f"value {first}" if first else "the value"
    wrong, n = np.count_nonzero(is_wrong), wanted.size
    return f"{where} is {values[first]!s}, expected {wanted[first]!s} ({wrong} of {n} wrong)"


def _is_null(values: Any) -> Any:
    return np.asarray(np.not_equal(values, values))  # true of NaN and of missing dates
