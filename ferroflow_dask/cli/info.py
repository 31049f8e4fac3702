"""`ferroflow info`."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferroflow_dask.cli.cluster_options import simulated_workers, threads_option
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.graph_options import GraphCommand, graph_options, graph_sizes, load_graph
from ferroflow_dask.cli.sections import cluster_option, device_option, output_option
from ferroflow_dask.cli.strategies import as_facts, as_table, shown
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.cost import AnalyticCost, estimate, flops
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Graph, levels
from ferroflow_dask.graph.analysis import is_large_product
from ferroflow_dask.graph.files import write_graph
from ferroflow_dask.graph.model_files import is_url
from ferroflow_dask.graph.render import kind_counts, to_dot, write
from ferroflow_dask.kernels import provider_counts
from ferroflow_dask.kernels.session import parts_of
from ferroflow_dask.lowering import predictions_of
from ferroflow_dask.printable import printable
from ferroflow_dask.strategy.report import drawn

#: Elements of the result [-]: ferroflow's own default.
_GPU_MATMUL_THRESHOLD = 262_144


@click.command(cls=GraphCommand)
@graph_options
@device_option(
    "--gpu-matmul-threshold",
    type=click.IntRange(min=0),
    default=_GPU_MATMUL_THRESHOLD,
    show_default=True,
    metavar="N",
    help="Count the matrix products that `run --gpu-matmul-threshold N` would send to GPUs.",
)
@cluster_option(
    "--workers",
    type=simulated_workers,
    default=4,
    show_default=True,
    help="Workers of the cluster that is predicted for; none is started.",
)
@threads_option
@output_option(
    "--dot",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Draw the graph too: .dot, or .svg, .png, .pdf with Graphviz.",
)
@output_option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    metavar="FILE.json",
    help="Write the graph as JSON, for --dag. Large constants of a built-in graph go to FILE.npz.",
)
@output_option(
    "--strategy",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Show what a strategy does with each operator, the bytes that move and the predicted time. "
    "--dot draws it.",
)
@output_option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@graph_sizes
def info(
    *,
    dag: str | None,
    model: str | None,
    seed: int,
    gpu_matmul_threshold: int,
    workers: int,
    threads: int,
    dot: str | None,
    output: str | None,
    strategy: str | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Show what a graph consists of and which kernels would run it."""
    if dot is not None:
        check_folder("--dot", dot)
    if output is not None:
        check_folder("--output", output)
        if not output.endswith(".json"):
            raise UsageError(f"--output {output!r} must end in .json")
    graph = load_graph(dag, model, seed, sizes)
    routing, unsupported = provider_counts(graph)
    large = sum(is_large_product(graph, op, gpu_matmul_threshold) for op in graph.live_ops)
    constants = [source.spec for source in graph.sources if not source.is_input]
    work = [flops(op, graph) for op in graph.live_ops]
    facts: dict[str, Any] = {
        "graph": graph.name,
        "nodes": graph.n_nodes,
        "sources": len(graph.sources),
        "ops": len(graph.live_ops),
        "edges": graph.n_edges,
        "levels": max(levels(graph).values(), default=0),
        "kinds": kind_counts(graph),
        "parameters": sum(spec.size or 0 for spec in constants),
        "weight_bytes": sum(spec.nbytes or 0 for spec in constants),
        "flops": None if None in work else sum(operations or 0.0 for operations in work),
        "inputs": {name: str(spec) for name, spec in graph.inputs.items()},
        "defaults": {name: str(spec) for name, spec in graph.defaults.items()},
        "outputs": {name: str(graph.spec(name)) for name in graph.outputs},
        "unsupported": dict(unsupported),
        "routing": dict(routing),
        "parts": [str(part) for part in parts_of(graph)] if model is not None and not unsupported else [],
        "gpu_sized_matmuls": large,
        "predicted_s": {} if unsupported else _predicted_s(graph, ClusterProfile((threads,) * workers)),
    }
    found = None if strategy is None else shown(graph, strategy, threads)
    if found is not None:
        facts["strategy"] = as_facts(found)
    if dot is not None:
        marks = None if found is None else drawn(found.report, found.strategy.workers)
        write(to_dot(graph, marks), dot)
    if output is not None:
        has_local_weights = model is not None and not is_url(model)
        write_graph(graph, output, model if has_local_weights else None)
    if as_json:
        click.echo(json.dumps(facts))
        return
    table = Table(show_header=False, box=None)
    predicted_s = facts.pop("predicted_s")
    facts.pop("strategy", None)
    for name, fact in facts.items():
        table.add_row(
            name.replace("_", " "), Text(printable(_shown(fact)))
        )  # no markup: shapes have brackets
    told = ", ".join(f"{granularity} {seconds:.3g} s" for granularity, seconds in predicted_s.items())
    told = f"{told} (at nominal rates)" if told else "nothing: it cannot run"
    table.add_row(f"predicted on {workers} × {threads}", Text(told))
    Console().print(table)
    if found is not None:
        Console().print(as_table(found))


def _predicted_s(graph: Graph, cluster: ClusterProfile) -> dict[str, float]:
    """Return the makespan to expect under each granularity, on a cluster that nobody has measured [s]."""
    costs = estimate(graph, AnalyticCost(cluster.flop_rate, cluster.memory_bandwidth))
    found = predictions_of(graph, costs, cluster)
    return {granularity: prediction.makespan_s for granularity, prediction in found.items()}


def _shown(fact: Any, limit: int = 6) -> str:
    if fact is None:
        return "unknown: they depend on the shapes of inputs"
    if isinstance(fact, int | float):
        return f"{fact:,.0f}"
    if isinstance(fact, list):
        return "; ".join(fact[:limit] + ["…"] * (len(fact) > limit)) or "none"
    if not isinstance(fact, dict):
        return str(fact)
    shown = [f"{name} {value}" for name, value in list(fact.items())[:limit]]
    return ", ".join(shown + ["…"] * (len(fact) > limit)) or "none"
