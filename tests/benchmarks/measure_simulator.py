"""Simulations against real runs of sleeping tasks: `python tests/benchmarks/measure_simulator.py --help`."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from replayed import PROGRAMS, compare_replays, replay_table
from simulated_runs import compare, comparison_table

from ferroflow_dask.bench.simulated_graphs import SLEEPS
from ferroflow_dask.cli.cluster_options import check_workers, repeat_type
from ferroflow_dask.cli.errors import OneLineErrors
from ferroflow_dask.cli.simulations import graphs_option, quiet_schedulers, worker_counts


@click.command()
@graphs_option(SLEEPS, "Graph of sleeping tasks")
@click.option("--workers", default="2,4,8", show_default=True, metavar="N,N,…", help="Numbers of workers.")
@click.option(
    "--processes/--no-processes", default=True, show_default=True, help="Whether each worker is a process."
)
@click.option("--repeat", type=repeat_type(2), default=3, show_default=True, help="Real runs of each.")
@click.option(
    "--program",
    "programs",
    multiple=True,
    type=click.Choice(list(PROGRAMS)),
    help="Record this program instead, and replay it under both policies. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each comparison.")
def simulator(
    *,
    graphs: list[str],
    workers: str,
    processes: bool,
    repeat: int,
    programs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Hold the exact engine against real clusters of this machine.

    Topology and costs come from a calibration of each cluster. Nothing is fitted to a graph. Tasks sleep, so
    that they need no cores.
    """
    counts = worker_counts(workers)
    for n in counts:
        check_workers(n)
    quiet_schedulers()
    chosen = list(dict.fromkeys(programs or graphs))
    options: dict[str, Any] = {"processes": processes, "progress": lambda line: click.echo(line, err=True)}
    found = []
    pairs = (
        compare_replays(chosen, counts, repeat, **options)
        if programs
        else (("", one) for one in compare(chosen, counts, repeat, **options))
    )
    for recorded, one in pairs:
        found.append((recorded, one))
        if as_json:
            facts: dict[str, Any] = {"recorded": recorded} if recorded else {}
            facts |= {"graph": one.graph, "workers": one.workers, "policy": one.policy}
            click.echo(json.dumps(facts | {"real_s": one.real_s, "simulated_s": one.simulated_s}))
    if not as_json:
        click.echo(replay_table(found) if programs else comparison_table([one for _, one in found]))


#: Errors are one line, as those of `ferroflow`.
main = OneLineErrors(commands={simulator.name: simulator})

if __name__ == "__main__":
    main([str(simulator.name), *sys.argv[1:]])
