"""The page of Dask's dashboard: where it is, what it notes, and what it costs when nobody looks."""

from __future__ import annotations

import json
import logging
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import dask
import pytest
from bokeh.document import Document
from distributed import Client, Event, LocalCluster
from distributed.dashboard import components
from distributed.dashboard import scheduler as dask_pages
from distributed.dashboard.components import scheduler as dask_components
from distributed.dashboard.core import BokehApplication
from in_charge import until

import ferroflow_dask
from ferroflow_dask.dashboard import remote
from ferroflow_dask.dashboard.charts import Levels
from ferroflow_dask.dashboard.figures import Figure, Queues, StealFlow, Timeline
from ferroflow_dask.dashboard.progress import MOST_LEVELS, MOST_TASKS, GraphProgress
from ferroflow_dask.dashboard.recorder import (
    MOST_OPS,
    OpRun,
    Recorder,
    Recording,
    WorkerLoad,
    start_recording,
    stop_recording,
)
from ferroflow_dask.dashboard.remote import recording
from ferroflow_dask.dashboard.report import write_report, write_trace
from ferroflow_dask.dashboard.screen import Screen
from ferroflow_dask.dashboard.style import Palette
from ferroflow_dask.dashboard.terminal import line, view

PLOTS = ["steals", "timeline", "queues", "rates", "levels", "decisions"]


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of three workers in this process whose scheduler has a dashboard."""
    with (
        dask.config.set({"distributed.scheduler.validate": True}),
        LocalCluster(
            n_workers=3,
            threads_per_worker=1,
            processes=False,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster) as found,
    ):
        yield found


def get(client: Client, page: str) -> tuple[int, str]:
    base = f"http://127.0.0.1:{client.cluster.scheduler.http_server.port}"
    try:
        with urllib.request.urlopen(f"{base}/{page}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, ""


def busy(client: Client, n: int = 12) -> None:
    """Run some tasks that are stolen."""

    def load(is_all_known: Event) -> int:
        is_all_known.wait()
        return 1

    def work(_: int, i: int) -> int:
        time.sleep(0.1 if i % 3 == 0 else 0.01)
        return i

    # Or the root could end before the others come: then they would be a graph of their own.
    is_all_known = Event(client=client)
    root = client.submit(load, is_all_known, pure=False, workers=[next(iter(client.nthreads()))])
    futures = client.map(work, [root] * n, range(n), pure=False)
    until(lambda: all(future.key in client.cluster.scheduler.tasks for future in futures))
    is_all_known.set()
    assert client.gather(futures) == list(range(n))


# Where it is


def test_the_page_comes_and_goes_with_the_plugin(client: Client) -> None:
    def is_there() -> list[bool]:
        status = get(client, "status")[1]
        plots = json.loads(get(client, "individual-plots.json")[1])
        return [
            get(client, "ferroflow")[0] == 200,
            'href="ferroflow"' in status,
            all(f"individual-ferroflow-{plot}" in status for plot in PLOTS),
            all(f"/individual-ferroflow-{plot}" in plots.values() for plot in PLOTS),
        ]

    assert not any(is_there())
    n_pages = len(json.loads(get(client, "individual-plots.json")[1]))
    for _ in range(3):
        ferroflow_dask.install(client)
        assert all(is_there())
        ferroflow_dask.uninstall(client)
        assert not any(is_there())
    assert len(json.loads(get(client, "individual-plots.json")[1])) == n_pages
    ferroflow_dask.install(client, "ring")
    ferroflow_dask.install(client, "ferroflow")  # in its place
    assert all(is_there())
    tornado = [
        app
        for app in client.cluster.scheduler.http_application.applications
        if type(app).__name__ == "DaskBokehTornado"
    ]
    assert len(tornado) == 2  # Dask's and ours


def test_a_preload_brings_the_page_too() -> None:
    with (
        dask.config.set({"distributed.scheduler.preload": ["ferroflow_dask.preload"]}),
        LocalCluster(
            n_workers=1, processes=False, dashboard_address="127.0.0.1:0", silence_logs=logging.ERROR
        ) as cluster,
        Client(cluster) as client,
    ):
        assert get(client, "ferroflow")[0] == 200


def test_stock_pages_answer_and_have_our_steals(client: Client) -> None:
    ferroflow_dask.install(client)
    busy(client)
    for page in ("status", "stealing", "tasks", "workers", "metrics", "individual-plots.json", "ferroflow"):
        assert get(client, page)[0] == 200, page
    for plot in PLOTS:
        assert get(client, f"individual-ferroflow-{plot}")[0] == 200
    steals = client.cluster.scheduler.extensions["stealing"].steals
    assert steals["confirmed"] > 0
    metrics = get(client, "metrics")[1]
    assert f'ferroflow_steals_total{{outcome="confirmed"}} {float(steals["confirmed"])}' in metrics


def test_without_a_dashboard_nothing_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    with (
        LocalCluster(
            n_workers=1,
            processes=False,
            dashboard_address=":0",
            scheduler_kwargs={"dashboard": False},
            silence_logs=logging.ERROR,
        ) as cluster,
        caplog.at_level(logging.WARNING, "ferroflow_dask"),
    ):
        ferroflow_dask.install(cluster)
        assert isinstance(cluster.scheduler.extensions["stealing"], ferroflow_dask.FerroflowStealing)
        ferroflow_dask.uninstall(cluster)
    # Clients of other tests may still be logging that their clusters are gone.
    assert not [record for record in caplog.records if record.name.startswith("ferroflow_dask")]


def test_a_page_that_fails_leaves_the_scheduler_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no page today")

    monkeypatch.setattr("ferroflow_dask.dashboard.pages.show_pages", fails)
    with caplog.at_level(logging.WARNING, "ferroflow_dask"):
        ferroflow_dask.install(client)
    busy(client)
    assert "ferroflow's page is not on the dashboard" in caplog.text


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (dask_pages, "applications"),
        (dask_pages, "template_variables"),
        (components, "DashboardComponent"),
        (components, "add_periodic_callback"),
        (dask_components, "BOKEH_THEME"),
        (dask_components, "env"),
    ],
)
def test_names_of_dasks_dashboard_are_there(owner: Any, name: str) -> None:
    assert hasattr(owner, name)
    assert callable(BokehApplication)


# What it notes


def test_nothing_is_recorded_unless_somebody_looks(client: Client) -> None:
    scheduler = client.cluster.scheduler
    ferroflow_dask.install(client)
    busy(client)
    assert Recorder.name not in scheduler.plugins
    one, two = (start_recording(scheduler, who) for who in ("one", "two"))
    assert one is two
    busy(client)
    assert one.n_ops == 13
    stop_recording(scheduler, "one")
    assert Recorder.name in scheduler.plugins
    stop_recording(scheduler, "two")
    assert Recorder.name not in scheduler.plugins


def test_who_leaves_without_a_word_is_forgotten(client: Client) -> None:
    scheduler = client.cluster.scheduler
    start_recording(scheduler, "gone", lease_s=0.0)
    client.gather(client.map(str, range(1500)))
    assert Recorder.name not in scheduler.plugins


def test_a_client_that_is_there_is_not_forgotten(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LEASE_S", 3.0)
    with recording(client) as look:
        busy(client)
        time.sleep(4.0)  # longer than it may be silent
        client.gather(client.map(str, range(1500)))
        assert look().n_ops == 1513
    assert Recorder.name not in client.cluster.scheduler.plugins


def test_what_is_recorded_equals_what_happened(client: Client) -> None:
    ferroflow_dask.install(client)
    with recording(client) as look:
        busy(client)
        time.sleep(0.3)
        found = look()
    stealing = client.cluster.scheduler.extensions["stealing"]
    assert found.n_ops == 13
    assert sum(op.stolen for op in found.ops) == stealing.steals["confirmed"] > 0
    assert sum(found.flows().values()) == stealing.steals["confirmed"]
    assert {op.worker for op in found.ops} <= set(client.nthreads())
    assert found.progress.n_tasks == found.progress.n_done == 13
    assert found.progress.ended_at is not None
    assert [level.n_tasks for level in found.progress.levels] == [1, 12]
    assert all(0 <= sample.efficiency <= 1 for sample in found.samples)


def test_memory_is_bounded(client: Client) -> None:
    scheduler = client.cluster.scheduler
    recorder = start_recording(scheduler, "test")
    span = {"action": "compute", "start": 0.0, "stop": 1.0}
    for i in range(MOST_OPS + 500):
        recorder.transition(f"x-{i}", "processing", "memory", worker="w", thread=1, startstops=[span])
    assert len(recorder.ops) == MOST_OPS
    assert recorder.n_ops == MOST_OPS + 500
    assert len(recorder.new_ops(recorder.n_ops - 3)) == 3
    stop_recording(scheduler, "test")
    assert MOST_TASKS >= 100_000


class Task:
    """What progress needs of a scheduler's task."""

    def __init__(self, key: str, *dependencies: Task) -> None:
        self.key, self.dependencies, self.dependents, self.state = key, dependencies, [], "waiting"
        for other in dependencies:
            other.dependents.append(self)


def test_progress_by_level_with_its_critical_path() -> None:
    seconds = {"a": 1.0, "b": 5.0, "c": 1.0, "d": 1.0, "e": 1.0}
    progress = GraphProgress(lambda ts: seconds[ts.key])
    a = Task("a")
    b, c = Task("b", a), Task("c", a)
    d = Task("d", b, c)
    progress.add([d, c, b, a], n_threads=2, now_s=10.0)  # type: ignore[list-item]
    assert [level.n_tasks for level in progress.levels] == [1, 2, 1]
    assert [level.n_critical for level in progress.levels] == [1, 1, 1]
    assert progress.predicted_s == progress.critical_s == 7.0
    progress.done("a", 11.0)
    progress.done("a", 11.0)  # computed again: counted once
    progress.done("c", 12.0)
    assert [(level.n_done, level.n_critical_done) for level in progress.levels] == [(1, 1), (1, 0), (0, 0)]
    assert progress.remaining_s(2) == pytest.approx(6.0)
    progress.forget("b", 13.0)
    progress.done("d", 14.0)
    assert progress.ended_at == 14.0
    progress.add([Task("e")], n_threads=1, now_s=20.0)  # type: ignore[list-item]
    assert progress.n_tasks == 1  # what was done before is over

    assert [level.critical_key for level in progress.levels] == ["e"]


def test_the_critical_path_counts_by_seconds() -> None:
    seconds = {"a": 1.0, "b": 9.0}
    progress = GraphProgress(lambda ts: seconds[ts.key])
    a = Task("a")
    progress.add([a, Task("b", a)], n_threads=8, now_s=0.0)  # type: ignore[list-item]
    progress.done("a", 1.0)
    assert [level.critical_s for level in progress.levels] == [1.0, 9.0]
    assert progress.remaining_s(8) == pytest.approx(9.0)


def test_work_that_comes_in_parts_is_predicted_from_the_first_part_on() -> None:
    progress = GraphProgress(lambda _: 1.0)
    for second in range(10):  # one at a time, on one thread
        progress.done(f"x-{second - 1}", float(second))
        new = ["x-0", "x-1"] if second == 0 else [f"x-{second + 1}"]
        progress.add([Task(key) for key in new], n_threads=1, now_s=float(second))  # type: ignore[misc]
    for second in (10, 11):
        progress.done(f"x-{second - 1}", float(second))
    assert progress.in_words(1) == "11 of 11 tasks in 11.00 s (predicted 11.00 s)"


def test_a_chain_that_is_continued_is_predicted_to_take_its_next_task() -> None:
    progress = GraphProgress(lambda _: 1.0)
    progress.add([Task("never ends")], n_threads=8, now_s=0.0)  # type: ignore[list-item]
    for second in range(10):
        progress.add([Task(f"x-{second}")], n_threads=8, now_s=float(second))  # type: ignore[list-item]
        assert progress.predicted_s == second + 1
        progress.done(f"x-{second}", second + 1.0)


def test_what_is_there_already_takes_no_time() -> None:
    progress = GraphProgress(lambda _: 1.0)
    loaded = Task("load")
    loaded.state = "memory"
    progress.add([loaded, Task("work", loaded)], n_threads=1, now_s=0.0)  # type: ignore[list-item]
    assert (progress.n_done, progress.predicted_s) == (1, 1.0)


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
    assert figure.root.xaxis[0].axis_label == "level (the last: all from there on)"


# What is drawn, and how often


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
@pytest.mark.parametrize("kind", [StealFlow, Queues, Timeline])
def test_as_many_names_are_on_an_axis_as_can_be_read(kind: type[Figure], n_workers: int) -> None:
    figure = kind(recorded([str(i) for i in range(n_workers)]))
    figure.update()
    axis = figure.root.yaxis[0]
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

    def workers(self) -> list[WorkerLoad]:
        return [WorkerLoad(name, name, "cpu", 2, 0, 0, 0.0, True) for name in self.present]


def rows(figure: Figure) -> list[tuple[str, int]]:
    """Which bar is in which row."""
    return list(zip(figure.source.data["worker"], figure.source.data["y"], strict=True))


def labels(figure: Figure) -> dict[int, str]:
    return dict(figure.root.yaxis[0].major_label_overrides)


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
    assert figure.root.y_range.start == 0.5 - 6
    assert set(figure._lanes._places) == {"b", "c", "d"}


@pytest.mark.parametrize("kind", [StealFlow, Queues, Timeline, Levels])
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


class Costly(Figure):
    """A figure that costs what it is told to."""

    def make(self, options: dict[str, Any]) -> Any:
        self.n, self.spent_s, self.cost_s = 0, 0.0, 0.0

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


def test_names_have_looks_however_many_there_are() -> None:
    palette = Palette()
    looks = [palette[f"name-{i}"] for i in range(5000)]
    assert looks == [palette[f"name-{i}"] for i in range(5000)]
    assert len(set(looks[:32])) == 32
    assert len(palette._index) < 1000


# What stays


def test_report_and_trace(client: Client, tmp_path: Path) -> None:
    ferroflow_dask.install(client)
    with recording(client) as look:
        busy(client)
        found = look()
    write_report(tmp_path / "r.html", "<b>title", ["<i>line"], {"dask": "1"}, found)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;title" in text
    assert "cdn.bokeh.org" not in text.partition("<body>")[2]
    write_trace(tmp_path / "t.json", found)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X"]
    assert len(tasks) == 13
    assert min(event["ts"] for event in tasks) == 0
    assert sum(event["args"]["stolen"] for event in tasks) == sum(found.flows().values())
    assert {event["ph"] for event in events} == {"X", "M"}


def test_terminal_shows_the_same_numbers(client: Client) -> None:
    from rich.console import Console

    ferroflow_dask.install(client)
    with recording(client) as look:
        busy(client)
        time.sleep(0.3)
        found = look()
    steals = found.steals["confirmed"]
    assert f"{steals} stolen" in line(found)
    assert "13 of 13 tasks in " in line(found)
    for width in (60, 100):
        console = Console(width=width, height=20, force_terminal=True, record=True, file=StringIO())
        console.print(view(found, width, 20))
        shown = console.export_text()
        assert f"steals   {steals} of " in shown
        assert all(len(row) <= width for row in shown.splitlines())
        assert shown.count(" done ") == 3
