"""Pages and traces of simulations: speed-up over workers, and when each task would run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models.widgets import Div
from bokeh.plotting import figure
from bokeh.resources import INLINE

from ferroflow_dask.dashboard.report import write_events
from ferroflow_dask.dashboard.style import COLOURS
from ferroflow_dask.replay import Execution, Outcome
from ferroflow_dask.whole_files import write_text

_HEIGHT = 360


def write_page(
    path: Path, title: str, outcomes: Sequence[Outcome], work_s: float, rows: Iterable[Mapping[str, str]]
) -> None:
    """Write a self-contained HTML file: a table, and the speed-up over the workers for each policy.

    Parameters
    ----------
    path : pathlib.Path
    title : str
    outcomes : sequence of Outcome
    work_s : float
        Duration of all tasks together [s]; speed-ups are relative to it.
    rows : iterable of mapping of str to str
        Of the table, by the names of its columns.
    """
    rows = list(rows)
    header = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in rows
    )
    style = "<style>td, th { padding: 2px 12px; text-align: right }</style>"
    table = f"{style}<h2>{escape(title)}</h2><table><tr>{header}</tr>{body}</table>"
    plot: Any = figure(
        title="Speed-up over one thread", x_axis_label="workers", y_axis_label="speed-up", height=_HEIGHT
    )
    for at, policy in enumerate(dict.fromkeys(one.policy for one in outcomes)):
        own = [one for one in outcomes if one.policy == policy]
        colour = COLOURS[at % len(COLOURS)]
        x, y = [one.workers for one in own], [work_s / one.makespan_s for one in own]
        plot.line(x, y, legend_label=policy, line_color=colour, line_width=2)
        plot.scatter(x, y, legend_label=policy, color=colour, size=8)
    first = [one for one in outcomes if one.policy == outcomes[0].policy]
    bounds = [work_s / one.bound_s for one in first]
    plot.line(
        [one.workers for one in first], bounds, legend_label="bound", color="#b0b0b0", line_dash="dashed"
    )
    plot.legend.location = "top_left"
    write_text(path, file_html(column(Div(text=table), plot, sizing_mode="stretch_width"), INLINE, title))


def write_simulated_trace(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the tasks of simulations as Chrome's trace events: a process for each worker of each."""
    events: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    for outcome in outcomes:
        first = len(names)
        for worker in range(outcome.workers):
            names[first + worker] = f"{outcome.policy}, {outcome.workers} workers: worker {worker}"
        for one, thread in _threads(outcome.timeline):
            events.append(
                {
                    "name": str(one.key),
                    "cat": "task",
                    "ts": one.start_s * 1e6,
                    "dur": (one.stop_s - one.start_s) * 1e6,
                    "pid": first + one.worker,
                    "tid": thread,
                }
            )
    write_events(path, events, names)


def _threads(timeline: Sequence[Execution]) -> Iterable[tuple[Execution, int]]:
    """Yield each task with a thread that is free when it starts."""
    free_s: dict[int, list[float]] = {}
    for one in sorted(timeline, key=lambda one: (one.start_s, one.stop_s)):
        threads = free_s.setdefault(one.worker, [])
        for at, until_s in enumerate(threads):
            if until_s <= one.start_s:
                threads[at] = one.stop_s
                yield one, at
                break
        else:
            threads.append(one.stop_s)
            yield one, len(threads) - 1
