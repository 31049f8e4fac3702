"""What ran where, and who took tasks from whom: two panels of the page."""

from __future__ import annotations

from collections.abc import Set
from heapq import nlargest
from html import escape
from typing import Any

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    FixedTicker,
    HBar,
    LinearColorMapper,
    Range1d,
    Rect,
    Text,
)
from bokeh.models.annotations import ColorBar
from bokeh.transform import transform

from ferroflow_dask.dashboard.figure import Figure
from ferroflow_dask.dashboard.lanes import Lanes, natural
from ferroflow_dask.dashboard.recording import OpRun, WorkerLoad
from ferroflow_dask.dashboard.style import RED, SEQUENCE, Html, draw, label, plot, swatch, task_colour

#: Rows beyond which edges would hide what they are around.
_MOST_WITH_EDGES = 40
#: Of a timeline [ms].
_SHOWN_MS = 20_000
#: Prefixes whose time is summed up, and those of which the colour is told.
_MOST_NAMES, _MOST_SWATCHES = 256, 6
#: Heights of a timeline, of its axis and of a row [pixels].
_LEAST_HEIGHT, _MOST_HEIGHT, _AXIS_HEIGHT, _ROW_HEIGHT = 200, 420, 50, 20
#: Workers up to which the cells of a matrix have room for numbers.
_MOST_WITH_NUMBERS = 16
#: Cells of a matrix: those with most tasks.
_MOST_CELLS = 1200


class StealFlow(Figure):
    """Tasks that each worker has taken from each other one."""

    title = "Steals"
    help = "Who took how many tasks from whom? Tasks move down to workers on the left."

    def make(self, options: dict[str, Any]) -> Any:
        """Return a matrix: victims from top to bottom, thieves from left to right."""
        names = ("victim", "thief", "x", "y", "steals", "number", "ink")
        self.source = ColumnDataSource({name: [] for name in names})
        self._mapper = LinearColorMapper(palette=list(SEQUENCE), low=0, high=1)
        root = plot(
            "",
            [("from", "@victim"), ("to", "@thief"), ("tasks", "@steals")],
            x_range=Range1d(start=-0.5, end=0.5),
            y_range=Range1d(start=-0.5, end=0.5),
            **options,
        )
        self._labels: list[str] = []
        fill = transform("steals", self._mapper)
        draw(root, self.source, Rect(x="x", y="y", width=1, height=1, fill_color=fill, line_color=None))
        number = Text(
            x="x", y="y", text="number", text_color="ink", text_align="center", text_font_size="12px"
        )
        number.text_baseline = "middle"
        draw(root, self.source, number)
        self._ticks = FixedTicker(ticks=[0, 1])
        legend = ColorBar(
            color_mapper=self._mapper,
            ticker=self._ticks,
            width=10,
            background_fill_color=None,
            major_label_text_font_size="12px",
            title="tasks",
        )
        root.add_layout(legend, "right")
        root.xaxis.axis_label, root.yaxis.axis_label = "to worker", "from worker"
        return root

    def refresh(self) -> None:
        """Bring the matrix up to date."""
        names = {worker.address: worker.name for worker in self.recorder.workers()}
        flows = {pair: n for pair, n in self.recorder.flows().items() if set(pair) <= set(names)}
        n_steals = self.recorder.steals.get("confirmed", 0)
        self.show(n_steals > 0)
        order = sorted(names, key=lambda address: natural(names[address]))
        self._label([names[address] for address in order])
        place = {address: i for i, address in enumerate(order)}
        most = max(flows.values(), default=1)
        flows = dict(nlargest(_MOST_CELLS, flows.items(), key=lambda flow: flow[1]))
        has_numbers = len(order) <= _MOST_WITH_NUMBERS
        found = {
            "victim": [names[victim] for victim, _ in flows],
            "thief": [names[thief] for _, thief in flows],
            "x": [place[thief] for _, thief in flows],
            "y": [-place[victim] for victim, _ in flows],
            "steals": list(flows.values()),
            "number": [f"{n:,}" if has_numbers else "" for n in flows.values()],
            "ink": ["white" if n > most / 2 else "black" for n in flows.values()],
        }
        if found != dict(self.source.data):
            self.source.data = found
        if self._mapper.high != most:
            self._mapper.high = most
            # A browser does not notice another ticker.
            self._ticks.ticks = sorted({0, most // 2, most})
        self.note(f"{n_steals:,} in all")  # of workers that left, too

    def _label(self, labels: list[str]) -> None:
        if self._labels == labels:
            return
        self._labels = labels
        self.content.x_range.end = len(labels) - 0.5
        self.content.y_range.start, self.content.y_range.end = 0.5 - len(labels), 0.5
        label(self.content.xaxis[0], dict(enumerate(labels)))
        label(self.content.yaxis[0], {-i: name for i, name in enumerate(labels)})


class Timeline(Figure):
    """What ran on which thread of which worker."""

    title = "Timeline"
    help = "What ran where, and where are gaps? A row for each thread; red edge: stolen."
    click = "Click a task to see why it ran there."

    #: Ops that a browser shows at a time.
    most_shown = 3000
    #: Told behind the colours.
    remark = ""

    def make(self, options: dict[str, Any]) -> Any:
        """Return bars, a row for each thread; a stolen task has a red edge."""
        names = ("key", "worker", "start", "stop", "ms", "y", "colour", "edge")
        self.source = ColumnDataSource({name: [] for name in names})
        self._lanes = Lanes()
        self._labels: dict[int, str] = {}
        self._n_seen = 0
        self._seconds: dict[str, float] = {}
        root = plot(
            "",
            [("task", "@key"), ("takes", "@ms{0.0} ms"), ("worker", "@worker")],
            x_axis_type="datetime",
            x_range=DataRange1d(follow="end", follow_interval=_SHOWN_MS, range_padding=0),
            y_range=Range1d(start=-0.5, end=0.5),
            **options,
        )
        bars = HBar(
            left="start",
            right="stop",
            y="y",
            height=0.84,
            fill_color="colour",
            line_color="edge",
            line_width=1.5,
        )
        self._bars = draw(root, self.source, bars)
        self.on_click(root, self._bars, "task", "key")
        return root

    def refresh(self) -> None:
        """Add what has run since."""
        new = self.recorder.new_ops(self._n_seen)
        self.show(self.recorder.n_ops > 0)
        if not new:
            return
        workers = {worker.address: worker for worker in self.recorder.workers()}
        self._drop_gone(workers.keys() | {op.worker for op in new}, new[-1].stop * 1e3 - _SHOWN_MS)
        self._lanes.add(workers.values())
        columns = self._columns(new[-self.most_shown :], workers)
        self._label_lanes(workers)
        self._tell_colours(new)
        self.source.stream(columns, self.most_shown)
        self._n_seen = self.recorder.n_ops

    def _tell_colours(self, new: list[OpRun]) -> None:
        """Write which colours the prefixes with most time have."""
        for op in new:
            if op.name in self._seconds or len(self._seconds) < _MOST_NAMES:
                self._seconds[op.name] = self._seconds.get(op.name, 0.0) + op.stop - op.start
        names = sorted(nlargest(_MOST_SWATCHES, self._seconds, self._seconds.__getitem__))
        colours = "".join(f"{swatch(task_colour(name))}{escape(name)}" for name in names)
        self.note(Html(f"{colours} {escape(self.remark)}"))

    def show_all(self) -> None:
        """Show what is there from beginning to end, not only the last of it."""
        self.content.x_range = DataRange1d(range_padding=0.01)

    def _drop_gone(self, present: Set[str], since_ms: float) -> None:
        """Take away the rows of workers that left and did nothing since."""
        data, gone = self.source.data, self._lanes.rows.keys() - present
        if gone:
            in_sight = {y for y, stop in zip(data["y"], data["stop"], strict=True) if stop > since_ms}
            gone = {address for address in gone if in_sight.isdisjoint(self._lanes.rows[address])}
        if not gone:
            return
        moved = self._lanes.drop(gone)
        kept = [i for i, y in enumerate(data["y"]) if y in moved]
        found: dict[str, Any] = {name: [column[i] for i in kept] for name, column in data.items()}
        found["y"] = [moved[y] for y in found["y"]]
        self.source.data = found | {name: np.array(found[name]) for name in ("start", "stop", "ms")}

    def _columns(self, ops: list[OpRun], workers: dict[str, WorkerLoad]) -> dict[str, Any]:
        names = {address: _told(worker) for address, worker in workers.items()}
        # Arrays are sent as they are in memory.
        starts, stops = np.array([op.start * 1e3 for op in ops]), np.array([op.stop * 1e3 for op in ops])
        return {
            "key": [op.key for op in ops],
            "worker": [names.get(op.worker, op.worker) for op in ops],
            "start": starts,
            "stop": stops,
            "ms": stops - starts,
            "y": [self._lanes.of(op.worker, op.thread) for op in ops],
            "colour": [task_colour(op.name) for op in ops],
            "edge": [RED if op.stolen else None for op in ops],
        }

    def _label_lanes(self, workers: dict[str, WorkerLoad]) -> None:
        n = self._lanes.n
        self.content.height = min(_MOST_HEIGHT, max(_LEAST_HEIGHT, _AXIS_HEIGHT + _ROW_HEIGHT * n))
        self.content.y_range.start, self.content.y_range.end = 0.5 - n, 0.5
        self._bars.glyph.line_width = 1.5 if n <= _MOST_WITH_EDGES else 0.5
        labels = {
            rows[0]: _told(workers[address]) if address in workers else "gone"
            for address, rows in self._lanes.rows.items()
        }
        if self._labels != labels:
            self._labels = labels
            label(self.content.yaxis[0], labels)


def _told(worker: WorkerLoad) -> str:
    return f"{worker.name} gpu" if worker.kind == "gpu" else worker.name
