"""`ferroflow report`: tables of rows that `ferroflow bench` wrote, and the page of public runs."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ferroflow_dask.bench.public.page import page as as_page
from ferroflow_dask.bench.public.page import picture
from ferroflow_dask.bench.public.report import report as as_markdown
from ferroflow_dask.bench.public.summary import read_summary, summarize
from ferroflow_dask.bench.rows import read_rows
from ferroflow_dask.bench.schema import schema_table
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.printable import printable
from ferroflow_dask.whole_files import write_text

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("files", nargs=-1, type=_FILE, metavar="FILE…")
@click.option("--schema", "is_schema_asked", is_flag=True, help="Print the meaning of a row's fields.")
@click.option(
    "--page",
    type=_FILE,
    help="Write a page of public runs, with its picture (.svg) and summary (.json) beside it. "
    "FILE may be such a summary.",
)
def report(files: tuple[Path, ...], is_schema_asked: bool, page: Path | None) -> None:
    """Print the tables of measurements, with geometric means and losses."""
    if is_schema_asked:
        if given := [*map(str, files), *(["--page"] if page else [])]:
            raise UsageError(f"--schema reads and writes no file; leave out {given[0]}")
        click.echo(schema_table())
        return
    if not files:
        raise UsageError("name a file that 'ferroflow bench' wrote")
    if page is None:
        click.echo(printable(as_markdown(read_rows(files))))
        return
    _write_page(files, page)


def _write_page(files: tuple[Path, ...], page: Path) -> None:
    """Write the page, its picture and its summary."""
    check_folder("--page", page)
    if page.suffix != ".md":
        raise UsageError(f"--page must end in .md, got {str(page)!r}")
    if files[0].suffix == ".json":
        summary = read_summary(files[0])
    else:
        summary = summarize(read_rows(files), time.strftime("%Y-%m-%d"))
    drawing = page.with_suffix(".svg")
    texts = {
        page.with_suffix(".json"): summary.text(),
        drawing: picture(summary),
        page: as_page(summary, drawing.name),
    }
    try:
        for path, text in texts.items():
            write_text(path, text)
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written: {error.strerror}") from error
    click.echo(f"wrote {', '.join(map(str, texts))}")
