"""How fast, how far, and why: three more figures of the page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Any

from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    Line,
    LinearAxis,
    Range1d,
    Scatter,
    VBar,
)
from bokeh.models.annotations import Legend
from bokeh.models.widgets import Div

from ferroflow_dask.dashboard.figures import Figure
from ferroflow_dask.dashboard.progress import MOST_LEVELS
from ferroflow_dask.dashboard.recording import Sample
from ferroflow_dask.dashboard.style import BLUE, GREEN, ORANGE, RED, draw, plot

_SHOWN_MS = 60_000
_MOST_SAMPLES = 600
_MOST_DECISIONS = 50


class Rates(Figure):
    """Throughput, efficiency, steals and their success, and the threshold, over time."""

    def make(self, options: dict[str, Any]) -> Any:
        """Return two plots above each other."""
        names = ("time", "tasks", "efficiency", "steals", "success", "threshold")
        self.source = ColumnDataSource({name: [] for name in names})
        self._n_seen = 0
        x_range = DataRange1d(follow="end", follow_interval=_SHOWN_MS, range_padding=0)
        work = self._plot("Throughput and efficiency", "tasks/s", x_range, options)
        self._line(work, "tasks", "tasks/s", BLUE, "solid")
        self._line(work, "efficiency", "threads at work [%]", ORANGE, "dashed", on_right=True)
        steals = self._plot("Steals", "steals/s", x_range, options)
        self._line(steals, "steals", "steals/s", BLUE, "solid")
        self._line(steals, "threshold", "threshold [waiting tasks]", GREEN, "dotdash")
        self._line(steals, "success", "success [%]", ORANGE, "dashed", on_right=True)
        return column(work, steals, sizing_mode="stretch_both")

    @staticmethod
    def _plot(title: str, label: str, x_range: Any, options: dict[str, Any]) -> Any:
        tooltips = [
            ("at", "@time{%H:%M:%S}"),
            ("tasks/s", "@tasks{0.0}"),
            ("threads at work", "@efficiency{0} %"),
            ("steals/s", "@steals{0.0}"),
            ("success", "@success{0} %"),
            ("threshold", "@threshold{0.0} waiting tasks"),
        ]
        root = plot(title, tooltips, x_axis_type="datetime", x_range=x_range, **options)
        root.hover.formatters = {"@time": "datetime"}
        root.hover.mode = "vline"
        root.y_range = DataRange1d(start=0)
        root.yaxis.axis_label = label
        root.extra_y_ranges = {"percent": Range1d(start=0, end=105)}
        root.add_layout(LinearAxis(y_range_name="percent", axis_label="%"), "right")
        _add_legend(root)
        root.yaxis.minor_tick_line_color = None
        return root

    def _line(
        self, root: Any, name: str, label: str, colour: str, dash: str, *, on_right: bool = False
    ) -> None:
        where = {"y_range_name": "percent"} if on_right else {}
        glyph = Line(x="time", y=name, line_color=colour, line_dash=dash, line_width=2)
        line = draw(root, self.source, glyph, label, **where)
        if not on_right:
            root.y_range.renderers = [*(root.y_range.renderers or []), line]

    def refresh(self) -> None:
        """Add what was sampled since."""
        new = self.recorder.new_samples(self._n_seen)[-_MOST_SAMPLES:]
        self._n_seen = self.recorder.n_samples
        if new:
            self.source.stream(_columns(new), _MOST_SAMPLES)


def _add_legend(root: Any) -> None:
    """Add an empty legend above a figure, where it hides nothing."""
    legend: Any = Legend(orientation="horizontal", label_text_font_size="9px", border_line_color=None)
    legend.padding = legend.margin = 0
    root.add_layout(legend, "above")


def _columns(samples: list[Sample]) -> dict[str, Any]:
    # Lists: an array is two messages of its own, for a row or two.
    return {
        "time": [sample.time * 1e3 for sample in samples],
        "tasks": [sample.tasks_per_s for sample in samples],
        "efficiency": [sample.efficiency * 100 for sample in samples],
        "steals": [sample.steals_per_s for sample in samples],
        "success": [sample.success * 100 for sample in samples],
        "threshold": [sample.threshold for sample in samples],
    }


class Levels(Figure):
    """How far the graph is, level by level, and when it should be done."""

    def make(self, options: dict[str, Any]) -> Any:
        """Return a bar for each level, and the critical path through them."""
        names = ("level", "done", "tasks", "critical", "critical_done", "key", "mark", "colour")
        self.source = ColumnDataSource({name: [] for name in names})
        root = plot(
            "Progress by level\n ",
            [
                ("level", "@level"),
                ("done", "@done of @tasks tasks"),
                ("critical path", "@key (@critical_done of @critical done)"),
            ],
            x_range=DataRange1d(range_padding=0.02),
            y_range=DataRange1d(start=0),
            **options,
        )
        _add_legend(root)
        root.title.text_font_size = "11px"
        bar: dict[str, Any] = {"x": "level", "width": 0.9, "line_color": None}
        draw(root, self.source, VBar(top="done", fill_color=BLUE, **bar), "done")
        draw(root, self.source, VBar(bottom="done", top="tasks", fill_color="#dbe4ec", **bar), "to do")
        path = Line(x="level", y="mark", line_color=RED, line_alpha=0.5)
        draw(root, self.source, path)
        marks = Scatter(x="level", y="mark", marker="diamond", size=8, fill_color="colour", line_color=RED)
        draw(root, self.source, marks, "critical path (filled: done)")
        root.xaxis.axis_label, root.yaxis.axis_label = "level", "tasks"
        return root

    def refresh(self) -> None:
        """Bring the bars up to date."""
        progress = self.recorder.progress
        levels = progress.levels
        done = [level.n_done for level in levels]
        tasks = [level.n_tasks for level in levels]
        if done != self.source.data["done"] or tasks != self.source.data["tasks"]:
            self.source.data = {
                "level": list(range(len(levels))),
                "done": done,
                "tasks": tasks,
                "critical": [level.n_critical for level in levels],
                "critical_done": [level.n_critical_done for level in levels],
                "key": [level.critical_key for level in levels],
                "mark": [level.n_tasks if level.n_critical else float("nan") for level in levels],
                "colour": [RED if level.n_critical_done == level.n_critical else "white" for level in levels],
            }
            is_cut = len(levels) == MOST_LEVELS
            self.root.xaxis.axis_label = "level (the last: all from there on)" if is_cut else "level"
        self.root.title.text = self._title()

    def _title(self) -> str:
        progress = self.recorder.progress
        if progress.started_at is None:
            return "Progress by level\nno graph yet"
        n_critical = sum(level.n_critical for level in progress.levels)
        n_done = sum(level.n_critical_done for level in progress.levels)
        critical = f"{n_done:,} of {n_critical:,} tasks of the critical path"
        told = progress.in_words(self.recorder.n_threads, self.recorder.time)
        return f"Progress by level: {critical}\n{told}"


class Decisions(Figure):
    """The last decisions, with their reasons."""

    def make(self, options: dict[str, Any]) -> Any:
        """Return a table, newest first."""
        self._n_seen = -1
        # Not Bokeh's DataTable, which does not always draw rows anew.
        return Div(text="", sizing_mode="stretch_both", min_height=150, styles=_TABLE, stylesheets=[_CELLS])

    def refresh(self) -> None:
        """Bring the table up to date."""
        stealing = self.recorder.stealing
        n_noted = 0 if stealing is None else stealing.decisions.n_noted
        if n_noted == self._n_seen:
            return
        self._n_seen = n_noted
        names = {worker.address: worker.name for worker in self.recorder.workers()}
        rows = [
            (
                datetime.fromtimestamp(decision.time).strftime("%H:%M:%S.%f")[:-3],
                str(decision.key),
                decision.what,
                names.get(decision.worker, decision.worker),
                decision.reason,
            )
            for decision in reversed(self.recorder.decisions(_MOST_DECISIONS))
        ]
        self.root.text = _table(("at", "task", "decision", "worker", "reason"), rows)


_TABLE: dict[str, str | None] = {
    "overflow": "auto",
    "padding": "0 8px",
    "font-size": "11px",
    "box-sizing": "border-box",
}
_CELLS = "th, td { text-align: left; padding: 1px 14px 1px 0; white-space: nowrap }"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; what tasks and workers are called is text, whatever it looks like."""
    lines = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
