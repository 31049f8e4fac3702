"""`ferroflow run`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from distributed import Client

from ferroflow_dask.array_files import check_outputs, read_inputs, write_outputs
from ferroflow_dask.bench import run_sequentially
from ferroflow_dask.cli.batches import are_drawn, batches_in_words, draw_inputs, in_batches, run_batches
from ferroflow_dask.cli.cluster_options import (
    check_address,
    connect_timeout,
    refuse_given,
    repeat_type,
    size_options,
)
from ferroflow_dask.cli.clusters import PLAIN_POLICIES, Where, client_for, policy_installed
from ferroflow_dask.cli.devices import Devices, device_options
from ferroflow_dask.cli.errors import Failure
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.graph_options import GraphCommand, graph_options, graph_sizes, load_graph
from ferroflow_dask.cli.graphs import Told, as_object, in_words, run_graph
from ferroflow_dask.cli.jobs import is_job, job_options, run_in_partitions
from ferroflow_dask.cli.limits import time_limit, timeout_option
from ferroflow_dask.cli.looks import Looks, look_options
from ferroflow_dask.cli.sections import cluster_option, graph_option, how_option, output_option, slurm_option
from ferroflow_dask.cli.slurm import SlurmOptions, print_job_scripts, slurm_options
from ferroflow_dask.cli.strategies import check_options, strategy_for
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Graph, check_inputs
from ferroflow_dask.graph.defaults import with_inputs
from ferroflow_dask.kernels import check_supported
from ferroflow_dask.lowering import AUTO, check_granularity
from ferroflow_dask.lowering.bundles import default_granularity
from ferroflow_dask.lowering.pinned import in_parts, on_cluster
from ferroflow_dask.policy import policy_names
from ferroflow_dask.printable import printable

#: Parameters that name a cluster or give its size.
_OF_CLUSTERS = (
    "workers",
    "threads",
    "processes",
    "address",
    "connect_timeout",
    "cluster_kind",
    "prints_job_script",
)


@click.command(cls=GraphCommand)
@graph_options
@graph_option(
    "--input",
    "input_files",
    multiple=True,
    metavar="[NAME=]FILE",
    help="A .npy file for an input, or in place of a default (`info` lists both), or a .npz. Without any for "
    "the inputs, these are drawn at random; defaults are the model's. For a batch job: a .parquet, .csv or "
    ".npy file, or a folder of .parquet files or of images.",
)
@how_option(
    "--policy",
    default="ferroflow",
    show_default=True,
    help="Who decides where ops run: sequential, dask, static, random, ring, ferroflow, or one that an "
    "installed package offers.",
)
@how_option(
    "--granularity",
    help="whole: the graph as one task. bundles: short ops travel together. ops: a task for each. auto: what "
    "is predicted to be fastest on this cluster (with the policy ferroflow; ops with others, and where only "
    "some workers have GPUs).  [default: whole for --model, auto for --dag]",
)
@how_option(
    "--batch",
    type=click.IntRange(min=1),
    metavar="ROWS",
    help="Compute the inputs in batches of so many rows, with the whole model in each worker; no row may "
    "depend on others.",
)
@job_options
@how_option(
    "--strategy",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Split operators into parts for workers, as this file says.",
)
@how_option("--repeat", type=repeat_type(), default=1, show_default=True, help="Runs; the median is shown.")
@how_option(
    "--steal-threshold",
    type=click.IntRange(min=1),
    help="Policy ring: waiting tasks that a victim must exceed at first.",
)
@how_option("--no-adaptive-threshold", is_flag=True, help="Policy ring: keep the steal threshold constant.")
@timeout_option
@size_options
@cluster_option(
    "--connect", "address", metavar="ADDRESS", help="Use a running cluster, like tcp://10.0.0.1:8786."
)
@connect_timeout
@slurm_options
@slurm_option(
    "--job-script",
    "prints_job_script",
    is_flag=True,
    help="Print the batch scripts that would be submitted, and submit nothing.",
)
@device_options
@look_options
@output_option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write the outputs to this .npz file. For a batch job: a .parquet, .csv or .npy file.",
)
@output_option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@graph_sizes
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
    connect_timeout: float,
    timeout_s: float | None,
    slurm: SlurmOptions | None,
    prints_job_script: bool,
    granularity: str | None,
    batch: int | None,
    columns: str | None,
    preprocess: str | None,
    strategy: str | None,
    devices: Devices | None,
    steal_threshold: int | None,
    no_adaptive_threshold: bool,
    input_files: tuple[str, ...],
    output: str | None,
    repeat: int,
    is_live: bool,
    report: str | None,
    trace: str | None,
    is_online: bool,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Run a built-in graph or an ONNX model and say how fast it was."""
    click.get_current_context().with_resource(time_limit(timeout_s))
    _check_cluster(policy, address, slurm, prints_job_script)
    options = _policy_options(policy, seed, steal_threshold, no_adaptive_threshold)
    _check_granularity(policy, granularity, batch, devices)
    check_options(strategy, policy, granularity, batch)
    in_partitions = is_job(input_files, output)
    _check_output(output, in_partitions)
    graph = load_graph(dag, model, seed, sizes)

    looks = Looks(is_live, report, trace, is_online)
    looks.check(policy)
    where = Where(address, connect_timeout, slurm, workers, threads, processes, devices)

    @contextmanager
    def cluster() -> Iterator[Client]:
        with (
            client_for(where) as client,
            policy_installed(client, policy, options),
        ):
            yield client

    if in_partitions:
        run_in_partitions(
            graph,
            input_files,
            output,
            cluster,
            policy=policy,
            batch=batch,
            columns=columns,
            preprocess=preprocess,
            as_json=as_json,
        )
        return
    given = _given(graph, input_files, output)
    is_random = are_drawn(graph, given)
    # What cannot run is refused before a cluster is started for it.
    graph, inputs = _fitting(graph, given, seed, batch, where.n_threads)
    found_strategy = None if strategy is None else strategy_for(graph, inputs, strategy)
    if prints_job_script and slurm is not None:
        print_job_scripts(slurm)
        return

    if batch is not None:
        with cluster() as client, looks.at(client) as keep:
            found, facts = run_batches(
                graph,
                inputs,
                client,
                repeat=repeat,
                shows_progress=not (as_json or looks.is_live),
                on_run=keep.begin_run,
            )
            keep(graph.name, [batches_in_words(facts)])
        click.echo(json.dumps(facts) if as_json else printable(batches_in_words(facts)))
        outputs: Mapping[str, Any] = found
    else:
        if policy == "sequential":
            runs = [run_sequentially(graph, inputs, seed=seed) for _ in range(repeat)]
        else:
            chosen = granularity or _default_granularity(graph, model, policy, devices)
            if policy != "ferroflow" and chosen == AUTO:
                chosen = "ops"  # a baseline is Dask as it is used
            with cluster() as client, looks.at(client) as keep:
                if found_strategy is not None:
                    graph = in_parts(graph, inputs, on_cluster(found_strategy, client))
                    chosen = "ops" if granularity == "ops" else "bundles"
                runs = run_graph(
                    graph,
                    inputs,
                    client,
                    Told(policy, where.tells_processes, seed),
                    granularity=chosen,
                    repeat=repeat,
                    on_run=keep.begin_run,
                    shows_progress=not (as_json or looks.is_live),
                    matmul_threshold=None if devices is None else devices.matmul_threshold,
                )
                keep(graph.name, in_words(runs))
        click.echo(as_object(runs) if as_json else printable("\n".join(in_words(runs))))
        outputs = runs[-1].outputs
    if is_random:
        click.echo(f"inputs were drawn at random (seed {seed}); give your own with --input", err=True)
    if output is not None:
        write_outputs(output, outputs)
    if looks.unwritten:
        raise click.exceptions.Exit(Failure.exit_code)


def _fitting(
    graph: Graph, given: Mapping[str, Any], seed: int, batch: int | None, n_threads: Callable[[], int]
) -> tuple[Graph, dict[str, Any]]:
    """Return the graph that takes what is given, with all its inputs, once it is known that it can run."""
    opened = with_inputs(graph, given)
    if batch is not None:
        check_supported(opened)
        return opened, in_batches(graph, given, batch, n_threads, seed=seed)
    drawn = draw_inputs(graph, seed) if are_drawn(graph, given) else {}
    inputs = {**drawn, **given}
    check_inputs(opened, inputs)
    check_supported(opened)
    return opened, inputs


def _check_cluster(
    policy: str, address: str | None, slurm: SlurmOptions | None, prints_job_script: bool
) -> None:
    if policy == "sequential":
        refuse_given(_OF_CLUSTERS, "would do nothing: --policy sequential runs in this process")
    check_address(address)
    if prints_job_script and slurm is None:
        raise UsageError("--job-script needs --cluster slurm")


def _given(graph: Graph, input_files: tuple[str, ...], output: str | None) -> dict[str, Any]:
    """Return the inputs in files, once it is known that the outputs can be written."""
    if output is not None:
        check_outputs(output, graph)
    return read_inputs(graph, input_files) if input_files else {}


def _check_output(output: str | None, in_partitions: bool) -> None:
    if output is None or in_partitions:
        return
    if not output.endswith(".npz"):
        raise UsageError(f"--output {output!r} must end in .npz")
    check_folder("--output", output)


def _default_granularity(graph: Graph, model: str | None, policy: str, devices: Devices | None) -> str:
    is_whole = model is not None and policy == "ferroflow" and devices is None
    return (default_granularity(graph, False, False) or AUTO) if is_whole else AUTO


def _check_granularity(
    policy: str, granularity: str | None, batch: int | None, devices: Devices | None
) -> None:
    if batch is not None and devices is not None and devices.matmul_threshold is not None:
        raise UsageError("--gpu-matmul-threshold is for ops; --batch runs the whole model; leave one out")
    if batch is not None and (policy == "sequential" or granularity not in (None, AUTO, "whole")):
        raise UsageError(
            "--batch computes the whole model on each worker; --policy sequential has none, and no other "
            "--granularity than auto or whole goes with it"
        )
    if granularity is None:
        return
    check_granularity(granularity)
    if policy == "sequential" and granularity != AUTO:
        raise UsageError("--granularity is how a graph is cut for a cluster; --policy sequential has none")


def _policy_options(policy: str, seed: int, threshold: int | None, is_fixed: bool) -> dict[str, Any]:
    if policy not in (known := (*PLAIN_POLICIES, *policy_names())):
        raise UsageError(f"unknown policy {policy!r}; choose one of: {', '.join(known)}")
    options: dict[str, Any] = {}
    if threshold is not None:
        options["threshold"] = threshold
    if is_fixed:
        options["adaptive"] = False
    if options and policy != "ring":
        raise UsageError(
            f"--steal-threshold and --no-adaptive-threshold need the policy 'ring', got {policy!r}; "
            "add --policy ring"
        )
    return {"seed": seed} if policy == "random" else options
