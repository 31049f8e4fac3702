"""Batch jobs on the command line: `ferroflow run --model M --input table.parquet --output out.parquet`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import click
from distributed import Client

from ferroflow_dask.bench.markdown import count
from ferroflow_dask.cli.cluster_options import refuse_given
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.graphs import scatter_shown
from ferroflow_dask.cli.progress import late_bar
from ferroflow_dask.cli.sections import how_option
from ferroflow_dask.exceptions import FerroflowError, UsageError
from ferroflow_dask.graph import Graph
from ferroflow_dask.jobs import is_job_input, is_job_output, job_of, run_job

F = TypeVar("F", bound=Callable[..., Any])

#: Rows of a batch.
_BATCH = 32
_ONLY_OF_JOBS = ("columns", "preprocess")
_NOT_OF_JOBS = (
    "granularity",
    "strategy",
    "repeat",
    "is_live",
    "report",
    "trace",
    "seed",
    "prints_job_script",
)


def job_options(function: F) -> F:
    """Add the options of batch jobs."""
    for option in (
        how_option(
            "--preprocess",
            type=click.Choice(["imagenet"]),
            help="With a folder of images as --input: resize, crop and normalise them.",
        ),
        how_option(
            "--columns",
            metavar="NAME,…",
            help="With a table as --input: the columns for the model's only input, separated by commas.",
        ),
    ):
        function = option(function)
    return function


def is_job(input_files: tuple[str, ...], output: str | None) -> bool:
    """Return whether a run reads and writes in partitions, and raise if options do not go with that."""
    if any(map(is_job_input, input_files)) or (input_files and is_job_output(output)):
        refuse_given(_NOT_OF_JOBS, "does nothing for a batch job")
        return True
    refuse_given(_ONLY_OF_JOBS, "needs a table or a folder of images as --input")
    return False


def run_in_partitions(
    graph: Graph,
    input_files: tuple[str, ...],
    output: str | None,
    cluster: Callable[[], AbstractContextManager[Client]],
    *,
    policy: str,
    batch: int | None,
    columns: str | None,
    preprocess: str | None,
    as_json: bool,
) -> None:
    """Run a batch job and print how fast it was."""
    if policy == "sequential":
        raise UsageError("--policy must be of a cluster for a batch job, got 'sequential'; leave it out")
    if len(input_files) != 1 or output is None:
        given = "no --output" if output is None else f"{len(input_files)} times --input"
        raise UsageError(
            f"a batch job needs one --input and one --output, got {given}; call ferroflow run --model "
            "MODEL --input table.parquet --output out.parquet"
        )
    check_folder("--output", output)
    chosen = None if columns is None else [name.strip() for name in columns.split(",")]
    job = job_of(graph, input_files[0], output, batch=batch or _BATCH, columns=chosen, preprocess=preprocess)
    with cluster() as client:
        scattered = scatter_shown(graph, client, is_shown=not as_json)
        start = time.perf_counter()
        try:
            with late_bar("rows", "rows", is_shown=not as_json) as update:
                facts: dict[str, Any] = dict(run_job(job, scattered, client, update))
        except UsageError:
            raise
        except (FerroflowError, KeyboardInterrupt):
            click.echo("finished partitions are kept: the same command goes on from there", err=True)
            raise
        seconds = time.perf_counter() - start
    facts.update(model=graph.name, makespan_s=seconds, rows_per_s=facts["computed_rows"] / seconds)
    click.echo(json.dumps(facts) if as_json else _in_words(facts, output))


def _in_words(facts: dict[str, Any], output: str) -> str:
    done = f"{count(facts['rows'], 'row')} in {count(facts['partitions'], 'partition')} written to {output}"
    n_before = facts["partitions"] - facts["computed_partitions"]
    before = f"; {count(n_before, 'partition')} were finished before" if n_before else ""
    return (
        f"{facts['model']}: {done} in {facts['makespan_s']:.3f} s = {facts['rows_per_s']:,.0f} rows/s{before}"
    )
