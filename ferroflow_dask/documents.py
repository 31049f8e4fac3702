"""Documents in JSON that users may have written: read with limits, checked field by field."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferroflow_dask.exceptions import UsageError

#: Larger files are not read [B].
_MOST_NBYTES = 2**30


def read_document(path: str | Path, what: str, most_nbytes: int = _MOST_NBYTES) -> Any:
    """Return the content of a JSON file.

    Parameters
    ----------
    path : str or path
    what : str
        Errors call the file that, like "a record".
    most_nbytes : int, optional
        Larger files are not read [B].

    Raises
    ------
    UsageError
        The file cannot be read, or is no JSON.
    """
    path = Path(path)
    try:
        if path.stat().st_size > most_nbytes:
            raise UsageError(f"{what} must have at most {most_nbytes:,} bytes, got more: {str(path)!r}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{what} must be a file, got {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{what} must be a JSON file, got {str(path)!r}: {error}") from error


def check_format(document: Any, name: str, version: int) -> Mapping[str, Any]:
    """Return a document if it has the format and the version; raises `UsageError`."""
    if not isinstance(document, Mapping) or document.get("format") != name:
        raise UsageError(f"format must be {name!r}, got {short(document)}")
    if document.get("version") != version:
        raise UsageError(f"version must be {version}, got {short(document.get('version'))}")
    return document


def as_list(value: Any, where: str) -> list[Any]:
    """Return a value that must be a list; raises `UsageError`."""
    if not isinstance(value, list):
        raise UsageError(f"{where} must be a list, got {short(value)}")
    return value


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    """Return a value that must be an object; raises `UsageError`."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} must be an object, got {short(value)}")
    return value


def as_text(value: Any, where: str, *, may_be_empty: bool = False) -> str:
    """Return a value that must be a text; raises `UsageError`."""
    if not isinstance(value, str) or not (value or may_be_empty):
        raise UsageError(f"{where} must be a text, got {short(value)}")
    return value


def as_number(value: Any, where: str) -> float:
    """Return a value that must be a finite number, at least 0; raises `UsageError`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:  # which is false for NaN
        raise UsageError(f"{where} must be a finite number, at least 0, got {short(value)}")
    return float(value)


def short(value: Any) -> str:
    """Return a value as errors show it."""
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
