"""TPC-H by data frames: 22 queries on generated tables, compared with DuckDB's answers.

Derived from TPC-H: dates are timestamps, decimals are floats, and queries run one at a time on tables that
never change. Tables are written once into a folder for each scale, in several Parquet files each; reading
them is part of a query.
"""

from __future__ import annotations

import fcntl
import math
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ferroflow_dask.bench.public.answers import TOLERANCE, difference
from ferroflow_dask.bench.public.base import Clock, Options, Program, Suite
from ferroflow_dask.bench.public.tpch_queries import QUERIES, Query
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.memory import check_memory

if TYPE_CHECKING:
    from distributed import Client

#: Tables of several files, and of one.
LARGE_TABLES = ("lineitem", "orders", "partsupp", "part", "customer")
SMALL_TABLES = ("supplier", "nation", "region")
TABLES = LARGE_TABLES + SMALL_TABLES

#: Smaller tables have no rows for some queries.
LEAST_SCALE = 0.01
#: Files of a large table at scale 1, each with 750,000 rows of lineitem, and at smaller scales.
FILES = 8
#: For each unit of scale [B]. At scale 1, two workers took 2.1e9 together and pandas 1.4e9; tables and raw
#: files took 3.6e8.
MEMORY_NBYTES, DISK_NBYTES = 2e9, 0.4e9
#: Sums of money may differ by so much [$] (clause 2.1.3.5 of the specification), and, as all floats, by
#: `answers.TOLERANCE` relative to the value, which is stricter for small ones. All else is equal.
LARGEST_DIFFERENCE = 100

GENERATOR = "tpchgen-cli"
#: Imported before programs run, so that no import is on the clock of a first run or of an anchor.
_IMPORTED = ("dask.dataframe", "pyarrow.dataset", "pyarrow.parquet")


def programs(options: Options) -> list[Program]:
    """Return a program for each query; writes the tables first unless they are there."""
    check_scale(options.scale)
    extension()
    for module in _IMPORTED:
        import_module(module)
    folder = tables(options.data, options.scale)
    return [_program(n, query, folder, options) for n, query in enumerate(QUERIES, 1)]


SUITE = Suite(
    "tpch",
    "Derived from TPC-H, a specification of the Transaction Processing Performance Council. tpchgen-cli "
    "4.0.0 (Apache-2.0) makes the tables. DuckDB 1.5.5 (MIT) checks the answers by its own texts. This "
    "project has written the queries on data frames. Dates are timestamps, decimals are floats, and there "
    "are no refresh functions. Query 11 keeps the fraction of scale 1.",
    programs,
    needs=("pandas", "pyarrow", "duckdb", "duckdb_extension_tpch"),
)


def _program(number: int, query: Query, folder: Path, options: Options) -> Program:
    def run(client: Client, _clock: Clock) -> Any:
        with client.as_current():
            return _computed(query, folder)

    def on_threads(_clock: Clock) -> Any:
        import dask

        with dask.config.set(scheduler="threads", num_workers=options.workers):
            return _computed(query, folder)

    by_duckdb = partial(duckdb_answer, number, folder, options.workers)
    return Program(
        suite="tpch",
        name=f"q{number:02}",
        source="TPC-H 3.0.1, clause 2.4, on data frames",
        run=run,
        sizes={"scale": options.scale},
        expected=by_duckdb,
        differs=partial(differs, order=list(query.order)),
        anchors={
            "threads": on_threads,
            "pandas": lambda _: pandas_answer(query, folder),
            "duckdb": lambda _: by_duckdb(),
        },
    )


# Answers


def _computed(query: Query, folder: Path) -> Any:
    """Compute a query with Dask, as the current client or `dask.config` say."""
    import dask.dataframe as dd

    answer = query(lambda table, *columns: dd.read_parquet(folder / table, columns=list(columns)))
    return _plain(answer.compute() if hasattr(answer, "compute") else answer)


def pandas_answer(query: Query, folder: Path) -> Any:
    """Compute a query with pandas."""
    import pandas as pd

    return _plain(query(lambda table, *columns: pd.read_parquet(folder / table, columns=list(columns))))


def duckdb_answer(number: int, folder: Path, threads: int) -> Any:
    """Compute a query by DuckDB's own text."""
    import duckdb

    settings: dict[str, Any] = {"threads": threads, "autoinstall_known_extensions": False}
    with duckdb.connect(config=settings) as connection:
        connection.execute(f"LOAD {_quoted(extension())}")
        for table in TABLES:
            files = _quoted(folder / table / "*.parquet")
            connection.execute(f"CREATE VIEW {table} AS FROM read_parquet({files})")
        texts = "SELECT query FROM tpch_queries() WHERE query_nr = ?"
        (text,) = connection.execute(texts, [number]).fetchall()[0]
        rows = connection.execute(text).df()
    # The sum of no rows is NULL in SQL, and 0 of data frames.
    return float(rows.fillna(0).iat[0, 0]) if rows.shape == (1, 1) else rows


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _plain(answer: Any) -> Any:
    return answer.reset_index(drop=True) if hasattr(answer, "columns") else float(answer)


def differs(found: Any, expected: Any, order: Sequence[str] = ()) -> str:
    """Say in one line how an answer differs; "" if it does not.

    Parameters
    ----------
    found, expected : DataFrame or float
    order : sequence of str
        Columns that rows are sorted by. Rows that are equal in them may come in any order.
    """
    if not hasattr(expected, "columns"):
        return difference(found, expected) or _imprecise(found, expected)
    if not hasattr(found, "columns") or set(found.columns) != set(expected.columns):
        return difference(found, expected)
    # Floats last: those that differ by their last digit must not decide about the order.
    columns = sorted(expected.columns, key=lambda column: _is_float(expected[column]))
    rows, wanted = (frame.sort_values(columns, ignore_index=True)[columns] for frame in (found, expected))
    return _different(found[list(order)], expected[list(order)]) or _different(rows, wanted)


def _different(rows: Any, wanted: Any) -> str:
    floats = filter(lambda column: _is_float(wanted[column]), wanted)
    return difference(rows, wanted) or next(
        filter(None, (_imprecise(rows[x], wanted[x]) for x in floats)), ""
    )


def _imprecise(found: Any, expected: Any) -> str:
    values, wanted = (np.asarray(numbers, dtype=float).ravel() for numbers in (found, expected))
    excess = np.abs(values - wanted) - np.minimum(TOLERANCE * np.abs(wanted), LARGEST_DIFFERENCE)
    if not (excess > 0).any():
        return ""
    worst = int(np.nanargmax(excess))
    return f"value {worst} is {values[worst]!s}, expected {wanted[worst]!s}"


def _is_float(column: Any) -> bool:
    return bool(column.dtype.kind == "f")


# Tables


def check_scale(scale: float) -> None:
    """Raise `UsageError` if a scale is none, or needs more than this machine's memory."""
    if not (math.isfinite(scale) and scale >= LEAST_SCALE):
        raise UsageError(f"--scale must be at least {LEAST_SCALE:g}, got {scale:g}; for example --scale .1")
    check_memory("the tables of tpch", MEMORY_NBYTES * scale, "pass a smaller --scale")


def extension() -> Path:
    """Return DuckDB's extension, which has the texts of the queries."""
    import duckdb

    of_package = Path(str(import_module("duckdb_extension_tpch").__file__)).parent / "extensions"
    path = of_package / f"v{duckdb.__version__}" / "tpch.duckdb_extension"
    if not path.exists():
        made_for = ", ".join(sorted(folder.name[1:] for folder in of_package.glob("v*"))) or "another version"
        raise UsageError(
            f"duckdb must be the version of duckdb-extension-tpch ({made_for}), got {duckdb.__version__}; "
            "pip install duckdb==1.5.5 duckdb-extension-tpch==1.5.5"
        )
    return path


def tables(data: Path, scale: float) -> Path:
    """Return the folder of the tables; writes them if it is not there.

    Another process that writes the same tables is waited for. Tables that a process has left unfinished are
    deleted.

    Raises
    ------
    UsageError
        The folder is not whole, the disk is too small, or the generator is missing.
    """
    folder = data / f"tpch-{scale:g}"
    if not folder.exists():
        generator = _generator()
        _check_disk(data, scale)
        data.mkdir(parents=True, exist_ok=True)
        with _locked(data / f".{folder.name}.lock"):
            if not folder.exists():
                _write(generator, folder, scale)
    if lacking := [table for table in TABLES if not any((folder / table).glob("*.parquet"))]:
        raise UsageError(
            f"{folder} must have all tables of TPC-H, got none of {lacking[0]}; delete the folder"
        )
    return folder.resolve()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The system releases the lock if the process ends in any way.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _generator() -> str:
    found = shutil.which(GENERATOR) or shutil.which(GENERATOR, path=sysconfig.get_path("scripts"))
    if found is None:
        raise UsageError(
            f"{GENERATOR} must be installed, got no such command; pip install {GENERATOR}==4.0.0"
        )
    return found


def _check_disk(data: Path, scale: float) -> None:
    needed = DISK_NBYTES * scale
    free = shutil.disk_usage(next(at for at in (data, *data.absolute().parents) if at.exists())).free
    if needed > free:
        raise UsageError(
            f"the tables of tpch must fit onto the disk of {data} with {free / 2**30:,.1f} GiB free, got a "
            f"scale that needs {needed / 2**30:,.1f} GiB; pass a smaller --scale or another --data"
        )


def _write(generator: str, folder: Path, scale: float) -> None:
    """Write all tables; the folder appears when it is whole."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    raw = unfinished / "raw"
    for names, parts in ((LARGE_TABLES, max(FILES, math.ceil(FILES * scale))), (SMALL_TABLES, 1)):
        of_tables = ["--scale-factor", str(scale), "--tables", ",".join(names), "--parts", str(parts)]
        command = [generator, "parquet", "--quiet", *of_tables, "--output-dir", str(raw)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise UsageError(f"{GENERATOR} must write the tables of tpch, got: {why:.200}")
    for path in sorted(raw.rglob("*.parquet")):
        (unfinished / path.parent.name).mkdir(exist_ok=True)
        _convert(path, unfinished / path.parent.name / path.name)
        path.unlink()
    shutil.rmtree(raw)
    unfinished.rename(folder)


def _convert(raw: Path, target: Path) -> None:
    """Write a file with floats and timestamps in place of decimals and dates, and with usual strings."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    def usual(column: Any) -> Any:
        if pa.types.is_decimal(column.type):
            # All have two decimals. The cast alone may miss the nearest double by its last digit.
            return pc.divide(pc.round(pc.multiply(column.cast(pa.float64()), 100.0)), 100.0)
        if pa.types.is_date(column.type):
            return column.cast(pa.timestamp("us"))
        return column.cast(pa.string()) if pa.types.is_string_view(column.type) else column

    read = pq.read_table(raw)
    pq.write_table(pa.table([usual(column) for column in read.columns], names=read.column_names), target)
