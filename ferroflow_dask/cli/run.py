"""`ferroflow run`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from distributed import Client

from ferroflow_dask.array_files import read_inputs, write_outputs
from ferroflow_dask.bench import Run, RunRecord, run_on_cluster, run_sequentially, warm_up
from ferroflow_dask.bench.markdown import count
from ferroflow_dask.bench.progress import progress_bar
from ferroflow_dask.cli.batches import in_batches, run_batches
from ferroflow_dask.cli.cluster_options import connect_timeout, size_options
from ferroflow_dask.cli.clusters import PLAIN_POLICIES, client_for, policy_installed
from ferroflow_dask.cli.graph_options import graph_options, load_graph
from ferroflow_dask.cost import AnalyticCost, ClusterProfile, MeasuredCost
from ferroflow_dask.deploy import load_durations, profile_of, profiles_file, save_durations
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import check_inputs, random_inputs
from ferroflow_dask.kernels import check_supported
from ferroflow_dask.lowering import place
from ferroflow_dask.policy import policy_names


@click.command()
@graph_options
@click.option(
    "--policy",
    default="ferroflow",
    show_default=True,
    help="sequential, dask, static, random, ring, ferroflow.",
)
@size_options
@click.option(
    "--connect", "address", metavar="ADDRESS", help="Use a running cluster, like tcp://10.0.0.1:8786."
)
@connect_timeout
@click.option(
    "--bundle/--no-bundle",
    "is_bundled",
    default=None,
    help="Ship short ops together, cut for this cluster; on for the policy ferroflow unless told otherwise.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    metavar="ROWS",
    help="Compute the inputs in batches of so many rows, with the whole model in each worker.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, or auto (which is cpu without a GPU).")
@click.option(
    "--steal-threshold", type=click.IntRange(min=1), help="Waiting tasks that a victim must have, at first."
)
@click.option("--no-adaptive-threshold", is_flag=True, help="Keep the steal threshold as it is.")
@click.option(
    "--input",
    "input_files",
    multiple=True,
    metavar="[NAME=]FILE",
    help="A .npy file for an input, or a .npz.",
)
@click.option(
    "--output", type=click.Path(dir_okay=False), metavar="FILE", help="Write the outputs to this .npz file."
)
@click.option(
    "--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Runs; the median is shown."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def run(
    *,
    dag: str | None,
    model: str | None,
    seed: int,
    policy: str,
    workers: int,
    threads: int,
    processes: bool,
    address: str | None,
    timeout: float,
    is_bundled: bool | None,
    batch: int | None,
    device: str,
    steal_threshold: int | None,
    no_adaptive_threshold: bool,
    input_files: tuple[str, ...],
    output: str | None,
    repeat: int,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Run a built-in graph or an ONNX model and say how fast it was."""
    if policy not in (known := (*PLAIN_POLICIES, *policy_names())):
        raise UsageError(f"unknown policy {policy!r}; choose one of: {', '.join(known)}")
    if device not in ("cpu", "auto"):
        raise UsageError(f"--device {device!r} is not available; choose one of: auto, cpu")
    if output is not None and not output.endswith(".npz"):
        raise UsageError(f"--output {output!r} must end in .npz")
    if output is not None and not Path(output).parent.is_dir():
        raise UsageError(
            f"--output {output!r} cannot be written: there is no folder {str(Path(output).parent)!r}"
        )
    if not timeout < float("inf"):
        raise UsageError(f"--timeout is {timeout}; it must be a number of seconds")
    options = _policy_options(policy, seed, steal_threshold, no_adaptive_threshold)
    graph = load_graph(dag, model, seed, sizes)
    given = read_inputs(graph, input_files) if input_files else None
    if batch is not None:
        if policy == "sequential":
            raise UsageError("--batch spreads batches over workers; --policy sequential has none")
        check_supported(graph)
        arrays = in_batches(graph, given, batch, workers * threads, seed)
        with (
            client_for(address, timeout, workers, threads, processes) as client,
            policy_installed(client, policy, options),
        ):
            found = run_batches(graph, arrays, client, repeat=repeat, as_json=as_json)
        _finish(output, found, graph.inputs and not input_files, seed)
        return
    inputs = random_inputs(graph, seed) if given is None else given
    # What cannot run is refused before a cluster is started for it.
    check_inputs(graph, inputs)
    check_supported(graph)
    runs = []
    if policy == "sequential":
        runs = [run_sequentially(graph, inputs, seed=seed) for _ in range(repeat)]
    else:
        with (
            client_for(address, timeout, workers, threads, processes) as client,
            policy_installed(client, policy, options),
        ):
            cluster = (
                _profile(client) if (policy == "ferroflow" if is_bundled is None else is_bundled) else None
            )
            costs = _costs(client, cluster)
            warm_up(client, graph)
            placed = place(graph, client)
            for _ in range(repeat):
                with progress_bar(client, is_shown=not as_json) as watch:
                    runs.append(
                        run_on_cluster(
                            placed,
                            inputs,
                            client,
                            policy=policy,
                            processes=None if address else processes,
                            seed=seed,
                            cluster=cluster,
                            costs=costs,
                            on_submit=watch,
                        )
                    )
                costs.observe(graph, runs[-1].seconds)
            save_durations(client, costs.as_dict())
            del placed
    _report(runs, as_json)
    _finish(output, runs[-1].outputs, graph.inputs and not input_files, seed)


def _finish(output: str | None, outputs: Mapping[str, Any], is_random: object, seed: int) -> None:
    if is_random:
        click.echo(f"inputs were drawn at random (seed {seed}); give your own with --input", err=True)
    if output is not None:
        write_outputs(output, outputs)


def _profile(client: Client) -> ClusterProfile:
    profile, is_new = profile_of(client)
    if is_new:
        click.echo(
            f"measured this cluster, to cut the graph for it; kept in {profiles_file()}, and measured "
            "anew by: ferroflow calibrate",
            err=True,
        )
    return profile


def _costs(client: Client, cluster: ClusterProfile | None) -> MeasuredCost:
    """Return costs that are learned from run to run, and taken from shapes until then."""
    rates = () if cluster is None else (cluster.flop_rate, cluster.memory_bandwidth)
    return MeasuredCost(AnalyticCost(*rates), load_durations(client))


def _policy_options(policy: str, seed: int, threshold: int | None, is_fixed: bool) -> dict[str, Any]:
    if policy == "random":
        return {"seed": seed}
    options: dict[str, Any] = {}
    if threshold is not None:
        options["threshold"] = threshold
    if is_fixed:
        options["adaptive"] = False
    if options and policy != "ferroflow":
        raise UsageError(
            f"--steal-threshold and --no-adaptive-threshold are of policy 'ferroflow', not {policy!r}"
        )
    return options


def _report(runs: list[Run], as_json: bool) -> None:
    makespans = [run.record.makespan_s for run in runs]
    # With an even number of runs the lower of the two in the middle, so that it is one that happened.
    record = runs[makespans.index(statistics.median_low(makespans))].record
    if as_json:
        more = {"makespans_s": makespans} if len(runs) > 1 else {}
        click.echo(json.dumps({**record.as_dict(), **more}))
        return
    spread = f", median of {len(runs)} ({min(makespans):.3f}–{max(makespans):.3f} s)" if len(runs) > 1 else ""
    click.echo(f"{record.dag} · {record.policy} · {_cluster(record)}: {_result(record)}{spread}")
    if record.predicted_s is not None:
        expected, moved = map(_megabytes, (record.predicted_bytes or 0, record.bytes_moved))
        click.echo(
            f"{count(record.dask_tasks, 'task')}; predicted {record.predicted_s:.3f} s and {expected} "
            f"between workers, where {moved} were fetched"
        )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"


def _cluster(record: RunRecord) -> str:
    kind = {True: " processes", False: " in one process", None: ""}[record.processes]
    return f"{record.workers} × {record.threads_per_worker}{kind}"


def _result(record: RunRecord) -> str:
    return (
        f"{record.executed_ops} ops in {record.makespan_s:.3f} s = {record.ops_per_s:,.0f} ops/s, "
        f"{record.efficiency:.0%} of the bound {record.bound_ops_per_s:,.0f}; "
        f"{record.steals} {'steal' if record.steals == 1 else 'steals'}, {record.idle_fraction:.0%} idle"
    )
