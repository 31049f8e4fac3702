"""What the page draws, and how often."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bokeh.document import Document
from distributed.utils import color_of
from skewed_batches import Task

from ferroflow_dask.dashboard.charts import Levels
from ferroflow_dask.dashboard.figure import Figure, choice
from ferroflow_dask.dashboard.figures import StealFlow, Timeline
from ferroflow_dask.dashboard.idle import Idle
from ferroflow_dask.dashboard.progress import MOST_LEVELS, GraphProgress
from ferroflow_dask.dashboard.recording import Failure, OpRun, Recording, RunStart, WorkerLoad
from ferroflow_dask.dashboard.report import write_report
from ferroflow_dask.dashboard.screen import Screen
from ferroflow_dask.dashboard.style import text
from ferroflow_dask.dashboard.tables import Details, Failures, Workers


def loads(names: list[str]) -> list[WorkerLoad]:
    return [WorkerLoad(f"tcp://{i}", name, "cpu", 1, 1, 2, 0.5, True) for i, name in enumerate(names)]


def recorded(names: list[str], flows: dict[tuple[int, int], int] | None = None) -> Recording:
    """What a recorder may have of workers: an op on each, and tasks taken from each other."""
    workers = loads(names)
    ops = [OpRun("op", f"op-{worker.address}", worker.address, 1, 0.0, 1.0, False) for worker in workers]
    counts = Counter({(f"tcp://{a}", f"tcp://{b}"): n for (a, b), n in (flows or {}).items()})
    progress = GraphProgress(lambda _: 1.0)
    return Recording(ops, len(ops), [], workers, counts, progress, len(workers), {}, frozenset(), None)


@pytest.mark.parametrize("n_workers", [0, 1, 8, 128], ids="{} workers".format)
@pytest.mark.parametrize("kind", [StealFlow, Timeline])
def test_as_many_names_are_on_an_axis_as_can_be_read(kind: type[Figure], n_workers: int) -> None:
    figure = kind(recorded([str(i) for i in range(n_workers)]))
    figure.update()
    axis = figure.content.yaxis[0]
    ticks = list(axis.ticker.ticks) if n_workers else []
    assert len(ticks) == min(n_workers, 16)
    step = max(1, n_workers // 16)
    assert [axis.major_label_overrides[tick] for tick in ticks] == [str(i) for i in range(0, n_workers, step)]


def test_workers_of_one_name_are_two_workers() -> None:
    figure = StealFlow(recorded(["same", "same", "10", "9"], {(0, 1): 3, (1, 0): 2, (2, 3): 1}))
    figure.update()
    cells = set(
        zip(figure.source.data["x"], figure.source.data["y"], figure.source.data["steals"], strict=True)
    )
    assert cells == {(1, 0, 3), (0, -1, 2), (2, -3, 1)}  # 9 comes before 10


class Cluster:
    """A recorder of workers that come and go, each with two threads."""

    def __init__(self) -> None:
        self.n_ops, self.present, self._new = 0, [], []

    def ran(self, *runs: tuple[str, int, float]) -> None:
        """Tasks of a second have run: worker, thread, end."""
        self._new = [
            OpRun("op", "op", worker, thread, stop - 1, stop, False) for worker, thread, stop in runs
        ]
        self.n_ops += len(runs)

    def new_ops(self, n_seen: int) -> list[OpRun]:
        return self._new

    def workers(self, *, why_idle: bool = False) -> list[WorkerLoad]:
        return [WorkerLoad(name, name, "cpu", 2, 0, 0, 0.0, True) for name in self.present]


def rows(figure: Figure) -> list[tuple[str, int]]:
    """Which bar is in which row."""
    return list(zip(figure.source.data["worker"], figure.source.data["y"], strict=True))


def labels(figure: Figure) -> dict[int, str]:
    return dict(figure.content.yaxis[0].major_label_overrides)


def test_a_worker_has_as_many_rows_as_threads_whatever_runs_its_tasks() -> None:
    cluster = Cluster()
    cluster.present = ["a", "b"]
    figure = Timeline(cluster)
    for second in range(100):  # each time in a thread of its own, beside one that stays
        cluster.ran(("a", second, second), ("a", -1, second), ("b", second, second))
        figure.update()
    assert {y for worker, y in rows(figure) if worker == "a"} == {0, -1}
    assert {y for worker, y in rows(figure) if worker == "b"} == {-2, -3}
    assert {len(places) for places in figure._lanes._places.values()} == {2}


def test_rows_of_workers_that_left_are_gone_once_nothing_of_them_is_in_sight() -> None:
    cluster = Cluster()
    cluster.present = ["a", "b", "c"]
    figure = Timeline(cluster)
    cluster.ran(("a", 1, 1.0), ("b", 1, 1.0), ("c", 1, 1.0))
    figure.update()
    cluster.present = ["b", "c", "d"]  # as with `adapt`
    cluster.ran(("c", 2, 10.0), ("d", 1, 10.0))
    figure.update()
    assert labels(figure) == {0: "gone", -2: "b", -4: "c", -6: "d"}
    cluster.ran(("c", 1, 30.0))
    figure.update()
    assert labels(figure) == {0: "b", -2: "c", -4: "d"}
    assert rows(figure) == [("b", 0), ("c", -2), ("c", -3), ("d", -4), ("c", -2)]
    assert list(figure.source.data["stop"]) == [1e3, 1e3, 10e3, 10e3, 30e3]
    assert figure.content.y_range.start == 0.5 - 6
    assert set(figure._lanes._places) == {"b", "c", "d"}


@pytest.mark.parametrize("kind", [StealFlow, Timeline, Levels, Workers])
def test_what_has_not_changed_is_not_sent(kind: type[Figure]) -> None:
    figure = kind(recorded(["a", "b"], {(0, 1): 1}))
    document = Document()
    document.add_root(figure.root)
    sent: list[Any] = []
    document.on_change(sent.append)
    figure.update()
    assert sent
    sent.clear()
    figure.update()
    assert not sent


def test_a_report_of_a_large_run_is_small_without_the_scripts_of_bokeh(tmp_path: Path) -> None:
    workers = [
        WorkerLoad(f"tcp://10.0.0.{i}:40001", f"SLURMCluster-{i}", "cpu", 1, 0, 0, 0.0, True)
        for i in range(64)
    ]
    ops = [
        OpRun(
            f"op{i % 9}",
            f"('op-0a3a82a5e8d34b9f8d42770bf910f537', {i})",
            workers[i % 64].address,
            1,
            i,
            i + 1,
            True,
        )
        for i in range(20_000)
    ]
    flows = Counter({(a.address, b.address): 3 for a in workers for b in workers if a is not b})
    found = replace(recorded([]), ops=ops, n_ran=25_000, loads=workers, flow_counts=flows)
    found = replace(found, steals={"confirmed": 5000}, began=RunStart(1000.0, {}, Counter()))
    write_report(tmp_path / "r.html", "run", ["a line"], {"dask": "1"}, found, is_online=True)
    assert (tmp_path / "r.html").stat().st_size < 500_000
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "the longest 1,800 of 19,000 tasks" in text
    assert "only the last 20,000 of 25,000 tasks were recorded" in text
    assert "cdn.bokeh.org" in text


def test_a_report_leaves_out_what_is_empty(tmp_path: Path) -> None:
    def titles(found: Recording) -> set[str]:
        write_report(tmp_path / "r.html", "run", [], {}, found, is_online=True)
        text = (tmp_path / "r.html").read_text(encoding="utf-8")
        names = {"Run", "Timeline", "Steals", "Progress by level", "Failed tasks", "Preparation"}
        return {name for name in names if f"&lt;b&gt;{name}&lt;/b&gt;" in text}

    assert titles(recorded([])) == {"Run"}
    found = recorded(["a", "b"])
    assert titles(found) == {"Run", "Timeline"}
    progress = GraphProgress(lambda _: 1.0)
    progress.add([Task("a")], 1, 0.0)  # type: ignore[list-item]
    failure = Failure(2.0, "x", ("a",), "ValueError()", "")
    began = RunStart(0.5, {"confirmed": 1}, Counter({("tcp://0", "tcp://1"): 1}))
    later = OpRun("op", "later", "tcp://0", 1, 2.0, 3.0, False)
    found = replace(found, progress=progress, failures=[failure], began=began, steals={"confirmed": 1})
    found = replace(found, ops=[*found.ops, later])
    assert titles(found) == {"Run", "Timeline", "Progress by level", "Failed tasks", "Preparation"}
    assert found.measured().ops == [later]
    assert found.measured().steals == {"confirmed": 0}
    assert found.preparation().n_ops == 2


class Costly(Figure):
    """A figure that costs what it is told to."""

    title, help = "Costly", "What does it cost?"

    def make(self, options: dict[str, Any]) -> Any:
        self.n, self.spent_s, self.cost_s = 0, 0.0, 0.0
        return text()

    def refresh(self) -> None:
        self.n += 1
        self.spent_s += self.cost_s


def screen_of(*figures: Figure, is_watched: Callable[[], bool], **options: Any) -> Screen:
    return Screen(SimpleNamespace(sample=lambda: None), figures, is_watched, **options)


@pytest.mark.parametrize(
    ("cost_s", "expected"),
    [(0.001, 60), (0.01, 30), (1.0, 20)],
    ids=["each second", "each other second", "but each third at least"],
)
def test_what_costs_more_is_drawn_less_often(cost_s: float, expected: int) -> None:
    figure, now_s = Costly(recorded([])), [0.0]
    screen = screen_of(figure, is_watched=lambda: True, clock=lambda: now_s[0], cpu=lambda: figure.spent_s)
    figure.cost_s = cost_s
    for second in range(60):
        now_s[0] = float(second)
        screen.update()
    assert figure.n == expected


def test_nothing_is_drawn_while_nobody_looks_and_one_figure_does_not_stop_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(Costly):
        def refresh(self) -> None:
            raise RuntimeError("not today")

    figure, is_watched = Costly(recorded([])), [False]
    screen = screen_of(Fails(figure.recorder), figure, is_watched=lambda: is_watched[0])
    screen.update()
    assert figure.n == 0
    is_watched[0] = True
    with caplog.at_level(logging.ERROR, "ferroflow_dask"):
        screen.update()
    assert figure.n == 1
    assert "Fails is not up to date" in caplog.text


def test_tasks_have_the_colours_that_dask_gives_them_whatever_came_before() -> None:
    figure = Timeline(recorded(["a", "b"]))
    figure.update()
    assert set(figure.source.data["colour"]) == {color_of("op")}


def test_cells_have_numbers_where_there_is_room_and_a_legend() -> None:
    figure = StealFlow(recorded(["0", "1", "2"], {(0, 1): 1200, (1, 2): 3}))
    figure.update()
    assert figure.source.data["number"] == ["1,200", "3"]
    assert figure.source.data["ink"] == ["white", "black"]
    (legend,) = figure.content.right
    assert legend.color_mapper.high == 1200
    assert legend.ticker.ticks == [0, 600, 1200]
    many = StealFlow(recorded([str(i) for i in range(64)], {(0, 1): 5}))
    many.update()
    assert many.source.data["number"] == [""]


@pytest.mark.parametrize("kind", [StealFlow, Timeline, Levels, Workers, Failures, Details])
def test_a_panel_without_content_takes_no_room(kind: type[Figure]) -> None:
    figure = kind(replace(recorded([]), ops=[], n_ran=0), choice())
    figure.update()
    assert not figure.root.visible
    assert figure.help


def test_a_worker_has_its_reason_in_the_table_and_the_sums_above_it() -> None:
    workers = [replace(load, idle=Idle("restricted", 7), n_running=0) for load in loads(["a", "b"])]
    figure = Workers(replace(recorded([]), loads=[*workers, *loads(["c"])]))
    figure.update()
    assert figure.content.text.count("restricted 7") == 2
    assert "2 restricted" in figure._head.text


def test_levels_are_bounded_beside_a_task_that_never_ends() -> None:
    progress, n = GraphProgress(lambda _: 1.0), MOST_LEVELS + 500
    last = Task("x-0")
    progress.add([Task("never ends"), last], n_threads=2, now_s=0.0)  # type: ignore[list-item]
    for i in range(1, n):
        after = Task(f"x-{i}", last)
        progress.add([after], n_threads=2, now_s=float(i))  # type: ignore[list-item]
        progress.forget(last.key, float(i))
        last = after
    assert len(progress.levels) == MOST_LEVELS
    assert sum(level.n_tasks for level in progress.levels) == progress.n_tasks == n + 1
    assert sum(level.n_done for level in progress.levels) == progress.n_done == n - 1
    assert len(progress._tasks) == 2
    figure = Levels(replace(recorded([]), progress=progress))
    figure.update()
    assert figure.content.xaxis[0].axis_label == "level (the last: all from there on)"
