"""Make runs on a terminal: rows in a file, from which a command that was ended goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ferroflow_dask.bench.machine import stamp
from ferroflow_dask.bench.public.base import SKIPPED, Options, Suite, programs_of
from ferroflow_dask.bench.public.host import AUTO
from ferroflow_dask.bench.public.runner import run_suites
from ferroflow_dask.bench.public.sides import Rules
from ferroflow_dask.bench.rows import Rows, append_row, read_rows
from ferroflow_dask.bench.schema import OK, BenchRecord, identity_of
from ferroflow_dask.cli.cluster_options import Duration
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
        help="File to which each run adds a row; runs that it has already are left out, broken ones are "
        "made again.",
    )


def rule_options(function: F) -> F:
    """Add the options of all commands that compare sides."""
    options = (
        click.option(
            "--memory-limit",
            default=AUTO,
            show_default=f"{AUTO}; coiled: 1GiB",
            help="Of each worker, as Dask takes it.",
        ),
        click.option(
            "--place",
            type=click.Choice(["local", "separate"]),
            default="local",
            show_default=True,
            help="Scheduler in the process of the client, or in one of its own.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Of data and orders.",
        ),
        click.option(
            "--run-timeout",
            type=Duration(),
            default=300.0,
            show_default=True,
            help="How long a run may take before it counts as hung [s].",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def rows_of(suites: Sequence[Suite], options: Options, rules: Rules, file: Path) -> Rows:
    """Make the runs that a file does not have, and add them to it; return all its rows."""
    programs = [one for suite in suites for one in programs_of(suite, options)]
    present = read_rows([file], may_be_empty=True) if file.exists() else Rows(())
    _check_setting(present, file)
    done = {identity_of(row) for row in present if row.status == OK}
    # These are tried again: what they lacked may be there by now.
    skipped = {(identity_of(row), row.status) for row in present if row.status.startswith(SKIPPED)}
    n_runs = rules.n_runs * sum(not one.skipped for one in programs)
    with _progress(max(0, n_runs - len(done))) as (step, advance):
        n_made = 0
        try:
            for row in run_suites(suites, options, rules, done=done, on_step=step):
                if (identity_of(row), row.status) not in skipped:
                    append_row(file, row)
                n_made += row.status == OK
                advance(row)
        except KeyboardInterrupt as error:
            progress = f"; {len(done) + n_made} of {n_runs} runs are in {file}; the same command goes on"
            raise Interrupted(error, progress) from None
    return read_rows([file])


def _check_setting(rows: Sequence[BenchRecord], file: Path) -> None:
    """Raise `UsageError` if rows were measured elsewhere, or with other versions."""
    here = stamp()
    if any({name: getattr(row, name) for name in here} != here for row in rows):
        raise UsageError(
            f"{file} has runs from another commit, machine or set of versions, which cannot "
            "be gone on with; give another file with --rows"
        )


#: Take a line about the next run, and a run that was made.
_Shown = tuple[Callable[[str], object], Callable[[BenchRecord], object]]


@contextmanager
def _progress(n_runs: int) -> Iterator[_Shown]:
    """Show a bar with the time left on a terminal, else a line for each run, both on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda _: None), lambda row: click.echo(_line(row), err=True)
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
        yield lambda text: progress.update(bar, description=text), lambda _: progress.advance(bar)


def _line(row: BenchRecord) -> str:
    lowering = f" ({row.lowering})" if row.lowering else ""
    outcome = f"{row.makespan_s:.3f} s" if row.status == OK else row.status
    return f"{row.workload} · {row.policy}{lowering} · {row.costs} · run {row.repetition + 1}: {outcome}"
