"""`ferroflow plan`."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferroflow_dask.cli.cluster_options import Duration
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.graph_options import GraphCommand, flag_of, graph_options, graph_sizes, load_graph
from ferroflow_dask.cli.progress import late_bar
from ferroflow_dask.cli.search import costs_of, costs_option
from ferroflow_dask.cli.sections import cluster_option, how_option, output_option, slurm_option
from ferroflow_dask.cli.simulations import topology_named, topology_option
from ferroflow_dask.cli.strategies import sized
from ferroflow_dask.deploy.planning import Plan, Planned
from ferroflow_dask.deploy.planning import plan as plan_for
from ferroflow_dask.deploy.slurm.sections import section_names
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.strategy import write_strategy

_BUDGET = re.compile(r"\s*(?P<number>[-+.\de]+)\s*node-(?P<unit>second|minute|hour)s?\s*")
_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}


@click.command(cls=GraphCommand)
@graph_options
@how_option("--deadline", type=Duration(), help="Meet this time, like 60s or 5m, at least cost.")
@how_option(
    "--budget",
    metavar="N-node-hours",
    help="End first within this cost, like 10node-hours or 90node-seconds.",
)
@slurm_option(
    "--section", "sections", multiple=True, help="Section of jobqueue.yaml; all if left out. Repeatable."
)
@slurm_option("--config", "config_file", metavar="FILE", help="In place of jobqueue.yaml.")
@slurm_option(
    "--speed",
    "speeds",
    multiple=True,
    metavar="SECTION=N",
    help="Workers of this section are N times faster than the costs say. Repeatable.",
)
@cluster_option(
    "--nodes", type=click.IntRange(min=1), default=8, show_default=True, help="Most nodes of a plan."
)
@topology_option
@costs_option
@how_option(
    "--steps",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Strategies to simulate for each number of nodes.",
)
@output_option("-o", "--output", metavar="FILE", help="Write the strategy to this JSON file.")
@output_option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@graph_sizes
def plan(
    *,
    dag: str | None,
    model: str | None,
    seed: int,
    deadline: float | None,
    budget: str | None,
    sections: tuple[str, ...],
    config_file: str | None,
    speeds: tuple[str, ...],
    nodes: int,
    topology: str,
    costs: str,
    steps: int,
    output: str | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Propose SLURM jobs that meet a deadline at least cost, or that end first within a budget.

    The time counts from the submission of the graph to workers that run. The wait in Slurm's queue is not
    predicted.
    """
    if (deadline is None) == (budget is None):
        raise UsageError("give one of --deadline TIME and --budget N-node-hours")
    if output is not None:
        check_folder("--output", output)
    budget_node_s = None if budget is None else _budget_node_s(budget)
    factors = _speeds(speeds)
    graph = sized(load_graph(dag, model, seed, sizes))
    of_all = sections or tuple(section_names(config_file))
    done: list[Plan] = []
    with costs_of(costs, graph) as cost, late_bar("plans", "plans", is_shown=not as_json) as update:

        def watch(one: Plan) -> None:
            done.append(one)
            update(len(done), len(of_all) * nodes)

        found = plan_for(
            graph,
            deadline_s=deadline,
            budget_node_s=budget_node_s,
            sections=of_all,
            config_file=config_file,
            topology=topology_named(topology),
            cost=cost,
            speeds=factors,
            most_nodes=nodes,
            steps=steps,
            seed=seed,
            watch=watch,
        )
    if output is not None:
        write_strategy(found.best.strategy, output)
    if as_json:
        plans = {"plan": _facts(found.best), "tried": list(map(_facts, found.tried))}
        click.echo(json.dumps({"graph": graph.name, **plans, "gpus_as_cpus": found.with_gpus}))
        return
    _print(graph.name, found)
    for section in found.with_gpus:
        click.echo(
            f"section {section} has GPUs: its workers count as CPU workers; "
            f"--speed {section}=N says that they are N times faster"
        )
    given = [("--dag", dag), ("--model", model), *((flag_of(name), value) for name, value in sizes.items())]
    words = ["ferroflow", "run"]
    words += [str(word) for option, value in given if value is not None for word in (option, value)]
    words += ["--cluster", "slurm", *(() if config_file is None else ("--config", config_file))]
    words += ["--section", found.best.section, "--jobs", str(found.best.nodes)]
    words += [] if output is None else ["--strategy", output]
    click.echo(f"proposed: {shlex.join(words)}")
    if output is None:
        click.echo("the prediction is for a strategy; -o FILE writes it, for --strategy FILE of this command")


def _budget_node_s(text: str) -> float:
    match = _BUDGET.fullmatch(text)
    try:
        number = float(match["number"]) if match is not None else float("nan")
    except ValueError:
        number = float("nan")
    if match is None or math.isnan(number):
        raise UsageError(f"--budget must be a cost like 10node-hours or 90node-seconds, got {text!r}")
    if not number > 0:
        raise UsageError(f"--budget must be above 0, got {text!r}; write it like 10node-hours")
    return number * _SECONDS[match["unit"]]


def _speeds(texts: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for text in texts:
        section, _, number = text.rpartition("=")
        try:
            found[section] = float(number)
        except ValueError:
            section = ""
        if not section:
            raise UsageError(f"--speed must be SECTION=N, got {text!r}; write it like cpu=1.5")
    return found


def _facts(one: Plan) -> dict[str, Any]:
    return {
        "section": one.section,
        "nodes": one.nodes,
        "workers": len(one.strategy.workers),
        "predicted_s": one.makespan_s,
        "low_s": one.low_s,
        "high_s": one.high_s,
        "node_s": one.cost_s,
    }


def _print(name: str, found: Planned) -> None:
    table = Table(box=None, title=Text(f"plans for {name}"), title_justify="left")
    for column in ("section", "nodes", "workers", "predicted [s]", "interval [s]", "node-seconds", ""):
        table.add_column(Text(column), justify="left" if column == "section" else "right")
    for one in found.tried:
        cells = (
            one.section,
            str(one.nodes),
            str(len(one.strategy.workers)),
            f"{one.makespan_s:.4g}",
            f"{one.low_s:.4g}–{one.high_s:.4g}",
            f"{one.cost_s:.4g}",
            "proposed" if one is found.best else "",
        )
        table.add_row(*map(Text, cells))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
