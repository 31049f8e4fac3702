"""`ferroflow bench overhead`: CPU time per task of the scheduler, with and without the plugin."""

from __future__ import annotations

import logging

import click

from ferroflow_dask.bench.overhead import measure, overhead_table
from ferroflow_dask.bench.overhead_graphs import GRAPHS
from ferroflow_dask.cli.cluster_options import Count

_MOST_TASKS, _MOST_WORKERS = 10**6, 10**4
_MEMORY = "all of them are in the memory of this process"


@click.command()
@click.option(
    "--graph",
    "graphs",
    multiple=True,
    type=click.Choice(list(GRAPHS)),
    default=list(GRAPHS),
    help="Graph that is scheduled; all if left out. Repeatable.",
)
@click.option(
    "--tasks",
    type=Count(100, _MOST_TASKS, _MEMORY),
    default=2000,
    show_default=True,
    help="Approximate size of each graph.",
)
@click.option(
    "--workers",
    type=Count(1, _MOST_WORKERS, _MEMORY),
    default=8,
    show_default=True,
    help="Workers in virtual time.",
)
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Repetitions.")
def overhead(graphs: tuple[str, ...], tasks: int, workers: int, repeat: int) -> None:
    """Measure the scheduler's CPU time per task, in virtual time.

    Dask, Dask without stealing and the plugin take turns. Messages are not serialized.
    """
    logging.getLogger("distributed").setLevel(logging.WARNING)  # each cluster says that it starts
    told = lambda graph, version: click.echo(f"{graph} · {version}", err=True)  # noqa: E731 -- one use
    measured = measure(list(dict.fromkeys(graphs)), tasks, workers, repeat, told)
    click.echo(overhead_table(list(measured)))
