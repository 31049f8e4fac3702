"""`ferroflow top` and `run --dashboard`: in a real terminal, in a dumb one, and into a file."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import waiting
from command_line import FAILURE, assert_one_line, ferroflow
from distributed import Client
from in_charge import served
from rich.console import Console
from terminal import terminal

import ferroflow_dask
from ferroflow_dask.dashboard.recording import Recording
from ferroflow_dask.dashboard.remote import recording
from ferroflow_dask.dashboard.terminal import _keys, watching
from ferroflow_dask.exceptions import ClusterError

TOP = Path(sys.executable).with_name("ferroflow")
COLUMNS = r"worker +state +run +wait +cpu +memory +left"

soon = partial(waiting.soon, within_s=60.0)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(3, protocol="tcp://", host="127.0.0.1") as found:
        ferroflow_dask.install(found)
        yield found


@pytest.mark.parametrize(("width", "height"), [(60, 20), (120, 40)])
def test_top_in_a_terminal(client: Client, tmp_path: Path, width: int, height: int) -> None:
    address = client.scheduler_info()["address"]
    with terminal(tmp_path, f"{TOP} top --connect {address}", width, height) as shown:
        screen = shown.screen
        assert soon(lambda: re.search(COLUMNS, screen())), screen()
        assert "3 workers · 3 threads · policy ferroflow" in screen()
        assert "nothing was submitted since this was started" in screen()
        graph = ferroflow_dask.generate("imbalanced", n_heavy=3, heavy_ms=5000.0, n_fast=20)
        future = client.compute(graph.bind(granularity="ops"))
        assert soon(lambda: re.search(r"^\d +executing +1/1", screen(), re.MULTILINE)), screen()
        future.result()
        assert soon(lambda: "graph    25 of 25 tasks took " in screen()), screen()
        text = screen()
        assert len(re.findall(r"^\d +done +0/1 +0 +\d+% +\d+% +0\.00 s", text, re.MULTILINE)) == 3, text
        assert re.search(r"^tasks/s  [▁▂▃▄▅▆▇█]+ [\d,]+ · \d+% of threads at work", text, re.MULTILINE)
        assert re.search(r"^steals   \d+ of \d+ asked", text, re.MULTILINE)
        shown.press("q")
        assert soon(lambda: "ended with 0" in screen()), screen()


@pytest.mark.parametrize("kind", ["dumb", "xterm"])
def test_top_into_a_file(client: Client, kind: str) -> None:
    address = client.scheduler_info()["address"]
    environment = {**os.environ, "TERM": kind}
    done = subprocess.run(
        [TOP, "top", "--connect", address, "--for", "5"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert 2 <= len(lines) <= 7
    assert all(re.match(r"\d\d:\d\d:\d\d .* · \d+ stolen$", line) for line in lines)
    assert "\x1b" not in done.stdout


def test_run_shows_writes_and_still_prints_its_result(tmp_path: Path) -> None:
    report, trace = tmp_path / "r.html", tmp_path / "t.json"
    result = ferroflow(
        *("run", "--dag", "wide", "--workers", "2", "--no-processes", "--granularity", "ops"),
        *("--dashboard", "--report", str(report), "--trace", str(trace)),
    )
    assert result.exit_code == 0, result.output
    assert "wide · ferroflow · 2 × 1 in one process: 40 ops" in result.stdout
    assert re.search(r"\d\d:\d\d:\d\d ", result.stderr)
    text = report.read_text(encoding="utf-8")
    assert "40 ops in" in text
    assert "2 workers, 2 threads, 40 tasks in " in text  # those of the warm-up apart
    assert trace.read_text(encoding="utf-8").count('"ph": "X"') >= 40


def test_what_cannot_be_written_is_told_for_each_file_and_the_result_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ferroflow_dask.dashboard.report.write_report", full)
    monkeypatch.setattr("ferroflow_dask.dashboard.report.write_trace", full)
    result = ferroflow(
        *("run", "--dag", "wide", "--workers", "2", "--no-processes", "--granularity", "ops"),
        *("--report", tmp_path / "r.html", "--trace", tmp_path / "t.json"),
    )
    assert result.exit_code == FAILURE
    assert "wide · ferroflow · 2 × 1 in one process: 40 ops" in result.stdout
    lines = [line for line in result.stderr.splitlines() if "cannot" in line]
    assert len(lines) == 2
    for option, name, told in zip(("report", "trace"), ("r.html", "t.json"), lines, strict=True):
        where = re.escape(str(tmp_path / name))
        assert re.fullmatch(
            f"ferroflow: --{option} '{where}' cannot be written: No space left on device", told
        )


class Gone:
    """A scheduler that answers once."""

    def __init__(self, recording: Recording) -> None:
        self._answers = [recording]
        self.asked = threading.Event()

    def __call__(self) -> Recording:
        if self._answers:
            return self._answers.pop()
        self.asked.set()
        raise ClusterError("the scheduler is gone")


def test_a_scheduler_that_goes_ends_the_view_quietly(
    client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    with recording(client, is_summary=True) as look:
        gone = Gone(look())
    with watching(gone, Console(file=io.StringIO())):
        assert gone.asked.wait(30)
    assert "Traceback" not in capfd.readouterr().err


def test_top_ends_in_one_line_where_the_scheduler_goes(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("ConnectionPool is closed")

    address = client.scheduler_info()["address"]
    monkeypatch.setattr("ferroflow_dask.dashboard.remote._recording", gone)
    result = ferroflow("top", "--connect", address)
    assert_one_line(result.exit_code, result.stderr, FAILURE, f"the scheduler at {address} is gone")


def test_a_terminal_that_fails_is_not_told_as_the_scheduler(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("ferroflow_dask.dashboard.terminal.watch", fails)
    result = ferroflow("top", "--connect", client.scheduler_info()["address"])
    assert_one_line(result.exit_code, result.stderr, FAILURE, "^ferroflow: Input/output error$")


def test_a_terminal_of_another_session_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(ours), os.fdopen(theirs) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert stdin.isatty()
        with _keys() as pressed:
            assert pressed(0.0) == ""
        monkeypatch.undo()
