"""`ferroflow bench`: measure workloads under policies, in one run, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from ferroflow_dask.bench import baselines
from ferroflow_dask.bench.plan import Plan, make_cases
from ferroflow_dask.bench.report import report
from ferroflow_dask.bench.schema import COSTS, OK, Shape
from ferroflow_dask.bench.workloads import WORKLOADS, Workload, default_sizes, get_workload
from ferroflow_dask.cli.bench_ablation import ablation
from ferroflow_dask.cli.bench_public import public
from ferroflow_dask.cli.bench_runs import rows_of, rows_option
from ferroflow_dask.cli.cluster_options import Duration, repeat_type, size_options
from ferroflow_dask.cli.errors import Failure, OneLineErrors
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.graph_options import SizeCommand, flag_of
from ferroflow_dask.cli.sections import workload_option
from ferroflow_dask.cli.slurm import SlurmOptions, slurm_client, slurm_options
from ferroflow_dask.exceptions import UsageError

F = TypeVar("F", bound=Callable[..., Any])
Chosen = Sequence[tuple[Workload, Mapping[str, Any]]]

_DEFAULT_POLICIES = ("dask", "dask-again", "ferroflow")
#: Workloads whose default is shown in the help of a size.
_MOST_SHOWN = 3
#: Task durations of a METG curve [ms], longest first.
_METG_MS = (100.0, 50.0, 20.0, 10.0, 5.0, 2.0, 1.0)


@click.group(cls=OneLineErrors)
def bench() -> None:
    """Measure workloads under Dask and under our policies, interleaved, as ratios."""


bench.add_command(ablation)
bench.add_command(public)


def _run_options(policies: Sequence[str], repeat: int) -> Callable[[F], F]:
    """Add the options of all commands that run something."""
    known = ", ".join(baselines.names())
    options = (
        click.option(
            "--policy",
            "policies",
            multiple=True,
            default=policies,
            show_default=True,
            help=f"What is measured: {known}. Repeatable.",
        ),
        click.option(
            "--costs",
            multiple=True,
            default=("learned",),
            show_default=True,
            help=f"What is said of durations beforehand: {', '.join(COSTS)}. Repeatable.",
        ),
        click.option("--repeat", type=repeat_type(), default=repeat, show_default=True, help="Repetitions."),
        size_options,
        slurm_options,
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Seed of inputs and orders.",
        ),
        click.option("--fresh", "is_fresh", is_flag=True, help="A new cluster for each run."),
        click.option(
            "--run-timeout",
            type=Duration(),
            default=300.0,
            show_default=True,
            help="How long a run may take before it counts as hung [s].",
        ),
        rows_option("ferroflow-bench.jsonl"),
        click.option(
            "--retry-broken",
            "retries_broken",
            is_flag=True,
            help="Run again what the file has as broken; the report says how many.",
        ),
    )

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


#: The patterns of Task Bench.
_PATTERNS = [workload for workload in WORKLOADS.values() if workload.suite == "task-bench"]


def _sizes_of(workloads: Iterable[Workload], without: Collection[str] = ()) -> Callable[[F], F]:
    """Add an option for each size of the workloads; the command gets those that are given, as `sizes`."""
    defaults: dict[str, list[str]] = {}
    for workload in workloads:
        for name in workload.defaults.keys() - without:
            defaults.setdefault(name, []).append(f"{workload.name} {workload.defaults[name]}")

    def add(function: F) -> F:
        @wraps(function)
        def with_sizes(**options: Any) -> Any:
            given = {name: options.pop(f"size_{name}") for name in defaults}
            return function(sizes={name: text for name, text in given.items() if text is not None}, **options)

        command: Any = with_sizes
        for name, shown in sorted(defaults.items(), reverse=True):
            listed = ", ".join(shown[:_MOST_SHOWN]) + ", …" * (len(shown) > _MOST_SHOWN)
            command = workload_option(
                flag_of(name), f"size_{name}", metavar="VALUE", help=f"[default: {listed}]"
            )(command)
        return command  # type: ignore[no-any-return]

    return add


@bench.command("list")
def list_workloads() -> None:
    """List the workloads with their sizes."""
    for workload in WORKLOADS.values():
        sizes = " ".join(f"{flag_of(name)} {value}" for name, value in workload.defaults.items())
        click.echo(f"{workload.name} ({workload.suite}): {workload.summary}\n    {sizes or 'no sizes'}")


@bench.command("run", cls=SizeCommand)
@click.argument("workloads", nargs=-1, metavar="WORKLOAD…")
@_run_options(_DEFAULT_POLICIES, repeat=5)
@_sizes_of(WORKLOADS.values())
def run_workloads(workloads: tuple[str, ...], sizes: Mapping[str, str], **options: Any) -> None:
    """Run the named workloads (`ferroflow bench list` names all)."""
    if not workloads:
        raise UsageError("name a workload; `ferroflow bench list` names all")
    chosen = [get_workload(name) for name in dict.fromkeys(workloads)]
    _check_sizes(sizes, chosen)
    _run(
        [(w, w.arguments({name: sizes[name] for name in sizes.keys() & w.defaults})) for w in chosen],
        **options,
    )


@bench.command(cls=SizeCommand)
@click.option("--pattern", default="stencil_1d", show_default=True, help="Pattern of Task Bench.")
@click.option(
    "--task-ms",
    "durations",
    multiple=True,
    type=Duration("milliseconds"),
    default=_METG_MS,
    show_default=True,
    help="Duration of a task [ms]. Repeatable.",
)
@_run_options(("dask", "ferroflow"), repeat=3)
@_sizes_of(_PATTERNS, without=("task_ms",))
def metg(pattern: str, sizes: Mapping[str, str], durations: tuple[float, ...], **options: Any) -> None:
    """Measure the minimum effective task granularity, METG(50 %), of a Task Bench pattern."""
    # `tree` is RSDS's; Task Bench's is told from it by its prefix, which need not be given here.
    workload = WORKLOADS.get(f"task_bench_{pattern}") or WORKLOADS.get(pattern)
    if workload not in _PATTERNS:
        known = ", ".join(other.name for other in _PATTERNS)
        raise UsageError(f"{pattern!r} is no pattern of Task Bench; choose one of: {known}")
    _check_sizes(sizes, [workload])
    chosen = [(workload, workload.arguments({**sizes, "task_ms": ms})) for ms in dict.fromkeys(durations)]
    _run(chosen, **options)  # the report has the curves' METG


def _check_sizes(sizes: Mapping[str, str], workloads: Sequence[Workload]) -> None:
    """Raise `UsageError` for a size that none of the workloads has."""
    for lost in (name for name in sizes if not any(name in workload.defaults for workload in workloads)):
        names = ", ".join(workload.name for workload in workloads)
        raise UsageError(f"none of {names} has a size {flag_of(lost)}; see: ferroflow bench list")


def _run(
    chosen: Chosen,
    *,
    policies: Sequence[str],
    costs: Sequence[str],
    repeat: int,
    workers: int,
    threads: int,
    processes: bool,
    seed: int,
    is_fresh: bool,
    run_timeout: float,
    file: Path,
    retries_broken: bool,
    slurm: SlurmOptions | None,
) -> None:
    check_folder("--rows", file)
    cases = make_cases(chosen, policies, costs)
    _check_packages([workload for workload, _ in chosen])
    if slurm is None:
        plan, start = Plan(cases, Shape(workers, threads, processes), repeat, seed, is_fresh=is_fresh), None
    else:
        shape, start = Shape(*slurm.workers_and_threads(), True), partial(slurm_client, slurm)
        place = ("slurm", slurm.sections(), slurm.is_encrypted)
        plan = Plan(cases, shape, repeat, seed, *place, is_fresh)
    rows = rows_of(plan, file, start=start, timeout_s=run_timeout, retries_broken=retries_broken)
    click.echo(report(rows, defaults=default_sizes()))
    broken = [row for row in rows if row.status != OK]
    if broken:
        first = broken[0]
        raise Failure(
            f"{len(broken)} of {len(rows)} runs do not count; the first: {first.workload} under "
            f"{first.policy}: {first.status}; run them again with --retry-broken"
        )


def _check_packages(workloads: Sequence[Workload]) -> None:
    """Refuse workloads whose packages are missing, before anything runs for minutes."""
    lacking = {w.name: missing for w in workloads if (missing := [p for p in w.needs if not find_spec(p)])}
    if lacking:
        packages = ", ".join(dict.fromkeys(package for missing in lacking.values() for package in missing))
        names = ", ".join(lacking)
        raise UsageError(
            f"{names}: not without {packages}; run in the clone: pip install '.[bench]'; or leave "
            f"{'it' if len(lacking) == 1 else 'them'} out"
        )
