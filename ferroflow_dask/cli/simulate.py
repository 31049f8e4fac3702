"""`ferroflow simulate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from dask.utils import format_bytes
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ferroflow_dask.cli.cluster_options import repeat_type, simulated_workers
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.graph_options import GraphCommand, graph_options, graph_sizes, load_graph
from ferroflow_dask.cli.sections import cluster_option, graph_option, how_option, output_option
from ferroflow_dask.cli.simulations import quiet_schedulers, topology_named, topology_option, worker_counts
from ferroflow_dask.cli.standard import run_standard, standard_jobs, standard_table
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.printable import printable
from ferroflow_dask.replay import (
    ENGINES,
    Job,
    Outcome,
    job_of_graph,
    load_record,
    save_wfformat,
    simulate_job,
)
from ferroflow_dask.topology import Topology

#: Columns that a bar may have.
_BAR = 40


@click.command(cls=GraphCommand)
@graph_options
@graph_option(
    "--record", metavar="FILE", help="A run that `ferroflow_dask.record` has written, or one in WfFormat."
)
@graph_option("--standard", is_flag=True, help="Compare policies on twelve graphs of sleeping tasks.")
@topology_option
@cluster_option(
    "--workers", metavar="N,N,…", help="Numbers of workers, like 2,4,8; those of the topology if left out."
)
@cluster_option("--workers-per-host", type=simulated_workers, metavar="N", help="Workers of each host.")
@how_option(
    "--policy",
    "policies",
    default="dask,ferroflow",
    show_default=True,
    metavar="NAME,NAME,…",
    help="dask, no-stealing, ferroflow, static, random, ring, or one that an installed package offers.",
)
@how_option(
    "--engine",
    type=click.Choice(ENGINES),
    default="exact",
    show_default=True,
    help="exact: Dask's state machines and the policy. light: a list schedule, 30 times as fast.",
)
@how_option(
    "--repeat",
    type=repeat_type(),
    default=3,
    show_default=True,
    help="Simulations of each; all but the first vary durations and costs, for the interval.",
)
@how_option(
    "--noise",
    type=click.FloatRange(0, 1, max_open=True),
    help="Standard deviation of that variation, relative.  [default: that of the topology]",
)
@output_option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@output_option("--html", metavar="FILE.html", help="Write table and speed-up to a page.")
@output_option("--trace", metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@output_option("--export", metavar="FILE", help="Write the record in WfFormat 1.5, and simulate nothing.")
@graph_sizes
def simulate(
    *,
    dag: str | None,
    model: str | None,
    record: str | None,
    standard: bool,
    seed: int,
    topology: str,
    workers: str | None,
    workers_per_host: int | None,
    policies: str,
    engine: str,
    repeat: int,
    noise: float | None,
    as_json: bool,
    html: str | None,
    trace: str | None,
    export: str | None,
    **sizes: Any,
) -> None:
    """Predict how long a graph, a model or a recorded run takes on a cluster, in virtual time."""
    for option, file in (("--html", html), ("--trace", trace), ("--export", export)):
        if file is not None and standard:
            raise UsageError(f"--standard compares many graphs and writes no page; leave out {option}")
        if file is not None:
            check_folder(option, file)
    jobs = _jobs((dag, model, record), standard, seed, sizes)
    if export is not None:
        _export(jobs[0], record, export)
        return
    base = topology_named(topology)
    counts = worker_counts(workers) if workers is not None else [len(base.workers)]
    resized = workers is not None or workers_per_host is not None
    sized = [base.with_workers(n, workers_per_host) for n in counts] if resized else [base]
    names = [name.strip() for name in policies.split(",")]
    quiet_schedulers()
    outcomes = []
    with Progress(transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("simulated", total=len(jobs) * len(names) * len(sized))

        def run(job: Job, name: str, one: Topology) -> Outcome:
            found = simulate_job(job, one, name, engine=engine, seed=seed, repeat=repeat, noise=noise)
            progress.advance(bar)
            return found if trace is not None else replace(found, timeline=[])

        if standard:
            runs = run_standard(jobs, names, sized, run)
        else:
            outcomes = [run(jobs[0], name, one) for name in names for one in sized]
    if standard:
        click.echo(json.dumps([one._asdict() for one in runs]) if as_json else standard_table(names, runs))
        return
    job = jobs[0]
    title = f"{job.name or 'job'} on {base.name or topology}"
    rows = [_row(job, one) for one in outcomes]
    if as_json:
        facts = {"job": job.name, "tasks": len(job.tasks), "work_s": job.work_s, "topology": base.name}
        facts |= {"recorded_s": job.makespan_s, "outcomes": [one.as_dict() for one in outcomes]}
        click.echo(json.dumps(facts))
    else:
        _print(job, title, rows, outcomes)
    if html is not None:
        from ferroflow_dask.dashboard.simulated import write_page

        write_page(Path(html), title, outcomes, job.work_s, rows)
    if trace is not None:
        from ferroflow_dask.dashboard.simulated import write_simulated_trace

        write_simulated_trace(Path(trace), outcomes)


def _jobs(
    source: tuple[str | None, str | None, str | None], standard: bool, seed: int, sizes: Mapping[str, Any]
) -> list[Job]:
    dag, model, record = source
    if sum(given is not None for given in source) + standard != 1:
        raise UsageError("give one of --dag NAME, --model FILE, --record FILE and --standard")
    if record is None and not standard:
        return [job_of_graph(load_graph(dag, model, seed, sizes))]
    given = [name for name, value in sizes.items() if value is not None]
    if given:
        option = "--standard" if standard else "--record"
        raise UsageError(f"{option} takes no sizes, but --{given[0].replace('_', '-')} was given")
    return standard_jobs() if record is None else [load_record(record)]


def _export(job: Job, record: str | None, path: str) -> None:
    """Write a recorded run in WfFormat. Its date is that of the record."""
    if record is None:
        raise UsageError("--export writes a recorded run; give --record FILE")
    try:
        save_wfformat(job, path, datetime.fromtimestamp(Path(record).stat().st_mtime, UTC))
    except OSError as error:
        raise UsageError(f"--export must be a file that can be written, got {path!r}: {error}") from error
    click.echo(f"wrote {printable(path)}: {len(job.tasks):,} tasks")


def _row(job: Job, one: Outcome) -> dict[str, str]:
    interval = f"{one.low_s:.3g}–{one.high_s:.3g}" if one.low_s < one.high_s else ""
    return {
        "policy": one.policy,
        "workers": f"{one.workers:,}",
        "threads": f"{one.threads:,}",
        "makespan [s]": f"{one.makespan_s:.4g}",
        "interval [s]": interval,
        "speed-up": f"{_speedup(job, one):.3g}",
        "efficiency": f"{one.efficiency:.0%}",
        "bound [s]": f"{one.bound_s:.4g}",
        "scheduler busy": f"{one.scheduler_busy:.0%}",
        "moved": format_bytes(one.nbytes_moved),
        "steals": f"{one.steals:,}",
        "tasks": f"{one.executions:,}",
    }


def _speedup(job: Job, one: Outcome) -> float:
    return job.work_s / one.makespan_s if one.makespan_s else 0.0


def _print(job: Job, title: str, rows: Sequence[Mapping[str, str]], outcomes: Sequence[Outcome]) -> None:
    about = f"{title}: {len(job.tasks):,} tasks, {job.work_s:.4g} s of work"
    table = Table(box=None, title=Text(printable(about)))
    for name in rows[0]:
        table.add_column(Text(name), justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(*row.values())
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(table)
    if job.makespan_s is not None:
        threads = sum(job.threads)
        click.echo(f"recorded: {job.makespan_s:.4g} s under {printable(job.policy)} with {threads} threads")
    if len(outcomes) > 1:
        click.echo("\n".join(_bars(job, outcomes)))


def _bars(job: Job, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of a plot of speed-ups."""
    most = max(_speedup(job, one) for one in outcomes) or 1.0
    wide = max(len(one.policy) for one in outcomes)
    yield "speed-up over one thread"
    for one in outcomes:
        speedup = _speedup(job, one)
        bar = "█" * max(1, round(_BAR * speedup / most))
        yield f"  {one.policy:<{wide}} {one.workers:>6,} {bar} {speedup:.3g}"
