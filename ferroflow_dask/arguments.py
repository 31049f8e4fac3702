"""Arguments of the kinds that functions take: what else is given is told in one line."""

from __future__ import annotations

import reprlib

from ferroflow_dask.exceptions import UsageError


def check_kind(function: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raise `UsageError` unless an argument is of some kind.

    Parameters
    ----------
    function : str
        Whose argument it is.
    value : object
    kind : type or tuple of type
    wanted : str
        What the function takes, and how one gets it.
    """
    if not isinstance(value, kind):
        is_told_by_type = value is not None and not isinstance(value, str | int | float)
        told = f"a {type(value).__name__}" if is_told_by_type else reprlib.repr(value)
        raise UsageError(f"{function} takes {wanted}, and not {told}")
