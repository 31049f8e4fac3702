"""Files of benchmark rows: JSON lines of `BenchRecord`, written run by run and read with suspicion.

A run that was interrupted leaves a last line without its end; that line is passed over in reading, with
a note, and cut off in appending. All else that is not a valid row is refused, with file and line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, Self

from distributed import Client

from ferroflow_dask.bench.machine import stamp
from ferroflow_dask.bench.schema import NAME, OK, ROW, SCHEMA, BenchRecord, identity_of, written
from ferroflow_dask.exceptions import UsageError

Fields = dict[str, Any]
Where = str

#: How each row of ours begins; what a torn line is known by.
_BEGINNING = f'{{"schema": "{NAME}/'


def bench_row(
    client: Client, workload: str, arguments: Mapping[str, Any], *, ops: int, **facts: Any
) -> BenchRecord:
    """Return the row of a run that was measured by other means than `ferroflow bench`.

    Parameters
    ----------
    client : distributed.Client
        Of the cluster that was measured.
    workload, arguments, ops
        As in `BenchRecord`.
    **facts
        Likewise `policy`, `repetition`, `makespan_s` and what else is known.
    """
    threads = list(client.nthreads().values())
    return BenchRecord(
        workload=workload,
        arguments=dict(arguments),
        workers=len(threads),
        threads_per_worker=max(threads),
        ops=ops,
        executed=ops,
        **stamp(),
        **facts,
    )


class Rows(tuple[BenchRecord, ...]):
    """The rows of some files, in the order of the files and their lines.

    Attributes
    ----------
    notes : tuple of str
        What a reader of a report must know of how they were read, a sentence each.
    """

    notes: tuple[str, ...]

    def __new__(cls, records: Iterable[BenchRecord], notes: Iterable[str] = ()) -> Self:
        """Make rows of records; a tuple takes its items here."""
        rows = super().__new__(cls, records)
        rows.notes = tuple(notes)
        return rows


def read_rows(paths: Sequence[str | os.PathLike[str]], *, may_be_empty: bool = False) -> Rows:
    """Read the rows of some files.

    Parameters
    ----------
    paths : sequence of path-like
    may_be_empty : bool, optional
        Return no rows if there are none, as when a benchmark goes on that was ended before its first row.

    Returns
    -------
    Rows
        With a note for each file whose last line was torn, or of which broken runs were made again.

    Raises
    ------
    UsageError
        A file cannot be read, holds anything but rows of this version, or repeats a row, or there are none.
    """
    records: dict[str, tuple[BenchRecord, Where]] = {}
    notes = []
    for path in map(Path, paths):
        try:
            lines, torn = _split(path.read_bytes())
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
        if torn:
            notes.append(f"{path}: the last line was torn, by a run that was interrupted, and is left out.")
        found = [(_parse(line, f"{path}:{n}"), f"{path}:{n}") for n, line in enumerate(lines, start=1)]
        counted = _last_tries(found)
        if n_retried := len(found) - len(counted):
            notes.append(f"{path}: broken runs that were run again: {n_retried}; the later rows count.")
        for record, where in counted:
            content = json.dumps(asdict(record), sort_keys=True)
            if content in records:
                # The same file twice would halve every interval.
                raise UsageError(f"{where}: this row is already in {records[content][1]}; give each row once")
            records[content] = record, where
    if not records and not may_be_empty:
        files = ", ".join(str(path) for path in paths) or "no files"
        raise UsageError(f"no rows in {files}; 'ferroflow bench' writes some")
    return Rows((record for record, _ in records.values()), notes)


def _last_tries(found: Sequence[tuple[BenchRecord, Where]]) -> Sequence[tuple[BenchRecord, Where]]:
    """Leave out broken rows of runs that were made again in the same setting."""
    runs = [(identity_of(row), written(row.versions), row.commit, row.machine) for row, _ in found]
    last = {run: n for n, run in enumerate(runs)}
    return [row for n, row in enumerate(found) if row[0].status == OK or last[runs[n]] == n]


def append_row(path: str | os.PathLike[str], record: BenchRecord) -> None:
    """Add a row to a file, which is made if it is not there; the row is on disk when this returns.

    A torn last line that an interrupted run has left is cut off first.

    Raises
    ------
    UsageError
        The file cannot be written or does not end in a row of ours, or the record is not valid.
    """
    fields = asdict(record)
    _check(fields, f"row for {path}")
    # Escaped, since what a failure says may hold surrogates, which UTF-8 has not.
    line = json.dumps(fields, allow_nan=False) + "\n"
    try:
        with open(path, "ab+") as file:
            _mend(file, path)
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def _mend(file: Any, path: str | os.PathLike[str]) -> None:
    """Make an open file end in a whole line."""
    file.seek(0)
    first = file.readline()
    if first and not _is_beginning(first):
        _refuse_foreign(f"{path}:1")
    if not (size := file.seek(0, os.SEEK_END)):
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":  # as usual: the other rows are not read for each new one
        return
    file.seek(0)
    lines, torn = _split(file.read())
    if torn:
        file.truncate(size - len(torn))
    elif _is_beginning(lines[-1]):
        file.write(b"\n")
    else:
        _refuse_foreign(f"{path}: last line")


def _split(content: bytes) -> tuple[list[bytes], bytes]:
    """Return the lines of a file, and the torn one after them."""
    *lines, last = content.split(b"\n")
    if last and _is_beginning(last) and not _is_json(last):
        return lines, last
    return [*lines, last] if last else lines, b""


def _is_beginning(line: bytes) -> bool:
    beginning = _BEGINNING.encode()
    return line.startswith(beginning[: len(line)])


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse(line: bytes, where: Where) -> BenchRecord:
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError also of bytes that are not UTF-8
        raise UsageError(f"{where}: not JSON ({error}); each line must be one row of {SCHEMA}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("schema"), str):
        _refuse_foreign(where)
    if fields["schema"] != SCHEMA:
        raise UsageError(
            f"{where}: schema is {fields['schema']!r}; this release reads {SCHEMA!r}; measure again"
        )
    _check(fields, where)
    for name, field in ROW.items():
        if field.kind.type == "float" and fields[name] is not None:
            fields[name] = float(fields[name])
    return BenchRecord(**fields)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _refuse_foreign(where: Where) -> NoReturn:
    raise UsageError(f"{where}: not a row of ferroflow's; each line must be a JSON object of {SCHEMA}")


def _check(fields: Fields, where: Where) -> None:
    """Raise `UsageError` unless these are the fields of a row, each of its type and range."""
    if missing := [name for name in ROW if name not in fields]:
        raise UsageError(f"{where}: field {missing[0]!r} is missing; a row of {SCHEMA} has it")
    if unknown := [name for name in fields if name not in ROW]:
        raise UsageError(f"{where}: a row of {SCHEMA} has no field {unknown[0]!r}")
    for name, value in fields.items():
        if problem := ROW[name].problem(value):
            raise UsageError(f"{where}: {name} is {value!r}; it must be {problem}")
    if fields["status"] == OK and not fields["makespan_s"] > 0:
        raise UsageError(
            f"{where}: makespan_s is {fields['makespan_s']!r}; of a run that is ok it is above 0"
        )
