"""Topologies in YAML: read from files and by the names of presets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ferroflow_dask.exceptions import TopologyError, UnknownNameError
from ferroflow_dask.topology.parts import MOST, Group, Host, Link, Runtime, Worker
from ferroflow_dask.topology.topology import Topology

_PRESETS = Path(__file__).with_name("presets")
#: Larger files are no topologies [B].
_MOST_NBYTES = 2**20

#: Returns a value that was read, or raises for one that is not allowed; is told where it was.
_Reader = Callable[[Any, str], Any]


def preset_names() -> list[str]:
    """Return the names of the topologies that come with the package."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def load_topology(source: str | Path) -> Topology:
    """Return a topology from a YAML file, or a preset by its name.

    Raises
    ------
    TopologyError
        The file cannot be read, or is not a topology.
    UnknownNameError
        There is neither such a file nor such a preset.
    """
    path = Path(source)
    if str(source) in preset_names():
        path = _PRESETS / f"{source}.yaml"
    elif not path.exists() and not path.suffix:
        raise UnknownNameError.of("topology", source, preset_names())
    try:
        if path.stat().st_size > _MOST_NBYTES:
            raise TopologyError(f"a topology must have at most {_MOST_NBYTES:,} bytes, got more: {path}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"a topology must be a YAML file, got {str(path)!r}: {error}") from error
    return topology_from_yaml(text)


def topology_from_yaml(text: str) -> Topology:
    """Return the topology that a YAML document describes."""
    try:
        document = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = " ".join(str(error).split())
        raise TopologyError(f"a topology must be a YAML document, got an error: {line}") from error
    return topology_from_dict(document)


def topology_from_dict(document: Any) -> Topology:
    """Return the topology that `Topology.as_dict` or a YAML document describes."""
    known: dict[str, _Reader] = {
        "version": _version,
        "name": _text,
        "hosts": _list_of(_hosts),
        "racks": _list_of(partial(_group, outer="site")),
        "sites": _list_of(partial(_group, outer="")),
        "scheduler": _text,
        "client": _text,
        "runtime": _runtime,
    }
    found = _fields(document, "the topology", known, ("version", "hosts"))
    del found["version"]
    groups = found.pop("hosts")
    if sum(count for count, _ in groups) > MOST:
        raise TopologyError(f"a topology must have at most {MOST:,} hosts, got more")
    hosts = [host for count, make in groups for host in make(count)]
    if sum(len(host.workers) for host in hosts) > MOST:
        raise TopologyError(f"a topology must have at most {MOST:,} workers, got more")
    return Topology(hosts, **found)


class _Loader(yaml.SafeLoader):
    """Reads no aliases: a few lines of them could stand for a million hosts."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.get_mark()
            raise yaml.YAMLError(f"aliases are not allowed in a topology; line {mark.line + 1} has one")
        return super().compose_node(parent, index)


def _fields(
    value: Any, where: str, known: Mapping[str, _Reader], required: tuple[str, ...]
) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TopologyError(f"{where} must be a mapping, got {_short(value)}")
    for name in value:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it may have {', '.join(known)}"
            raise TopologyError(f"{where} has no field {_short(name)}{hint}")
    for name in required:
        if name not in value:
            raise TopologyError(f"{where} must have the field {name!r}, got {', '.join(map(str, value))}")
    return {name: known[name](one, f"{name} of {where}") for name, one in value.items()}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _version(value: Any, where: str) -> int:
    if value != 1:
        raise TopologyError(f"{where} must be 1, got {_short(value)}")
    return 1


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise TopologyError(f"{where} must be text, got {_short(value)}")
    return value


def _number(value: Any, where: str) -> float:
    # YAML 1.1 takes 1e9 for text.
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise TopologyError(f"{where} must be a finite number, got {_short(value)}")
    return number


def _count(value: Any, where: str) -> int:
    number = _number(value, where)
    if number != int(number) or not 1 <= number <= MOST:
        raise TopologyError(f"{where} must be a whole number from 1 to {MOST:,}, got {_short(value)}")
    return int(number)


def _list_of(read: _Reader) -> _Reader:
    def read_list(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise TopologyError(f"{where} must be a list, got {_short(value)}")
        return [read(one, f"entry {at} of {where}") for at, one in enumerate(value, start=1)]

    return read_list


def _link(value: Any, where: str) -> Link:
    known: dict[str, _Reader] = {"latency_s": _number, "bandwidth": _number}
    return _made(Link, _fields(value, where, known, ("latency_s", "bandwidth")), where)


def _workers(value: Any, where: str) -> tuple[int, Worker]:
    known: dict[str, _Reader] = {
        "count": _count,
        "threads": _count,
        "kind": _text,
        "speed": _number,
        "memory_nbytes": lambda one, at: int(_number(one, at)),
        "disk_bandwidth": _number,
    }
    found = _fields(value, where, known, ())
    return found.pop("count", 1), _made(Worker, found, where)


def _hosts(value: Any, where: str) -> tuple[int, Callable[[int], list[Host]]]:
    known: dict[str, _Reader] = {
        "name": _text,
        "count": _count,
        "cores": _number,
        "rack": _text,
        "link": _link,
        "inside": _link,
        "workers": _list_of(_workers),
    }
    found = _fields(value, where, known, ("name",))
    count, name = found.pop("count", 1), found.pop("name")
    groups = found.pop("workers", [])
    if count * sum(n for n, _ in groups) > MOST:
        raise TopologyError(f"{where} must have at most {MOST:,} workers, got more")
    workers = tuple(worker for n, worker in groups for _ in range(n))

    def make(count: int) -> list[Host]:
        names = [name] if count == 1 else [f"{name}-{at}" for at in range(count)]
        return [_made(Host, {"name": one, "workers": workers, **found}, where) for one in names]

    return count, make


def _group(value: Any, where: str, outer: str) -> Group:
    known: dict[str, _Reader] = {"name": _text, "link": _link}
    if outer:
        known[outer] = _text
    found = _fields(value, where, known, ("name",))
    if outer in found:
        found["inside"] = found.pop(outer)
    return _made(Group, found, where)


def _runtime(value: Any, where: str) -> Runtime:
    known: dict[str, _Reader] = dict.fromkeys(Runtime().as_dict(), _number)
    known["message_s"] = _seconds_by_name
    return _made(Runtime, _fields(value, where, known, ()), where)


def _seconds_by_name(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise TopologyError(f"{where} must be a mapping, got {_short(value)}")
    return {str(name): _number(one, f"{name} of {where}") for name, one in value.items()}


T = TypeVar("T")


def _made(kind: Callable[..., T], fields: Mapping[str, Any], where: str) -> T:
    """Return a part; an error says where in the document the part is."""
    try:
        return kind(**fields)
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from error
