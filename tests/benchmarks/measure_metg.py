"""Minimum effective task granularity of Task Bench: `python tests/benchmarks/measure_metg.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from metg import metg_from_rows, metg_table

from ferroflow_dask.bench.public.base import Options
from ferroflow_dask.bench.public.host import Place
from ferroflow_dask.bench.public.policies import sides_of
from ferroflow_dask.bench.public.sides import Rules
from ferroflow_dask.bench.public.workloads import suites_of
from ferroflow_dask.bench.workloads.task_bench import TASK_BENCH
from ferroflow_dask.cli.bench_runs import rows_of, rows_option
from ferroflow_dask.cli.cluster_options import Duration, count_options, repeat_type
from ferroflow_dask.cli.errors import OneLineErrors

_PATTERNS = {workload.name: workload for workload in TASK_BENCH}
#: Task durations of a curve [ms], longest first.
_TASK_MS = (100.0, 50.0, 20.0, 10.0, 5.0, 2.0, 1.0)


@click.command()
@click.option("--pattern", type=click.Choice(list(_PATTERNS)), default="stencil_1d", show_default=True)
@click.option("--width", type=click.IntRange(min=1), default=16, show_default=True, help="Points of a step.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True)
@click.option(
    "--task-ms",
    "durations",
    multiple=True,
    type=Duration("milliseconds"),
    default=_TASK_MS,
    show_default=True,
    help="Duration of a task [ms]. Repeatable.",
)
@click.option("--policy", "names", multiple=True, default=("dask", "ferroflow"), show_default=True)
@click.option("--repeat", type=repeat_type(), default=3, show_default=True, help="Rounds of each size.")
@count_options
@rows_option("ferroflow-metg.jsonl")
def curves(
    *,
    pattern: str,
    width: int,
    steps: int,
    durations: tuple[float, ...],
    names: tuple[str, ...],
    repeat: int,
    workers: int,
    threads: int,
    file: Path,
) -> None:
    """Measure the minimum effective task granularity, METG(50 %), of a Task Bench pattern."""
    workload = _PATTERNS[pattern]
    sizes = [
        workload.arguments({"width": width, "steps": steps, "task_ms": ms}) for ms in dict.fromkeys(durations)
    ]
    suites = suites_of([(pattern, own) for own in sizes])
    rules = Rules(Place(workers, threads), repeat, is_new_for_each=False, sides=sides_of(names))
    rows = rows_of(suites, Options(workers=workers), rules, file)
    click.echo(metg_table(metg_from_rows(rows)))


#: Errors are one line, as those of `ferroflow`.
main = OneLineErrors(commands={"curves": curves})

if __name__ == "__main__":
    main(["curves", *sys.argv[1:]])
