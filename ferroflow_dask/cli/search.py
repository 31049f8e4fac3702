"""`ferroflow search`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from dask.utils import format_bytes
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ferroflow_dask.cli.cluster_options import Duration, simulated_workers
from ferroflow_dask.cli.clusters import Where, client_for
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.graph_options import GraphCommand, graph_options, graph_sizes, load_graph
from ferroflow_dask.cli.sections import cluster_option, how_option, output_option
from ferroflow_dask.cli.simulations import topology_named, topology_option
from ferroflow_dask.cli.strategies import sized
from ferroflow_dask.cost import AnalyticCost, CostModel
from ferroflow_dask.deploy.parts import WorkerCost
from ferroflow_dask.deploy.searching import auto_choices, in_processes
from ferroflow_dask.graph import Graph
from ferroflow_dask.printable import printable
from ferroflow_dask.search import ENDLESS, Found, Problem, Simulation, time_spent
from ferroflow_dask.search import search as search_for
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy import check_strategy, read_strategy, write_strategy

costs_option = how_option(
    "--costs",
    type=click.Choice(["measured", "analytic"]),
    default="measured",
    show_default=True,
    help="measured: operators with the shapes of parts run on a local worker. analytic: nominal rates.",
)


#: Budget if the user gives none [s].
_SECONDS = 10.0


@click.command(cls=GraphCommand)
@graph_options
@topology_option
@cluster_option(
    "--workers", type=simulated_workers, help="Number of workers; those of the topology if left out."
)
@costs_option
@how_option("--seconds", type=Duration(), help="Budget; 10 seconds if neither this nor --steps is given.")
@how_option("--steps", type=click.IntRange(min=1), help="Budget: strategies to simulate.")
@how_option(
    "--resume",
    metavar="FILE",
    help="Continue from the strategy in this file. The result is at least as fast.",
)
@how_option(
    "--chains", type=click.IntRange(min=1), default=3, show_default=True, help="Number of Markov chains."
)
@how_option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Run the chains in so many processes. With --steps, the result does not depend on it.",
)
@output_option("-o", "--output", metavar="FILE", help="Write the strategy to this JSON file.")
@output_option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@graph_sizes
def search(
    *,
    dag: str | None,
    model: str | None,
    seed: int,
    topology: str,
    workers: int | None,
    costs: str,
    seconds: float | None,
    steps: int | None,
    resume: str | None,
    chains: int,
    processes: int,
    output: str | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Search a fast strategy: operators in parts, and a worker for each part."""
    if output is not None:
        check_folder("--output", output)
    graph = sized(load_graph(dag, model, seed, sizes))
    resumed = None if resume is None else read_strategy(resume)
    if resumed is not None:
        check_strategy(resumed, graph)
    base = topology_named(topology)
    base = base if workers is None else base.with_workers(workers)
    machine = Machine.of_topology(base)
    if seconds is None:
        seconds = _SECONDS if steps is None else math.inf
    with costs_of(costs, graph) as cost:
        problem = Problem(graph, machine, cost)
        more = {'granularity="auto"': auto_choices(problem, base.profile())}
        if resumed is not None:
            more["resumed"] = problem.choices(resumed)
        with _progress() as watch:
            found = search_for(
                problem,
                steps=steps or ENDLESS,
                seed=seed,
                chains=chains,
                more=more,
                spent=time_spent(seconds, time.monotonic),
                watch=watch,
                run_chains=in_processes(processes) if processes > 1 else None,
            )
    if output is not None:
        write_strategy(problem.strategy(found.best.choices), output)
    rows = {**found.baselines, "found": found.best}
    if as_json:
        facts = {
            name: {"makespan_s": one.makespan_s, "bytes_moved": one.nbytes_moved}
            for name, one in rows.items()
        }
        click.echo(json.dumps({"graph": graph.name, "proposals": found.n_proposals, "strategies": facts}))
    else:
        _print(graph.name, len(machine.threads), found, rows)


@contextmanager
def costs_of(kind: str, graph: Graph) -> Iterator[CostModel]:
    """Yield the costs of a graph that the option `--costs` names."""
    if kind == "analytic":
        yield AnalyticCost()
        return
    with client_for(Where(None, 30.0, None, 1, 1, True)) as client:
        cost = WorkerCost(client)
        cost.fit(graph)
        yield cost


@contextmanager
def _progress() -> Iterator[Any]:
    """Yield a function that shows how far a search is."""
    columns = (TextColumn("{task.description}"), TextColumn("{task.fields[best]}"))
    with Progress(
        *columns, transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty()
    ) as progress:
        bar = progress.add_task("search", best="")

        def watch(n: int, best_s: float) -> None:
            if not n % 20:
                progress.update(bar, description=f"{n:,} strategies", best=f"best {best_s:.4g} s")

        yield watch


def _print(name: str, n_workers: int, found: Found, rows: dict[str, Simulation]) -> None:
    title = f"{name} on {n_workers} workers: {found.n_proposals:,} strategies simulated"
    table = Table(box=None, title=Text(printable(title)), title_justify="left")
    for column in ("strategy", "makespan [s]", "speed-up", "moved"):
        table.add_column(Text(column), justify="left" if column == "strategy" else "right")
    whole_s = rows["one device"].makespan_s
    for label, one in rows.items():
        speedup = whole_s / one.makespan_s if one.makespan_s else 1.0
        table.add_row(label, f"{one.makespan_s:.4g}", f"{speedup:.3g}", format_bytes(one.nbytes_moved))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
