"""`ferroflow bench`: measure workloads under stock Dask and under the plugin, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from ferroflow_dask.bench.public import policies
from ferroflow_dask.bench.public.base import Options, Suite
from ferroflow_dask.bench.public.host import Place
from ferroflow_dask.bench.public.jobs import Jobs
from ferroflow_dask.bench.public.report import report
from ferroflow_dask.bench.public.sides import SIDES, Rules
from ferroflow_dask.bench.public.workloads import suites_of
from ferroflow_dask.bench.schema import OK
from ferroflow_dask.bench.workloads import WORKLOADS, Workload, get_workload
from ferroflow_dask.cli.bench_public import public
from ferroflow_dask.cli.bench_runs import rows_of, rows_option, rule_options
from ferroflow_dask.cli.cluster_options import count_options, refuse_given, repeat_type
from ferroflow_dask.cli.errors import Failure, OneLineErrors
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.graph_options import SizeCommand, flag_of
from ferroflow_dask.cli.sections import workload_option
from ferroflow_dask.cli.slurm import SlurmOptions, slurm_client, slurm_options
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.printable import printable

F = TypeVar("F", bound=Callable[..., Any])

#: Workloads whose default is shown in the help of a size.
_MOST_SHOWN = 3


@click.group(cls=OneLineErrors)
def bench() -> None:
    """Measure workloads under Dask and under our policies, interleaved, as ratios."""


bench.add_command(public)


def _size_options(function: F) -> F:
    """Add an option for each size of the workloads, as `size_NAME`."""
    defaults: dict[str, list[str]] = {}
    for workload in WORKLOADS.values():
        for name, value in workload.defaults.items():
            defaults.setdefault(name, []).append(f"{workload.name} {value}")
    for name, shown in sorted(defaults.items(), reverse=True):
        listed = ", ".join(shown[:_MOST_SHOWN]) + ", …" * (len(shown) > _MOST_SHOWN)
        function = workload_option(
            flag_of(name), f"size_{name}", metavar="VALUE", help=f"[default: {listed}]"
        )(function)
    return function


@bench.command("list")
def list_workloads() -> None:
    """List the workloads with their sizes."""
    for workload in WORKLOADS.values():
        sizes = " ".join(f"{flag_of(name)} {value}" for name, value in workload.defaults.items())
        click.echo(f"{workload.name} ({workload.suite}): {workload.summary}\n    {sizes or 'no sizes'}")


@bench.command("run", cls=SizeCommand)
@click.argument("workloads", nargs=-1, metavar="WORKLOAD…")
@click.option(
    "--policy",
    "names",
    multiple=True,
    default=tuple(SIDES),
    show_default=True,
    help=f"Sides, each with a cluster of its own: {', '.join(policies.names())}. Repeatable.",
)
@click.option(
    "--costs",
    type=click.Choice(["learned", "known"]),
    default="learned",
    show_default=True,
    help="Whether tasks declare their durations. Dask does not read them.",
)
@click.option("--repeat", type=repeat_type(), default=5, show_default=True, help="Rounds of each workload.")
@click.option("--fresh", "is_fresh", is_flag=True, help="New clusters for each workload, with first runs.")
@count_options
@rule_options
@slurm_options
@rows_option("ferroflow-bench.jsonl")
@_size_options
def run_workloads(
    *,
    workloads: tuple[str, ...],
    names: tuple[str, ...],
    costs: str,
    repeat: int,
    is_fresh: bool,
    workers: int,
    threads: int,
    memory_limit: str,
    place: str,
    seed: int,
    run_timeout: float,
    slurm: SlurmOptions | None,
    file: Path,
    **given: str | None,
) -> None:
    """Run the named workloads (`ferroflow bench list` names all) on each side in turn."""
    if not workloads:
        raise UsageError("name a workload; `ferroflow bench list` names all")
    sizes = {name.removeprefix("size_"): text for name, text in given.items() if text is not None}
    chosen = [get_workload(name) for name in dict.fromkeys(workloads)]
    _check_sizes(sizes, chosen)
    own = [
        (one.name, one.arguments({name: text for name, text in sizes.items() if name in one.defaults}))
        for one in chosen
    ]
    sides = policies.sides_of(names)
    check_folder("--rows", file)
    suites, options = suites_of(own, costs, seed), Options(workers=workers)
    _check_packages(suites, options)
    where, jobs = Place(workers, threads, memory_limit, place == "separate"), None
    if slurm is not None:
        refuse_given(("memory_limit", "place"), "would do nothing with --cluster slurm")
        where = Place(*slurm.workers_and_threads())
        jobs = Jobs(partial(slurm_client, slurm), slurm.sections(), slurm.is_encrypted, slurm.wait_s)
    rules = Rules(where, repeat, is_fresh, run_timeout, seed, sides, jobs)
    rows = rows_of(suites, options, rules, file)
    click.echo(printable(report(rows)))
    if broken := [row for row in rows if row.status != OK]:
        first = broken[0]
        raise Failure(
            f"{len(broken)} of {len(rows)} runs do not count; the first: {first.workload} under "
            f"{first.policy}: {first.status}; the same command makes them again"
        )


def _check_sizes(sizes: Mapping[str, str], workloads: Sequence[Workload]) -> None:
    """Raise `UsageError` for a size that none of the workloads has."""
    for lost in (name for name in sizes if not any(name in workload.defaults for workload in workloads)):
        names = ", ".join(workload.name for workload in workloads)
        raise UsageError(f"none of {names} has a size {flag_of(lost)}; see: ferroflow bench list")


def _check_packages(suites: Sequence[Suite], options: Options) -> None:
    """Raise `UsageError` if packages of workloads are missing, before a cluster starts."""
    for suite in suites:
        for program in suite.programs(options):
            if program.skipped:
                why = f"{program.name} {program.skipped}"
                raise UsageError(f"{why}; run in the clone: pip install '.[bench]'")
