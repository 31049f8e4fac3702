"""Make the runs of a plan on a terminal: rows in a file, from which a command that was ended goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ferroflow_dask.bench.machine import stamp
from ferroflow_dask.bench.plan import Plan
from ferroflow_dask.bench.rows import Rows, append_row, read_rows
from ferroflow_dask.bench.schema import OK, BenchRecord, identity_of
from ferroflow_dask.bench.session import Start
from ferroflow_dask.bench.suite import run_plan
from ferroflow_dask.cli.errors import Interrupted
from ferroflow_dask.cli.progress import Rate
from ferroflow_dask.exceptions import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def rows_option(default: str) -> Callable[[F], F]:
    """Return the option for the file of rows."""
    return click.option(
        "--rows",
        "file",
        type=click.Path(dir_okay=False, path_type=Path),
        default=Path(default),
        show_default=True,
        help="File to which each run adds a row; runs that it has already are left out.",
    )


def rows_of(
    plan: Plan,
    file: Path,
    *,
    start: Start | None = None,
    timeout_s: float = 300.0,
    retries_broken: bool = False,
) -> Rows:
    """Make the runs of a plan that a file does not have, and add them to it; return all rows of the plan.

    Parameters
    ----------
    plan : Plan
    file : Path
    start, timeout_s : optional
        As in `run_plan`.
    retries_broken : bool, optional
        Whether runs are made again that the file has as broken.
    """
    wanted = {plan.identity(case, i) for case in plan.cases for i in range(plan.repetitions)}
    present = read_rows([file], may_be_empty=True) if file.exists() else ()
    rows = [row for row in present if identity_of(row) in wanted]
    check_setting(rows, file)
    done = {identity_of(row) for row in rows if row.status == OK or not retries_broken}
    with progress(len(wanted) - len(done)) as (tell, advance, warn):
        try:
            for row in run_plan(
                plan, done=done, timeout_s=timeout_s, start=start, on_step=tell, on_problem=warn
            ):
                append_row(file, row)
                done.add(identity_of(row))
                advance(row)
        except KeyboardInterrupt as error:
            raise Interrupted(
                error, f"; {len(done)} of {len(wanted)} runs are in {file}; the same command goes on"
            ) from None
    written = read_rows([file])
    return Rows([row for row in written if identity_of(row) in wanted], written.notes)


def check_setting(rows: Sequence[BenchRecord], file: Path) -> None:
    """Raise `UsageError` if rows were measured elsewhere, or with other versions."""
    here = stamp()
    if any({name: getattr(row, name) for name in here} != here for row in rows):
        raise UsageError(
            f"{file} has runs of this plan from another commit, machine or set of versions, which cannot "
            "be gone on with; give another file with --rows"
        )


#: Told what is about to run, of a run that was made, and of what went wrong between runs.
_Told = tuple[Callable[[str], object], Callable[[BenchRecord], object], Callable[[str], object]]


@contextmanager
def progress(n_runs: int) -> Iterator[_Told]:
    """Show a bar with the time left on a terminal, else a line for each run, both on stderr."""
    console = Console(stderr=True)
    warn = partial(click.echo, err=True)
    if not console.is_terminal:
        yield (lambda _: None), lambda row: click.echo(_line(row), err=True), warn
        return
    columns = (
        TextColumn("{task.description:40.40}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate("runs"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=n_runs)
        # Rich has what goes to stderr meanwhile above the bar.
        yield lambda text: progress.update(bar, description=text), lambda _: progress.advance(bar), warn


def _line(row: BenchRecord) -> str:
    lowering = f" ({row.lowering})" if row.lowering else ""
    outcome = f"{row.makespan_s:.3f} s" if row.status == OK else row.status
    return f"{row.workload} · {row.policy}{lowering} · {row.costs} · run {row.repetition + 1}: {outcome}"
