"""Who stole what from whom, what ran where, and what still waits: three figures of the page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from html import escape
from typing import Any

import numpy as np
from bokeh.core.properties import without_property_validation
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    HBar,
    LinearColorMapper,
    Range1d,
    Rect,
)
from bokeh.models.css import Styles
from bokeh.models.widgets import Div
from bokeh.transform import transform
from distributed.dashboard.components import DashboardComponent
from distributed.utils import log_errors

from ferroflow_dask.dashboard.recording import OpRun, WorkerLoad
from ferroflow_dask.dashboard.style import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    SEQUENCE,
    Palette,
    draw,
    label,
    plot,
)

#: Rows beyond which edges would hide what they are around.
_MOST_WITH_EDGES = 40
#: Of a timeline [ms].
_SHOWN_MS = 20_000


class Figure(DashboardComponent, ABC):
    """A figure of the page; `update` brings it up to date, and sends only what has changed.

    Parameters
    ----------
    recorder : Recorder or Recording
    **options
        Of the figure.
    """

    root: Any
    source: Any

    def __init__(self, recorder: Any, **options: Any) -> None:
        self.recorder = recorder
        self.root = self.make(options)

    @abstractmethod
    def make(self, options: dict[str, Any]) -> Any:
        """Return the model that is shown; it is called once."""

    @abstractmethod
    def refresh(self) -> None:
        """Bring the sources up to date."""

    @without_property_validation  # type: ignore[untyped-decorator]
    @log_errors
    def update(self) -> None:
        """Bring the figure up to date."""
        self.refresh()


class StealFlow(Figure):
    """Tasks that each worker has taken from each other one."""

    def make(self, options: dict[str, Any]) -> Any:
        """Return a matrix: victims from top to bottom, thieves from left to right."""
        self.source = ColumnDataSource({"victim": [], "thief": [], "x": [], "y": [], "steals": []})
        # Without an upper end it is the largest value, which the browser finds.
        mapper = LinearColorMapper(palette=list(SEQUENCE), low=0)
        root = plot(
            "Steals: who took how many tasks from whom",
            [("from", "@victim"), ("to", "@thief"), ("tasks", "@steals")],
            x_range=Range1d(start=-0.5, end=0.5),
            y_range=Range1d(start=-0.5, end=0.5),
            **options,
        )
        self._labels: list[str] = []
        cells = Rect(
            x="x",
            y="y",
            width=1,
            height=1,
            fill_color=transform("steals", mapper),
            line_color=None,
        )
        draw(root, self.source, cells)
        root.xaxis.axis_label, root.yaxis.axis_label = "to", "from"
        for axis in (*root.xaxis, *root.yaxis):
            axis.minor_tick_line_color = None
        return root

    def refresh(self) -> None:
        """Bring the matrix up to date."""
        names = {worker.address: worker.name for worker in self.recorder.workers()}
        flows = {pair: n for pair, n in self.recorder.flows().items() if set(pair) <= set(names)}
        order = sorted(names, key=lambda address: _natural(names[address]))
        place = {address: i for i, address in enumerate(order)}
        labels = [names[address] for address in order]
        if self._labels != labels:
            self._labels = labels
            self.root.x_range.end = len(labels) - 0.5
            self.root.y_range.start, self.root.y_range.end = 0.5 - len(labels), 0.5
            label(self.root.xaxis[0], dict(enumerate(labels)))
            label(self.root.yaxis[0], {-i: name for i, name in enumerate(labels)})
        found = {
            "victim": [names[victim] for victim, _ in flows],
            "thief": [names[thief] for _, thief in flows],
            "x": [place[thief] for _, thief in flows],
            "y": [-place[victim] for victim, _ in flows],
            "steals": list(flows.values()),
        }
        if found != dict(self.source.data):
            self.source.data = found
        n = self.recorder.steals.get("confirmed", 0)  # of workers that left, too
        self.root.title.text = f"Steals: who took how many tasks from whom ({n:,} in all)"


def _natural(name: str) -> tuple[int, str]:
    """Sort `10` after `9`."""
    return (int(name), "") if name.isdecimal() else (-1, name)


class Timeline(Figure):
    """What ran on which thread of which worker."""

    #: Ops that a browser shows at a time.
    most_shown = 3000

    def make(self, options: dict[str, Any]) -> Any:
        """Return bars, a row for each thread; a stolen task has a red edge."""
        names = ("key", "worker", "start", "stop", "ms", "y", "colour", "hatch", "edge")
        self.source = ColumnDataSource({name: [] for name in names})
        self._lanes = _Lanes()
        self._labels: dict[int, str] = {}
        self._n_seen = 0
        self._palette = Palette()
        root = plot(
            "Tasks by worker (red edge: stolen)",
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
            hatch_pattern="hatch",
            hatch_color="white",
            hatch_alpha=0.6,
            line_color="edge",
            line_width=1.5,
        )
        self._bars = draw(root, self.source, bars)
        root.yaxis.minor_tick_line_color = None
        return root

    def refresh(self) -> None:
        """Add what has run since."""
        new = self.recorder.new_ops(self._n_seen)
        self._n_seen = self.recorder.n_ops
        if not new:
            return
        workers = {worker.address: worker for worker in self.recorder.workers()}
        self._drop_gone(workers.keys() | {op.worker for op in new}, new[-1].stop * 1e3 - _SHOWN_MS)
        self._lanes.add(workers.values())
        self.source.stream(self._columns(new[-self.most_shown :], workers), self.most_shown)
        self._label_lanes(workers)

    def show_all(self) -> None:
        """Show what is there from beginning to end, not only the last of it."""
        self.root.x_range = DataRange1d(range_padding=0.01)

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
        looks = [self._palette[op.name] for op in ops]
        # Arrays are sent as they are in memory.
        starts, stops = np.array([op.start * 1e3 for op in ops]), np.array([op.stop * 1e3 for op in ops])
        return {
            "key": [op.key for op in ops],
            "worker": [names.get(op.worker, op.worker) for op in ops],
            "start": starts,
            "stop": stops,
            "ms": stops - starts,
            "y": [self._lanes.of(op.worker, op.thread) for op in ops],
            "colour": [colour for colour, _ in looks],
            "hatch": [hatch for _, hatch in looks],
            "edge": [RED if op.stolen else None for op in ops],
        }

    def _label_lanes(self, workers: dict[str, WorkerLoad]) -> None:
        n = self._lanes.n
        self.root.y_range.start, self.root.y_range.end = 0.5 - n, 0.5
        self._bars.glyph.line_width = 1.5 if n <= _MOST_WITH_EDGES else 0.5
        labels = {
            rows[0]: _told(workers[address]) if address in workers else "gone"
            for address, rows in self._lanes.rows.items()
        }
        if self._labels != labels:
            self._labels = labels
            label(self.root.yaxis[0], labels)


def _told(worker: WorkerLoad) -> str:
    return f"{worker.name} gpu" if worker.kind == "gpu" else worker.name


class _Lanes:
    """A row for each thread of each worker, from top to bottom; workers that come later come below."""

    def __init__(self) -> None:
        self.n = 0
        #: By address: numbers that fall from 0.
        self.rows: dict[str, range] = {}
        #: By address: threads that have a row and which of the worker's it is, the latest last.
        self._places: dict[str, dict[int, int]] = {}

    def add(self, workers: Iterable[WorkerLoad]) -> None:
        """Make rows for workers that have none yet."""
        new = [worker for worker in workers if worker.address not in self.rows]
        for worker in sorted(new, key=lambda worker: _natural(worker.name)):
            self._add(worker.address, max(1, worker.n_threads))

    def _add(self, address: str, n_rows: int) -> None:
        self.rows[address] = range(-self.n, -self.n - n_rows, -1)
        self.n += n_rows

    def drop(self, addresses: Set[str]) -> dict[int, int]:
        """Take away the rows of workers; return where each row that stays goes."""
        before, self.rows, self.n = self.rows, {}, 0
        moved: dict[int, int] = {}
        for address, rows in before.items():
            if address in addresses:
                self._places.pop(address, None)
            else:
                self._add(address, len(rows))
                moved.update(zip(rows, self.rows[address], strict=True))
        return moved

    def of(self, address: str, thread: int) -> int:
        """Return the row of a thread."""
        if address not in self.rows:  # it has left
            self._add(address, 1)
        rows, places = self.rows[address], self._places.setdefault(address, {})
        if thread in places:
            place = places.pop(thread)
        elif len(places) < len(rows):
            place = len(places)
        else:  # async tasks, other executors and threads that left the pool: the row that was still longest
            place = places.pop(next(iter(places)))
        places[thread] = place
        return rows[place]


class Queues(Figure):
    """How much each worker has still to do."""

    def make(self, options: dict[str, Any]) -> Any:
        """Return a bar for each worker."""
        columns = ("worker", "kind", "seconds", "running", "waiting", "threads", "y", "colour")
        self.source = ColumnDataSource({column: [] for column in columns})
        root = plot(
            "Predicted remaining time by worker",
            [
                ("worker", "@worker (@kind)"),
                ("remaining", "@seconds{0.000} s"),
                ("running", "@running of @threads threads"),
                ("waiting", "@waiting tasks"),
            ],
            x_range=DataRange1d(start=0, range_padding=0.05),
            y_range=Range1d(start=-0.5, end=0.5),
            **options,
        )
        self._labels: list[str] = []
        bars = HBar(y="y", right="seconds", height=0.85, fill_color="colour", line_color=None)
        draw(root, self.source, bars)
        root.xaxis.axis_label = "seconds"
        root.yaxis.minor_tick_line_color = None
        return root

    def refresh(self) -> None:
        """Bring the bars up to date."""
        workers = sorted(self.recorder.workers(), key=lambda worker: _natural(worker.name))
        labels = [worker.name for worker in workers]
        if self._labels != labels:
            self._labels = labels
            self.root.y_range.start, self.root.y_range.end = 0.5 - len(labels), 0.5
            label(self.root.yaxis[0], {-i: name for i, name in enumerate(labels)})
        found = {
            "worker": [worker.name for worker in workers],
            "kind": [worker.kind for worker in workers],
            "seconds": [worker.remaining_s for worker in workers],
            "running": [worker.n_running for worker in workers],
            "waiting": [worker.n_waiting for worker in workers],
            "threads": [worker.n_threads for worker in workers],
            "y": [-i for i in range(len(workers))],
            "colour": [_colour(worker) for worker in workers],
        }
        if found != dict(self.source.data):
            self.source.data = found


def _colour(worker: Any) -> str:
    if not worker.is_running:
        return GREY
    return ORANGE if worker.kind == "gpu" else BLUE


class Notice(Figure):
    """One line: who schedules, and what there is to see."""

    def make(self, options: dict[str, Any]) -> Any:
        """Return a line of text."""
        return Div(text="", sizing_mode="stretch_width", styles=Styles(padding="2px 8px"))

    def refresh(self) -> None:
        """Say what is the case."""
        recorder = self.recorder
        n_workers, n_done = len(recorder.workers()), recorder.n_ops
        if recorder.stealing is None:
            who = "Dask schedules this cluster, until <code>ferroflow_dask.install(client)</code>."
        else:
            policy = type(recorder.stealing.policy).__name__
            who = f"ferroflow schedules this cluster ({escape(policy)})."
        what = f"{n_workers:,} workers, {recorder.n_threads:,} threads, {n_done:,} tasks seen"
        if not n_done:
            what += ": nothing has run since this page was opened"
        text = f"{who} {what}."
        if self.root.text != text:
            self.root.text = text
