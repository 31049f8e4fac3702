"""Report of rows: their tables, with a part for each machine, commit, set of versions and cluster."""

from __future__ import annotations

from collections.abc import Sequence

from ferroflow_dask.bench.markdown import count, text
from ferroflow_dask.bench.public.page import covers, noise, tables
from ferroflow_dask.bench.public.summary import Summary, by_setting, summarize
from ferroflow_dask.bench.rows import Rows
from ferroflow_dask.bench.schema import BenchRecord
from ferroflow_dask.exceptions import UsageError

_CLUSTERS = {"local": "a local cluster", "separate": "a separate scheduler", "slurm": "SLURM jobs"}


def report(rows: Sequence[BenchRecord]) -> str:
    """Return the tables of rows in Markdown, with a part for each setting; it ends in a newline.

    Parameters
    ----------
    rows : sequence of BenchRecord
        If they are `Rows`, their notes are printed at the top.

    Raises
    ------
    UsageError
        There are no rows.
    """
    if not rows:
        raise UsageError("no rows to report; 'ferroflow bench' writes some")
    parts = ["# Benchmark", *(rows.notes if isinstance(rows, Rows) else ())]
    settings = by_setting(rows)
    if len(settings) > 1:
        parts.append(
            f"The rows come from {len(settings)} settings: machines, clusters, versions or commits. They are "
            "not compared with each other."
        )
    for n, own in enumerate(settings, start=1):
        parts += [f"# Setting {n} of {len(settings)}"] if len(settings) > 1 else []
        summary = summarize(own, "")
        parts += [_setting(own), _method(summary), *tables(summary)]
    return "\n\n".join(parts) + "\n"


def _setting(rows: Sequence[BenchRecord]) -> str:
    """Return a line about where rows were measured."""
    first = rows[0]
    threads = count(first.threads_per_worker, "thread")
    cluster = f"{count(first.workers, 'worker')} × {threads}{'' if first.processes else ', in one process'}"
    places = [first.machine or "an unknown machine", cluster]
    places += [_CLUSTERS[first.cluster]] if first.cluster in _CLUSTERS else []
    places += [f"section {first.section}"] if first.section else []
    places += ["encrypted"] if first.tls else []
    versions = ", ".join(f"{name} {version}" for name, version in sorted(first.versions.items()))
    commit = f"commit {first.commit}" if first.commit else "no commit"
    line = f"{count(len(rows), 'run')}: {', '.join(places)}; {versions or 'unknown versions'}; {commit}."
    return text(line)


def _method(summary: Summary) -> str:
    rounds = max((program.runs for program in summary.programs), default=0)
    lines = [
        "A ratio is stock Dask's duration divided by that of the other side, as median over the rounds.",
        "Above 1, the other side is faster. Brackets are intervals for the median. ▲ and ▼ mark intervals",
        "without 1.",
    ]
    if rounds > 1:
        lines.append(covers(rounds))
    if any(program.again is not None for program in summary.programs):
        lines.append("The column *again* shows stock Dask against itself, which is the noise.")
        lines.append(noise(summary))
    return " ".join(lines)
