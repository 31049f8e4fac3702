"""`ferroflow bench simulator`: simulations against real runs of sleeping tasks."""

from __future__ import annotations

import json

import click

from ferroflow_dask.bench.published_simulated import simulated_table
from ferroflow_dask.bench.simulated_graphs import SLEEPS
from ferroflow_dask.bench.simulator import compare, comparison_table
from ferroflow_dask.cli.simulations import graphs_option, quiet_schedulers, worker_counts
from ferroflow_dask.exceptions import UsageError


@click.command()
@graphs_option(SLEEPS, "Graph of sleeping tasks")
@click.option("--workers", default="2,4,8", show_default=True, metavar="N,N,…", help="Numbers of workers.")
@click.option(
    "--processes/--no-processes", default=True, show_default=True, help="Whether each worker is a process."
)
@click.option("--repeat", type=click.IntRange(min=2), default=3, show_default=True, help="Real runs of each.")
@click.option(
    "--published", is_flag=True, help="Simulate ferroflow's published runs of sleeping ops instead."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each comparison.")
def simulator(
    *, graphs: tuple[str, ...], workers: str, processes: bool, repeat: int, published: bool, as_json: bool
) -> None:
    """Hold the exact engine against real clusters of this machine.

    Topology and costs come from a calibration of each cluster. Nothing is fitted to a graph. Tasks sleep, so
    that they need no cores.
    """
    counts = worker_counts(workers)
    if min(counts) < 1:
        raise UsageError(f"--workers must be at least 1, got {min(counts)}")
    quiet_schedulers()
    if published:
        click.echo(simulated_table())
        return
    chosen = list(dict.fromkeys(graphs))
    told = lambda line: click.echo(line, err=True)  # noqa: E731 -- one use
    found = []
    for one in compare(chosen, counts, repeat, processes=processes, told=told):
        found.append(one)
        if as_json:
            facts = {"graph": one.graph, "workers": one.workers, "policy": one.policy}
            click.echo(json.dumps(facts | {"real_s": one.real_s, "simulated_s": one.simulated_s}))
    if not as_json:
        click.echo(comparison_table(found))
