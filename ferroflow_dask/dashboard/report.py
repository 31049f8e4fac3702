"""What stays of a run: a page that needs no server, and a trace for Perfetto or Chrome."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import file_html
from bokeh.layouts import column, row
from bokeh.models.widgets import Div
from bokeh.resources import INLINE

from ferroflow_dask.dashboard.charts import Levels
from ferroflow_dask.dashboard.figure import Figure
from ferroflow_dask.dashboard.figures import StealFlow, Timeline
from ferroflow_dask.dashboard.recorder import MOST_OPS
from ferroflow_dask.dashboard.recording import Recording
from ferroflow_dask.whole_files import write_text

_HEIGHT = 360


def write_report(
    path: Path, title: str, summary: Sequence[str], versions: Mapping[str, str], recording: Recording
) -> None:
    """Write a self-contained HTML file.

    Parameters
    ----------
    path : pathlib.Path
    title : str
    summary : sequence of str
        A line for each run.
    versions : mapping of str to str
    recording : Recording
    """
    lines = "".join(f"<li>{escape(line)}</li>" for line in summary)
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    steals = (
        ", ".join(f"{outcome} {n:,}" for outcome, n in recording.steals.items()) or "none: Dask scheduled"
    )
    text = (
        f"<h2>{escape(title)}</h2><ul>{lines}</ul><p>{len(recording.loads)} workers, {recording.n_threads} "
        f"threads, {_shown(recording)}. Steals: {escape(steals)}.</p><p>{escape(told)}</p>"
    )
    roots = [_root(figure, recording) for figure in (Timeline, StealFlow, Levels)]
    page = column(
        Div(text=text, sizing_mode="stretch_width"),
        roots[0],
        row(roots[1], roots[2], sizing_mode="stretch_width"),
        sizing_mode="stretch_width",
    )
    write_text(path, file_html(page, INLINE, title))


def _shown(recording: Recording) -> str:
    told = f"{recording.n_ops:,} tasks"
    return told if recording.n_ran == recording.n_ops else f"the last {told} of {recording.n_ran:,}"


def _root(figure: type[Figure], recording: Recording) -> Any:
    shown = figure(recording, height=_HEIGHT)
    if isinstance(shown, Timeline):
        shown.most_shown = MOST_OPS
        shown.show_all()
    shown.update()
    return shown.root


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
