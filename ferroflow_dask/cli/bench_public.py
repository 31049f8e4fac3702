"""`ferroflow bench public`: programs of others under stock Dask and under the plugin."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ferroflow_dask.bench.public import NAMES, OF_CHECKOUTS, chosen_suites
from ferroflow_dask.bench.public.base import Options, programs_of
from ferroflow_dask.bench.public.host import Place
from ferroflow_dask.bench.public.page import page
from ferroflow_dask.bench.public.sides import FEWER, ROUNDS, Rules
from ferroflow_dask.bench.public.summary import summarize
from ferroflow_dask.cli.bench_runs import rows_of, rows_option, rule_options
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.simulations import quiet_schedulers
from ferroflow_dask.exceptions import UsageError


class _Checkout(click.ParamType[tuple[str, Path]]):
    """``NAME=PATH`` of a working tree."""

    name = "checkout"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Path]:
        name, is_given, path = str(value).partition("=")
        if not (is_given and name in OF_CHECKOUTS):
            known = " or ".join(f"{one}=PATH" for one in OF_CHECKOUTS)
            self.fail(f"must be {known}, got {value!r}", param, ctx)
        if not Path(path).is_dir():
            self.fail(f"{name} must be a folder, got {path!r}", param, ctx)
        return name, Path(path).resolve()


@click.command()
@click.argument("suites", nargs=-1, metavar="[SUITE]…")
@click.option("--quick/--full", "is_quick", default=True, help="Small sizes and three rounds, or all.")
@click.option(
    "--scale",
    type=click.FloatRange(min=0, min_open=True),
    default=0.1,
    show_default=True,
    help="Scale factor of TPC-H [GB].",
)
@click.option(
    "--checkout",
    "checkouts",
    type=_Checkout(),
    multiple=True,
    help="Working tree of a source without a package: coiled=PATH or taps=PATH. Repeatable.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Workers of each cluster; each has one thread.",
)
@click.option("--program", "programs", multiple=True, help="Run only programs of this name. Repeatable.")
@click.option("--rounds", type=click.IntRange(min=1), help=f"Rounds. [default: {FEWER}; --full: {ROUNDS}]")
@rule_options
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=Options().data,
    show_default=True,
    help="Folder for generated data, which is kept.",
)
@rows_option("public.jsonl")
def public(
    *,
    suites: tuple[str, ...],
    is_quick: bool,
    scale: float,
    checkouts: tuple[tuple[str, Path], ...],
    workers: int,
    memory_limit: str,
    place: str,
    programs: tuple[str, ...],
    rounds: int | None,
    seed: int,
    run_timeout: float,
    data: Path,
    file: Path,
) -> None:
    """Run programs that others wrote under stock Dask, under stock Dask again and under the plugin.

    The suites are tasks, shapes, workflows, tpch, coiled and taps. Without a name, all that can run are run.
    """
    check_folder("--rows", file)
    quiet_schedulers()
    options = Options(scale, dict(checkouts), workers, not is_quick, data.resolve(), programs)
    chosen = chosen_suites(suites, options, lambda line: click.echo(line, err=True))
    if not any(programs_of(suite, options) for suite in chosen):
        raise UsageError(f"no suite has a program {programs[0]!r}; the suites are: {', '.join(NAMES)}")
    rules = Rules(
        Place(workers, 1, memory_limit, place == "separate"),
        rounds or (FEWER if is_quick else ROUNDS),
        is_new_for_each=not is_quick,
        timeout_s=run_timeout,
        seed=seed,
    )
    rows = rows_of(chosen, options, rules, file)
    click.echo(page(summarize(rows, time.strftime("%Y-%m-%d")), ""))
    click.echo(f"write the page: ferroflow report {file} --page PAGE.md", err=True)
