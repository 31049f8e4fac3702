"""CPU time per task, and workers that a scheduler keeps busy: `measure_scheduler.py --help`."""

from __future__ import annotations

import click
from feeding import GRAPHS as FED
from feeding import feeding_table
from overhead_graphs import GRAPHS
from scheduler_cost import measure, overhead_table

from ferroflow_dask.cli.cluster_options import Count, Duration, repeat_type
from ferroflow_dask.cli.errors import OneLineErrors
from ferroflow_dask.cli.simulations import graphs_option, quiet_schedulers

_MOST_TASKS, _MOST_WORKERS = 10**6, 10**4
_MS_PER_S = 1e3
_MEMORY = "all of them are in the memory of this process"


@click.command()
@graphs_option(GRAPHS, "Graph that is scheduled")
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
@click.option("--repeat", type=repeat_type(), default=3, show_default=True, help="Repetitions.")
def overhead(graphs: list[str], tasks: int, workers: int, repeat: int) -> None:
    """Measure the scheduler's CPU time per task, in virtual time.

    Dask, Dask without stealing and the plugin take turns. Messages are not serialized.
    """
    quiet_schedulers()
    told = lambda graph, version: click.echo(f"{graph} · {version}", err=True)  # noqa: E731 -- one use
    measured = measure(graphs, tasks, workers, repeat, told)
    click.echo(overhead_table(list(measured)))


@click.command()
@graphs_option(FED, "Graph that is scheduled")
@click.option(
    "--task-ms",
    "durations",
    multiple=True,
    type=Duration("milliseconds"),
    default=(100.0,),
    show_default=True,
    help="Mean duration of a task [ms]. Repeatable.",
)
@click.option(
    "--fewest",
    type=Count(2, _MOST_WORKERS, _MEMORY),
    default=64,
    show_default=True,
    help="Number of workers to begin with.",
)
@click.option(
    "--most",
    type=Count(2, _MOST_WORKERS, _MEMORY),
    default=4096,
    show_default=True,
    help="Largest number of workers that is tried.",
)
def feeding(graphs: list[str], durations: tuple[float, ...], fewest: int, most: int) -> None:
    """Find the largest number of workers that the scheduler keeps busy for 90 % of the time.

    Runs in virtual time, in which the scheduler is charged for its CPU time. Other programs on this machine
    change the result.
    """
    quiet_schedulers()
    seconds = [ms / _MS_PER_S for ms in dict.fromkeys(durations)]
    click.echo(feeding_table(seconds, graphs, fewest, max(fewest, most)))


#: Errors are one line, as those of `ferroflow`.
main = OneLineErrors(commands={"overhead": overhead, "feeding": feeding})

if __name__ == "__main__":
    main()
