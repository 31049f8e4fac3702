"""The page of Dask's dashboard: where it is, what it notes, and what it costs when nobody looks."""

from __future__ import annotations

import inspect
import json
import logging
import math
import time
import urllib.request
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import dask
import pytest
from distributed import Client
from distributed.dashboard import components
from distributed.dashboard import scheduler as dask_pages
from distributed.dashboard.components import scheduler as dask_components
from distributed.dashboard.core import BokehApplication
from in_charge import run_stolen, served
from rich.console import Console
from waiting import pause, until

import ferroflow_dask
from ferroflow_dask.dashboard import recorder as recorders
from ferroflow_dask.dashboard import remote, stock
from ferroflow_dask.dashboard.figures import StealFlow
from ferroflow_dask.dashboard.recorder import (
    MOST_OPS,
    SUMMARY_SAMPLES,
    Recorder,
    start_recording,
    stop_recording,
)
from ferroflow_dask.dashboard.recording import Sample
from ferroflow_dask.dashboard.remote import begin_run, recording
from ferroflow_dask.dashboard.report import write_report, write_trace
from ferroflow_dask.dashboard.terminal import line, view
from ferroflow_dask.scheduler.extension import FerroflowStealing

PLOTS = [
    *("overview", "failures", "timeline", "workers", "rates", "levels", "steals", "bundles", "decisions"),
    "features",
]


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of three workers in this process whose scheduler has a dashboard."""
    with (
        dask.config.set({"distributed.scheduler.validate": True}),
        served(3, set_as_default=True) as found,
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
    run_stolen(client, n)


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


def test_the_layout_for_jupyterlab_has_plots_that_exist() -> None:
    file = Path(__file__).parents[2] / "examples" / "jupyterlab-layout.json"
    # Settings of a user replace the extension's layout; an overrides.json would be merged with it.
    layout = json.loads(file.read_text(encoding="utf-8"))["defaultLayout"]
    seen: list[str | None] = [None]
    for plot, place in layout.items():
        assert plot.removeprefix("individual-ferroflow-") in PLOTS
        assert place["mode"] in {"split-right", "split-bottom", "tab-before"}  # of dask-labextension's schema
        assert place["ref"] in seen  # relative to one that is there already
        seen.append(plot)


def test_stock_pages_answer_and_have_our_steals(client: Client) -> None:
    before = get(client, "sitemap.json")[0]  # Dask's own page fails with a status of 500
    ferroflow_dask.install(client)
    busy(client)
    for page in ("status", "stealing", "tasks", "workers", "metrics", "individual-plots.json", "ferroflow"):
        assert get(client, page)[0] == 200, page
    for plot in PLOTS:
        assert get(client, f"individual-ferroflow-{plot}")[0] == 200
    for path in ("nowhere", "ferroflow/nowhere", "status/nowhere", "static/nowhere.js"):
        assert get(client, path)[0] == 404, path
    assert get(client, "sitemap.json")[0] == before
    steals = client.cluster.scheduler.extensions["stealing"].steals
    assert steals["confirmed"] > 0
    metrics = get(client, "metrics")[1]
    assert f'ferroflow_steals_total{{outcome="confirmed"}} {float(steals["confirmed"])}' in metrics


def test_without_a_dashboard_nothing_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    with (
        served(1, scheduler_kwargs={"dashboard": False}) as client,
        caplog.at_level(logging.WARNING, "ferroflow_dask"),
    ):
        cluster = client.cluster
        ferroflow_dask.install(cluster)
        assert isinstance(cluster.scheduler.extensions["stealing"], FerroflowStealing)
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
    assert "ferroflow: page is not available" in caplog.text


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (dask_pages, "applications"),
        (dask_pages, "template_variables"),
        (components, "add_periodic_callback"),
        (dask_components, "BOKEH_THEME"),
        (dask_components, "env"),
    ],
)
def test_names_of_dasks_dashboard_are_there(owner: Any, name: str) -> None:
    assert hasattr(owner, name)


def test_dasks_application_of_pages_takes_what_it_is_given() -> None:
    server = object()
    taken = inspect.signature(BokehApplication).bind({}, server, prefix="/", template_variables={})
    assert taken.arguments["server"] is server


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


def test_a_renewal_that_comes_too_late_starts_nothing(client: Client) -> None:
    scheduler = client.cluster.scheduler
    with recording(client):
        (who,) = recorders._recorders[scheduler][1]._until_s
    remote._renew(scheduler, who)
    assert Recorder.name not in scheduler.plugins


def test_a_client_that_is_there_is_not_forgotten(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LEASE_S", 3.0)
    with recording(client) as look:
        busy(client)
        _, users = recorders._recorders[client.cluster.scheduler]
        (until_s,) = users._until_s.values()
        while list(users._until_s.values()) == [until_s]:  # it asks again before its time is over
            time.sleep(0.01)
        assert users.any()
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
    # One may be stolen twice.
    assert 0 < sum(op.stolen for op in found.ops) <= stealing.steals["confirmed"]
    assert sum(found.flows().values()) == stealing.steals["confirmed"]
    assert {op.worker for op in found.ops} <= set(client.nthreads())
    assert found.progress.n_tasks == found.progress.n_done == 13
    assert found.progress.ended_at is not None
    assert [level.n_tasks for level in found.progress.levels] == [1, 12]
    assert all(0 <= sample.efficiency <= 1 for sample in found.samples)


def test_the_makespan_under_stock_dask_is_simulated_after_the_run(client: Client) -> None:
    ferroflow_dask.install(client)

    def nap(_: int) -> None:
        time.sleep(0.01)

    with recording(client) as look:
        client.gather(client.map(nap, range(90)))
        until(lambda: look().stock_s is not None)
        found = look()
        assert 0.3 < found.stock_s < 10  # three threads sleep for 0.9 s in all
        assert f"as single tasks of Dask: {found.stock_s:.2f} s (simulated)" in line(found)


def test_more_tasks_than_can_be_copied_are_not_simulated(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "_MOST_TASKS", 10)
    ferroflow_dask.install(client)
    with recording(client) as look:
        busy(client)
        until(lambda: look().progress.is_all_done)
        time.sleep(0.3)
        assert look().stock_s is None
        client.gather(client.map(str, range(5)))
        until(lambda: look().stock_s is not None)


def test_a_graph_is_one_with_its_sample(client: Client) -> None:
    ferroflow_dask.install(client)
    scheduler = client.cluster.scheduler
    recorder = start_recording(scheduler, "test")
    naps = [dask.delayed(pause)(i, 0.02) for i in range(40)]
    assert client.compute(dask.delayed(sum)(naps)).result() == sum(range(40))
    decisions = scheduler.extensions["stealing"].decisions.last(1000)
    assert any(decision.what == "in a sample" for decision in decisions)
    assert recorder.progress.n_done == recorder.progress.n_tasks == recorder.n_ops
    stop_recording(scheduler, "test")


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


def test_rates_start_at_zero_and_a_time_without_a_look_is_a_gap(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(recorders, "time", lambda: now_s[0])
    ferroflow_dask.install(client)
    busy(client)
    assert client.cluster.scheduler.extensions["stealing"].steals["confirmed"] > 0
    recorder = start_recording(client.cluster.scheduler, "test")
    now_s[0] += 1.0
    recorder.sample()
    assert [(one.tasks_per_s, one.steals_per_s) for one in recorder.samples] == [(0.0, 0.0), (0.0, 0.0)]
    busy(client)
    now_s[0] += 1.0
    recorder.sample()
    assert recorder.samples[-1].tasks_per_s == 13.0
    busy(client)
    now_s[0] += 600.0  # the browser was hidden
    recorder.sample()
    gap, first = list(recorder.samples)[-2:]
    assert math.isnan(gap.tasks_per_s)
    assert math.isnan(gap.efficiency)
    assert (first.time, first.tasks_per_s, first.steals_per_s) == (1602.0, 0.0, 0.0)
    shown = Console(file=StringIO(), width=100, record=True)
    shown.print(view(recorder.recording(), 100))
    assert "tasks/s  ▁▁█ ▁ 0 · " in shown.export_text()
    stop_recording(client.cluster.scheduler, "test")


def test_steals_from_workers_that_left_count_still(client: Client) -> None:
    ferroflow_dask.install(client)
    scheduler = client.cluster.scheduler
    figure = StealFlow(start_recording(scheduler, "test"))
    busy(client)
    figure.update()
    before, n = figure._head.text, scheduler.extensions["stealing"].steals["confirmed"]
    assert n > 0
    assert f"{n} in all" in before
    client.retire_workers([victim for victim, _ in scheduler.extensions["stealing"].flows])
    figure.update()
    assert not figure.source.data["steals"]
    assert figure._head.text == before
    stop_recording(scheduler, "test")


def test_a_look_in_a_terminal_fetches_what_it_shows(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "SAMPLE_S", float("inf"))  # both looks see the same
    ferroflow_dask.install(client)
    with recording(client) as look, recording(client, is_summary=True) as glance:
        busy(client)
        recorder = client.cluster.scheduler.plugins[Recorder.name]
        recorder.samples.clear()
        recorder.samples.extend(Sample(float(i), 1.0, 1.0, 0.0, 0.0, 1.0) for i in range(1000))
        recorder.n_samples = 1000
        full, found = look(), glance()
    assert len(full.samples) == 1000
    assert len(full.progress.levels) == 2
    assert full.flows()
    assert (found.ops, found.progress.levels, found.flows()) == ([], [], {})
    assert found.samples == full.samples[-SUMMARY_SAMPLES:]
    assert view(found).renderables[:4] == view(full).renderables[:4]
    assert line(found)[8:] == line(full)[8:]


# What stays


def test_report_and_trace(client: Client, tmp_path: Path) -> None:
    ferroflow_dask.install(client)
    with recording(client) as look:
        busy(client, 6)
        begin_run(client)
        busy(client)
        found = look()
    assert (found.n_ops, found.measured().n_ops, found.preparation().n_ops) == (20, 13, 7)
    write_report(tmp_path / "r.html", "<b>title", ["<i>line"], {"dask": "1"}, found)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<b>title" not in text
    assert "&lt;b&gt;title" in text
    assert "3 workers, 3 threads, 13 tasks in " in text
    assert "before the run: 7 tasks in " in text
    assert found.measured().progress.n_tasks == 13
    assert "cdn.bokeh.org" not in text.partition("<body>")[2]
    write_trace(tmp_path / "t.json", found)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X"]
    assert len(tasks) == 20
    assert min(event["ts"] for event in tasks) == 0
    n_stolen, n_steals = sum(event["args"]["stolen"] for event in tasks), sum(found.flows().values())
    assert n_stolen <= n_steals, "one may be stolen twice"
    assert bool(n_stolen) == bool(n_steals)
    assert {event["ph"] for event in events} == {"X", "M"}
