"""Strategies in JSON: one line for each operator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferroflow_dask.exceptions import FerroflowError, StrategyError
from ferroflow_dask.strategy.strategy import Configuration, Strategy
from ferroflow_dask.whole_files import write_text

VERSION = 1
_FIELDS = {"version", "model", "signature", "workers", "operators"}


def as_json(strategy: Strategy) -> str:
    """Return a strategy as JSON."""
    head = {"version": VERSION, "model": strategy.model, "signature": strategy.signature}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items() if value]
    lines.append(f'  "workers": {json.dumps(strategy.workers)},')
    operators = [
        f"    {json.dumps(name)}: {json.dumps(_operator(found))}"
        for name, found in strategy.operators.items()
    ]
    return "\n".join(["{", *lines, '  "operators": {', ",\n".join(operators), "  }", "}", ""])


def _operator(found: Configuration) -> dict[str, Any]:
    split = {axis: degree for axis, degree in found.degrees.items() if degree > 1}
    return {**({"split": split} if split else {}), "workers": found.workers}


def write_strategy(strategy: Strategy, path: str | Path) -> None:
    """Write a strategy to a file, all of it or nothing."""
    try:
        write_text(path, as_json(strategy))
    except OSError as error:
        raise FerroflowError(f"cannot write {str(path)!r}: {error.strerror}") from error


def read_strategy(path: str | Path) -> Strategy:
    """Return the strategy in a file.

    Raises
    ------
    StrategyError
        The file cannot be read, or is no strategy.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StrategyError(f"a strategy must be a JSON file, got {str(path)!r}: {reason}") from error
    try:
        return from_json(text)
    except StrategyError as error:
        raise StrategyError(f"{path}: {error}") from error.__cause__


def from_json(text: str) -> Strategy:
    """Return the strategy that a text describes; see `read_strategy`."""
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except StrategyError:
        raise
    except RecursionError as error:
        raise StrategyError("a strategy must not be nested so deeply") from error
    except ValueError as error:  # also a number of thousands of digits
        raise StrategyError(f"a strategy must be JSON, got damaged or truncated text: {error}") from error
    found = _mapping("a strategy", document)
    version = found.get("version")
    if version != VERSION:
        raise StrategyError(f"version must be {VERSION}, got {version!r}")
    for name in found.keys() - _FIELDS:
        raise StrategyError(
            f"a field of a strategy must be one of {', '.join(sorted(_FIELDS))}, got {name!r}"
        )
    workers = _names("workers", found.get("workers"))
    if len(set(workers)) < len(workers):
        raise StrategyError(f"workers must be different, got {list(workers)}")
    operators = _mapping("operators", found.get("operators"))
    label = {name: found.get(name, "") for name in ("model", "signature")}
    for name, value in label.items():
        if not isinstance(value, str):
            raise StrategyError(f"{name} must be a text, got {value!r}")
    return Strategy(
        workers, {name: _configuration(name, value) for name, value in operators.items()}, **label
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise StrategyError(f"names must be different, got {name!r} twice")
        found[name] = value
    return found


def _configuration(name: str, value: Any) -> Configuration:
    label = f"operator {name!r}"
    fields = _mapping(label, value)
    for field in fields.keys() - {"split", "workers"}:
        raise StrategyError(f"{label}: a field must be split or workers, got {field!r}")
    degrees = _mapping(f"{label}: split", fields.get("split", {}))
    for axis, degree in degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise StrategyError(f"{label}: the degree of {axis!r} must be a number from 1 on, got {degree!r}")
    return Configuration(_names(f"{label}: workers", fields.get("workers")), degrees)


def _mapping(label: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise StrategyError(f"{label} must be an object, got {json.dumps(value)[:40]}")
    return value


def _names(label: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise StrategyError(f"{label} must be a list of names, got {json.dumps(value)[:40]}")
    return tuple(value)
