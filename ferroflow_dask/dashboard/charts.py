"""How fast the cluster is, and how far the graph: two panels of the page."""

from __future__ import annotations

from typing import Any

from bokeh.layouts import column
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    DataRange1d,
    Line,
    Range1d,
    Scatter,
    VBar,
)

from ferroflow_dask.dashboard.figure import Figure
from ferroflow_dask.dashboard.progress import MOST_LEVELS
from ferroflow_dask.dashboard.recording import Sample
from ferroflow_dask.dashboard.style import BLUE, GREEN, ORANGE, RED, draw, plot

_SHOWN_MS = 60_000
_MOST_SAMPLES = 600
#: Of each of the plots, without and with a time axis [pixels].
_HEIGHT, _LAST_HEIGHT = 62, 92


class Rates(Figure):
    """Busy threads, throughput and steals, over time."""

    title = "Rates"
    help = "Are all threads at work, and how fast do tasks end? A gap: no page was open."

    def make(self, options: dict[str, Any]) -> Any:
        """Return three plots above each other, each with an axis of its own."""
        names = ("time", "efficiency", "tasks", "steals", "success", "threshold")
        self.source = ColumnDataSource({name: [] for name in names})
        self._n_seen, self._has_run = 0, False
        self._x_range = DataRange1d(follow="end", follow_interval=_SHOWN_MS, range_padding=0)
        plots = [
            self._plot("threads at work [%]", "efficiency", GREEN, Range1d(start=0, end=105), **options),
            self._plot("tasks/s", "tasks", BLUE, DataRange1d(start=0), **options),
            self._plot("steals/s", "steals", ORANGE, DataRange1d(start=0), height=_LAST_HEIGHT, **options),
        ]
        for above in plots[:-1]:
            above.xaxis.visible = False
        return column(*plots, sizing_mode="stretch_width")

    def _plot(self, label: str, name: str, colour: str, y_range: Any, **options: Any) -> Any:
        tooltips = [
            ("at", "@time{%H:%M:%S}"),
            ("threads at work", "@efficiency{0} %"),
            ("tasks/s", "@tasks{0.0}"),
            ("steals/s", "@steals{0.0}"),
            ("steals that succeed", "@success{0} %"),
            ("steal threshold", "@threshold{0.0} waiting tasks"),
        ]
        options = {"height": _HEIGHT, **options}
        root = plot(
            label,
            tooltips,
            n_times=3,
            x_axis_type="datetime",
            x_range=self._x_range,
            y_range=y_range,
            **options,
        )
        root.title.text_font_size, root.title.text_font_style = "12px", "normal"
        root.hover.formatters = {"@time": "datetime"}
        root.hover.mode = "vline"
        root.yaxis.ticker = BasicTicker(desired_num_ticks=2)
        # Axes below each other begin at the same place, whatever is written beside them.
        root.min_border_left = 45
        line = draw(root, self.source, Line(x="time", y=name, line_color=colour, line_width=2))
        root.hover.renderers = [line]
        return root

    def refresh(self) -> None:
        """Add what was sampled since."""
        new = self.recorder.new_samples(self._n_seen)[-_MOST_SAMPLES:]
        self._has_run = self._has_run or any(one.efficiency > 0 or one.tasks_per_s > 0 for one in new)
        self.show(self._has_run)
        if new:
            self.source.stream(_columns(new), _MOST_SAMPLES)
        self._n_seen = self.recorder.n_samples


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
    """How far the graph is, level by level."""

    title = "Progress by level"
    help = "How far is the graph? Diamonds: the critical path, which limits the time left; filled: done."

    def make(self, options: dict[str, Any]) -> Any:
        """Return a bar for each level, and the critical path through them."""
        names = ("level", "done", "tasks", "critical", "critical_done", "key", "mark", "colour")
        self.source = ColumnDataSource({name: [] for name in names})
        root = plot(
            "",
            [
                ("level", "@level"),
                ("done", "@done of @tasks tasks"),
                ("critical path", "@key (@critical_done of @critical done)"),
            ],
            x_range=DataRange1d(range_padding=0.02),
            y_range=DataRange1d(start=0),
            **options,
        )
        bar: dict[str, Any] = {"x": "level", "width": 0.9, "line_color": None, "fill_color": BLUE}
        draw(root, self.source, VBar(top="done", **bar))
        draw(root, self.source, VBar(bottom="done", top="tasks", fill_alpha=0.25, **bar))
        draw(root, self.source, Line(x="level", y="mark", line_color=RED, line_alpha=0.5))
        marks = Scatter(x="level", y="mark", marker="diamond", size=11, fill_color="colour", line_color=RED)
        self.on_click(root, draw(root, self.source, marks), "task", "key")
        # Levels and tasks are whole numbers.
        for axis in root.axis:
            axis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
        root.xaxis.axis_label, root.yaxis.axis_label = "level", "tasks"
        return root

    def refresh(self) -> None:
        """Bring the bars up to date."""
        progress = self.recorder.progress
        levels = progress.levels
        self.show(progress.started_at is not None)
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
            self.content.xaxis.axis_label = "level (the last: all from there on)" if is_cut else "level"
        n_critical = sum(level.n_critical for level in levels)
        n_done = sum(level.n_critical_done for level in levels)
        self.note(f"{n_done:,} of {n_critical:,} on the critical path" if levels else "")
