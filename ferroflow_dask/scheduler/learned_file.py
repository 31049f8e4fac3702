"""File of learned numbers: they outlive schedulers, several of which may share a file.

The file is JSON of at most 4 MB, and always whole: each write makes a new file and renames it. A file that
cannot be read is left alone.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ferroflow_dask.documents import (
    as_list,
    as_number,
    as_object,
    as_text,
    check_format,
    read_document,
    short,
)
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.printable import printable
from ferroflow_dask.scheduler.learned import Learned
from ferroflow_dask.whole_files import write_text

logger = logging.getLogger("ferroflow_dask")

_FORMAT, _VERSION = "ferroflow learned numbers", 1
#: Longer files are neither written nor read [B].
MOST_NBYTES = 4_000_000
#: Brackets, names of sections and line ends of a file, at most [B].
_FRAME_NBYTES = 200
#: Sections of a file with the share of the remaining bytes that each may take, in this order.
_SECTIONS = {"separate": 0.2, "shuffled": 0.2, "kinds_s": 0.5, "prefixes": 1.0}
#: Sections by name.
_NAMED = ("shuffled", "kinds_s", "prefixes")
#: Larger values are no measurements: 30 years [s], 1 EiB [B].
_MOST_S, _MOST_SIZE, _MOST_TASKS = 1e9, 2.0**60, 2**53
#: Fields of the tasks of a prefix that have about one size, with the largest value of each.
_OF_SIZE = {
    "size_nbytes": _MOST_SIZE,
    "mean_s": _MOST_S,
    "mean_nbytes": _MOST_SIZE,
    "most_nbytes": _MOST_SIZE,
}
_COUNTS = ("n_cold", "n_warm", "n_sized")

#: As `Learned.exported` returns them.
Numbers = dict[str, Any]
EMPTY: Numbers = {"round_trip_s": None, "pause_s": None, "separate": [], **{name: {} for name in _NAMED}}


def check_place(path: Path | None) -> None:
    """Raise `UsageError` if a file of learned numbers cannot be at a path; None is no path."""
    if path is None:
        return
    wrong = f"the setting ferroflow.learned is {str(path)!r}"
    if not path.parent.is_dir():
        raise UsageError(f"{wrong}; there is no folder {str(path.parent)!r} where the scheduler runs")
    if path.exists() and not path.is_file():
        raise UsageError(f"{wrong}; it must be a file, and that is none")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"{wrong}; its folder cannot be written: {error.strerror}") from error


def read_numbers(path: Path) -> Numbers:
    """Return the learned numbers in a file.

    Raises
    ------
    UsageError
        The file cannot be read, has another format or version, or one value in it is wrong.
    """
    document = read_document(path, "a file of learned numbers", MOST_NBYTES)
    document = check_format(document, _FORMAT, _VERSION)
    prefixes = as_object(document.get("prefixes"), "prefixes")
    kinds_s = as_object(document.get("kinds_s"), "kinds_s")
    shuffled = as_object(document.get("shuffled"), "shuffled")
    return {
        **{name: _seconds_if_any(document.get(name), name) for name in ("round_trip_s", "pause_s")},
        "separate": [as_text(one, "separate") for one in as_list(document.get("separate"), "separate")],
        "shuffled": {
            name: _within(one, _MOST_SIZE, f"the size of shuffle {name!r}") for name, one in shuffled.items()
        },
        "kinds_s": {
            name: _within(one, _MOST_S, f"the duration of kind {name!r}") for name, one in kinds_s.items()
        },
        "prefixes": {name: _sizes(one, f"prefix {name!r}") for name, one in prefixes.items()},
    }


def _sizes(value: Any, where: str) -> list[dict[str, float | None]]:
    sizes = as_list(value, where)
    if not sizes:
        raise UsageError(f"{where} must have means, got none")
    return [_of_size(as_object(one, where), where) for one in sizes]


def _of_size(one: Mapping[str, Any], where: str) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        name: _within(one.get(name), most, f"{where}: {name}") for name, most in _OF_SIZE.items()
    }
    for name in _COUNTS:
        n = one.get(name)
        if type(n) is not int or not 0 <= n <= _MOST_TASKS:
            raise UsageError(f"{where}: {name} must be a number of tasks, got {short(n)}")
        found[name] = n
    share = one.get("core_share")
    return found | {"core_share": None if share is None else _within(share, 1.0, f"{where}: core_share")}


def _within(value: Any, most: float, where: str) -> float:
    number = as_number(value, where)
    if number > most:
        raise UsageError(f"{where} must be at most {most:g}, got {number:g}")
    return number


def _seconds_if_any(value: Any, where: str) -> float | None:
    return None if value is None else _within(value, _MOST_S, where)


def as_json(numbers: Numbers) -> str:
    """Return the content of a file: those used longest ago are left out if it would be too long."""
    head = {"format": _FORMAT, "version": _VERSION}
    parts = [json.dumps(head | {name: numbers[name] for name in ("round_trip_s", "pause_s")})[:-1]]
    left = MOST_NBYTES - _FRAME_NBYTES - len(parts[0])
    # One line an entry: the threads of the scheduler take turns between them.
    for section, share in _SECTIONS.items():
        entries = numbers[section]
        if isinstance(entries, list):
            lines, (begin, end) = [json.dumps(one) for one in entries], "[]"
        else:
            lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in entries.items()]
            begin, end = "{}"
        kept = _last_ones(lines, int(share * left))
        left -= sum(len(line) + 2 for line in kept)
        parts.append(f'"{section}": {begin}\n' + ",\n".join(kept) + f"\n{end}")
    return ",\n".join(parts) + "}\n"


def _last_ones(lines: Sequence[str], most_nbytes: int) -> Sequence[str]:
    """Return as many of the last lines as have room, with two bytes between them."""
    for i in range(len(lines) - 1, -1, -1):
        most_nbytes -= len(lines[i]) + 2
        if most_nbytes < 0:
            return lines[i + 1 :]
    return lines


def changed_since(before: Numbers, now: Numbers) -> Numbers:
    """Return the numbers that differ from those before, in the form of all numbers."""
    found: Numbers = {}
    for name, value in now.items():
        if isinstance(value, Mapping):
            found[name] = {key: one for key, one in value.items() if before[name].get(key) != one}
        else:
            found[name] = value if value != before[name] else EMPTY[name]
    return found


def merged(older: Numbers, newer: Numbers) -> Numbers:
    """Return all numbers; the newer ones count if both have them, and come last."""
    return {
        **{name: older[name] if newer[name] is None else newer[name] for name in ("round_trip_s", "pause_s")},
        "separate": sorted({*older["separate"], *newer["separate"]}),
        **{
            name: {key: one for key, one in older[name].items() if key not in newer[name]} | newer[name]
            for name in _NAMED
        },
    }


class LearnedFile:
    """The file of one installation, which may write it from any thread.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        # Those of this installation when it last read or wrote the file.
        self._before = EMPTY
        self._has_warned = False
        #: Whether nothing is written any more: it was the last time, or the file could not be read.
        self.is_closed = False

    def read_into(self, learned: Learned) -> None:
        """Restore the numbers in the file, if there is one that can be read."""
        try:
            found = self._present()
        except UsageError as error:
            self._leave_alone(error)
            return
        own = learned.exported()
        learned.restore(found)
        now = learned.exported()
        # Another scheduler may learn these while this one does not use them: its numbers stay in the file.
        self._before = found | {
            name: {key: now[name][key] for key in found[name] if key in now[name] and key not in own[name]}
            for name in _NAMED
        }

    def write(self, numbers: Numbers, *, is_last: bool = False) -> None:
        """Write the numbers that have changed since the last time, and keep all others in the file.

        Parameters
        ----------
        numbers : dict
            All that is learned.
        is_last : bool, optional
            Whether later calls do nothing.
        """
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = is_last
            changed = changed_since(self._before, numbers)
            if changed == EMPTY:
                return
            try:
                write_text(self._path, as_json(merged(self._present(), changed)))
                self._before = numbers
            except UsageError as error:
                self._leave_alone(error)
            except OSError as error:
                self._warn(f"could not be written to {self._path} ({error.strerror or error})")

    def _present(self) -> Numbers:
        try:
            return read_numbers(self._path)
        except UsageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return EMPTY
            raise

    def _leave_alone(self, error: UsageError) -> None:
        self.is_closed = True
        self._warn(f"in {self._path} could not be read ({error}); the file is left alone")

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("ferroflow: the learned numbers %s", printable(problem))
