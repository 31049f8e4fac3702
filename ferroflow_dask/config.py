"""Our settings: the only reader of Dask's configuration, where they live under `ferroflow`.

Defaults and their meaning are in `ferroflow.yaml`, allowed values in `ferroflow-schema.yaml`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

from ferroflow_dask.exceptions import UsageError

_DEFAULTS = yaml.safe_load(Path(__file__).with_name("ferroflow.yaml").read_text(encoding="utf-8"))

#: What Dask's `parse_bytes` and `parse_timedelta` raise for what is no size or time.
NO_QUANTITY = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)

#: What switches may be, as words; `str` makes the first two and 1 and 0 of values.
_SWITCHES = {
    **dict.fromkeys(("true", "on", "yes", "1"), True),
    **dict.fromkeys(("false", "off", "no", "0"), False),
}


def load_defaults() -> None:
    """Put our defaults below whatever the user has configured; called when the package is imported."""
    dask.config.update_defaults(_DEFAULTS)


def get(key: str) -> Any:
    """Return the setting `ferroflow.<key>`."""
    # Programs that clear Dask's configuration, as distributed's test utilities do, still find defaults.
    return dask.config.get(f"ferroflow.{key}", dask.config.get(f"ferroflow.{key}", config=_DEFAULTS))


def is_setting(key: str) -> bool:
    """Return whether there is a setting `ferroflow.<key>`."""
    return key in _DEFAULTS["ferroflow"]


def unknown_settings() -> list[str]:
    """Return a line for each setting below `ferroflow` that there is not, if its name is near to another's.

    Others may be those of policies of other packages.
    """
    return list(_unknown(dask.config.get("ferroflow", {}), _DEFAULTS["ferroflow"], "ferroflow"))


def _unknown(settings: Any, known: Mapping[str, Any], prefix: str) -> Iterator[str]:
    names = {_plain(name): name for name in known}
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        name = names.get(_plain(key))
        if name is None:
            if advice := _advice(key, names, prefix):
                yield f"there is no setting {prefix}.{key}; {advice}"
        elif isinstance(known[name], Mapping):
            yield from _unknown(value, known[name], f"{prefix}.{name}")


def _plain(name: object) -> str:
    """Return a name as it is compared: environment variables have underscores, settings also hyphens."""
    return str(name).replace("_", "-")


def _advice(key: object, names: Mapping[str, str], prefix: str) -> str:
    features = {_plain(name): f"ferroflow.features.{name}" for name in _DEFAULTS["ferroflow"]["features"]}
    if _plain(key) in features:
        return f"write {features[_plain(key)]}"
    for near in get_close_matches(_plain(key), names, n=1):
        return f"did you mean {prefix}.{names[near]}?"
    for near in get_close_matches(_plain(key), features, n=1):
        return f"write {features[near]}"
    return ""


def get_seconds(key: str) -> float:
    """Return the time `ferroflow.<key>` [s]; a number without a unit is in seconds."""
    value = get(key)
    try:
        return float(parse_timedelta(value, default="s"))
    except NO_QUANTITY as error:
        raise UsageError(
            f"the setting ferroflow.{key} is {value!r}, which is no time; write 1ms or 0.001"
        ) from error


def get_bytes(key: str) -> int:
    """Return the size `ferroflow.<key>` [B]; a number without a unit is in bytes."""
    value = get(key)
    try:
        nbytes = int(parse_bytes(value))
    except NO_QUANTITY:
        nbytes = -1
    if nbytes < 0 or isinstance(value, bool):
        raise UsageError(f"the setting ferroflow.{key} is {value!r}, which is no size; write 16kiB or 16384")
    return nbytes


def get_count(key: str) -> int:
    """Return the number `ferroflow.<key>`, which is at least 1."""
    value = get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UsageError(f"the setting ferroflow.{key} is {value!r}; it must be a whole number, at least 1")


def get_path(key: str) -> Path | None:
    """Return the path `ferroflow.<key>`, which may begin with `~`; None if there is none."""
    value = get(key)
    if value is None:
        return None
    if isinstance(value, str | Path) and str(value).isprintable() and str(value):
        return Path(os.path.expanduser(value))
    raise UsageError(f"the setting ferroflow.{key} is {value!r}; it must be a path, or null for none")


def is_on(feature: str) -> bool:
    """Return the switch `ferroflow.features.<feature>`: a boolean, or the word for one.

    Environment variables have words. Features of other packages are on unless they are switched off.
    """
    key = f"ferroflow.features.{feature}"
    value = dask.config.get(key, _DEFAULTS["ferroflow"]["features"].get(feature, True))
    found = _SWITCHES.get(str(value).strip().lower())
    if found is None:
        raise UsageError(f"the setting {key} is {value!r}; it must be true or false")
    return found


def switches() -> set[str]:
    """Return the features that have a switch: the built-in ones, and those that the user has configured."""
    configured = get("features")
    return {*_DEFAULTS["ferroflow"]["features"], *(configured if isinstance(configured, Mapping) else ())}


def respects_observers() -> bool:
    """Return whether plugins that follow tasks turn bundling off: the setting `ferroflow.observers`."""
    chosen = get("observers")
    if chosen not in ("respect", "ignore"):
        raise UsageError(
            f"the setting ferroflow.observers must be 'respect' or 'ignore', got {chosen!r}; "
            "dask.config.set({'ferroflow.observers': 'ignore'})"
        )
    return bool(chosen == "respect")


def get_names(key: str) -> tuple[str, ...]:
    """Return the list of names `ferroflow.<key>`."""
    value = get(key)
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise UsageError(f"the setting ferroflow.{key} is {value!r}; it must be a list of names")
    return tuple(value)
