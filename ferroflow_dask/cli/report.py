"""`ferroflow report`: tables and plots of what `ferroflow bench` wrote."""

from __future__ import annotations

from pathlib import Path

import click

from ferroflow_dask.bench.plots import write_html, write_png
from ferroflow_dask.bench.report import report as as_markdown
from ferroflow_dask.bench.rows import read_rows
from ferroflow_dask.bench.schema import schema_table
from ferroflow_dask.bench.workloads import default_sizes
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.printable import printable

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("files", nargs=-1, type=_FILE, metavar="FILE…")
@click.option("--schema", "is_schema_asked", is_flag=True, help="Print what a row's fields mean.")
@click.option("--html", type=_FILE, help="Also write the plots to this page.")
@click.option("--png", type=_FILE, help="Also write the plots to this picture, by selenium and a browser.")
def report(files: tuple[Path, ...], is_schema_asked: bool, html: Path | None, png: Path | None) -> None:
    """Print the tables of measurements, with geometric means, gains and regressions."""
    plots = {"html": html, "png": png}
    if is_schema_asked:
        if given := [*map(str, files), *(f"--{name}" for name, value in plots.items() if value)]:
            raise UsageError(f"--schema reads and writes no file; leave out {given[0]}")
        click.echo(schema_table())
        return
    if not files:
        raise UsageError("name a file that 'ferroflow bench' wrote")
    for name, value in plots.items():
        if value is not None:
            check_folder(f"--{name}", value)
    rows = read_rows(files)
    click.echo(printable(as_markdown(rows, defaults=default_sizes())))
    if html is not None:
        write_html(rows, html, default_sizes())
    if png is not None:
        write_png(rows, png, default_sizes())
