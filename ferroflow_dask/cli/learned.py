"""`ferroflow learned`: the file in which the durations and sizes that schedulers learned are kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from dask.utils import format_bytes, format_time
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferroflow_dask.cli.errors import OneLineErrors
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.printable import printable
from ferroflow_dask.scheduler.learned_file import read_numbers

_FILE = click.Path(path_type=Path)


@click.group(cls=OneLineErrors)
def learned() -> None:
    """Show or remove the file of the setting `ferroflow.learned`."""


@learned.command()
@click.argument("path", type=_FILE)
@click.option("--prefix", metavar="NAME", help="Show this task prefix only.")
def show(path: Path, prefix: str | None) -> None:
    """Print the learned durations and result sizes of task prefixes, the longest first.

    A prefix has a line for each class of sizes: that of inputs and of the result, if it is declared.
    """
    numbers = read_numbers(path)
    prefixes = numbers["prefixes"]
    if prefix is not None:
        if prefix not in prefixes:
            raise UsageError(
                f"--prefix must be one of the {len(prefixes):,} in {str(path)!r}, got {prefix!r}"
            )
        prefixes = {prefix: prefixes[prefix]}
    rows = [(name, one) for name, sizes in prefixes.items() for one in sizes]
    rows.sort(key=lambda row: (-row[1]["mean_s"], row[0], row[1]["size_nbytes"]))
    table = Table("prefix", "size", "n", "mean duration", "mean result", box=None)
    for name, one in rows:
        size, nbytes = (format_bytes(int(one[field])) for field in ("size_nbytes", "mean_nbytes"))
        cells = (printable(name), size, f"{one['n_sized']:,}", format_time(one["mean_s"]), nbytes)
        table.add_row(*map(Text, cells))  # no markup: names may have brackets
    click.echo(" · ".join(_summary(numbers)))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _summary(numbers: dict[str, Any]) -> Iterator[str]:
    yield f"{len(numbers['prefixes']):,} prefixes"
    yield f"{len(numbers['kinds_s']):,} operator kinds"
    yield f"{len(numbers['separate']):,} prefixes never bundled"
    for name in ("round_trip_s", "pause_s"):
        if numbers[name] is not None:
            yield f"{name.removesuffix('_s').replace('_', ' ')} {format_time(numbers[name])}"


@learned.command()
@click.argument("path", type=_FILE)
def clear(path: Path) -> None:
    """Remove a file of learned numbers; a file of another format stays."""
    numbers = read_numbers(path)
    path.unlink()
    click.echo(f"removed {printable(str(path))}: {len(numbers['prefixes']):,} prefixes")
