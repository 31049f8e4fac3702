"""What stays of a run: a page that needs no server, and a trace for Perfetto or Chrome."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.resources import CDN, INLINE

from ferroflow_dask.dashboard.charts import Levels
from ferroflow_dask.dashboard.figure import Figure, Text
from ferroflow_dask.dashboard.figures import StealFlow, Timeline
from ferroflow_dask.dashboard.recording import Recording
from ferroflow_dask.dashboard.style import page_of
from ferroflow_dask.dashboard.tables import Failures
from ferroflow_dask.whole_files import write_text

#: Tasks that are drawn, so that a report takes less than 500 kB without Bokeh's scripts.
_MOST_DRAWN, _MOST_PREPARING = 1800, 400


def write_report(
    path: Path,
    title: str,
    summary: Sequence[str],
    versions: Mapping[str, str],
    recording: Recording,
    *,
    is_online: bool = False,
) -> None:
    """Write an HTML file: the measured run, and what prepared it.

    Parameters
    ----------
    path : pathlib.Path
    title : str
    summary : sequence of str
        A line for each run.
    versions : mapping of str to str
    recording : Recording
    is_online : bool, optional
        Load Bokeh's scripts from its servers. By default they are in the file, which needs no network then.
    """
    run, preparation = recording.measured(), recording.preparation()
    head = Summary(run)
    head.write_summary(title, summary, versions, preparation)
    figures = [(head, 12), (_timeline(run), 12)]
    figures += [(StealFlow(run), 6), (Levels(run), 6), (Failures(run), 12), (_preparation(preparation), 12)]
    for figure, _ in figures[1:]:
        figure.update()
    grid, prepare = page_of([(figure.root, width) for figure, width in figures if figure.root.visible])
    document = Document()
    document.add_root(grid)
    prepare(document)
    write_text(path, file_html(document, CDN if is_online else INLINE, title))


class Summary(Text):
    """What was run, and how fast it was."""

    title = "Run"
    help = "How fast was it, and where did the time go?"
    most_height = None

    def refresh(self) -> None:
        """Do nothing: it is written once."""

    def write_summary(
        self, title: str, summary: Sequence[str], versions: Mapping[str, str], preparation: Recording
    ) -> None:
        """Write all lines."""
        run = self.recorder
        self.note(title)
        n_kept = run.n_ops + preparation.n_ops
        cut = [f"only the last {n_kept:,} of {run.n_ran:,} tasks were recorded"]
        steals = ", ".join(f"{outcome} {n:,}" for outcome, n in run.steals.items())
        lines = [
            *summary,
            f"{len(run.loads):,} workers, {run.n_threads:,} threads, {_tasks(run)}",
            f"steals: {steals or 'none: Dask scheduled'}",
            *([f"before the run: {_tasks(preparation)}"] if preparation.ops else []),
            *(cut if n_kept < run.n_ran else []),
            ", ".join(f"{name} {version}" for name, version in versions.items()),
        ]
        self.write("".join(f"<div>{escape(line)}</div>" for line in lines))


class Preparation(Timeline):
    """Tasks before the measured run."""

    title = "Preparation"
    help = "What ran before the measured run? Weights, sessions, earlier runs."


def _tasks(recording: Recording) -> str:
    count = f"{recording.n_ops:,} tasks"
    if not recording.ops:
        return count
    seconds = max(op.stop for op in recording.ops) - min(op.start for op in recording.ops)
    return f"{count} in {seconds:.3f} s"


def _timeline(recording: Recording) -> Figure:
    return _drawn(Timeline, recording, _MOST_DRAWN)


def _preparation(recording: Recording) -> Figure:
    return _drawn(Preparation, recording, _MOST_PREPARING)


def _drawn(kind: type[Timeline], recording: Recording, most: int) -> Figure:
    """Return a timeline of the longest tasks, from the first to the last."""
    ops = sorted(recording.ops, key=lambda op: op.start - op.stop)[:most]
    figure = kind(replace(recording, ops=sorted(ops, key=lambda op: op.start)))
    figure.most_shown = most
    figure.show_all()
    if recording.n_ops > most:
        figure.remark = f"the longest {most:,} of {recording.n_ops:,} tasks"
    return figure


def write_trace(path: Path, recording: Recording) -> None:
    """Write tasks as Chrome's trace events: a process for each worker, a thread for each of its threads.

    The format is read by https://ui.perfetto.dev and chrome://tracing.
    """
    start_s = min((op.start for op in recording.ops), default=0.0)
    names = {worker.address: worker.name for worker in recording.loads}
    processes: dict[str, int] = {}
    threads: dict[tuple[str, int], int] = {}
    events: list[dict[str, Any]] = []
    for op in recording.ops:
        process = processes.setdefault(op.worker, len(processes))
        thread = threads.setdefault((op.worker, op.thread), len(threads))
        events.append(
            {
                "name": op.name,
                "cat": "stolen" if op.stolen else "task",
                "ts": (op.start - start_s) * 1e6,
                "dur": (op.stop - op.start) * 1e6,
                "pid": process,
                "tid": thread,
                "args": {"key": op.key, "stolen": op.stolen},
            }
        )
    told = {process: f"worker {names.get(at, 'gone')} ({at})" for at, process in processes.items()}
    write_events(path, events, told)


def write_events(path: Path, events: Iterable[Mapping[str, Any]], processes: Mapping[int, str]) -> None:
    """Write complete events and the names of processes in Chrome's format."""
    named = [
        {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
        for process, name in processes.items()
    ]
    complete = [{"ph": "X", **event} for event in events]
    write_text(path, json.dumps({"traceEvents": complete + named, "displayTimeUnit": "ms"}))
