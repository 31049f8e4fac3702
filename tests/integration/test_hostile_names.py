"""Names with markup and control characters: text on pages, in reports, in a terminal, in logs and metrics."""

from __future__ import annotations

import io
import json
import logging
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from bench_rows import fields
from browser import chromium, close_all, opened
from command_line import answer, ferroflow
from in_charge import served
from models import model_of
from onnx import TensorProto, helper
from recordings import EMPTY
from rich.console import Console

import ferroflow_dask
from ferroflow_dask.dashboard.recording import WorkerLoad
from ferroflow_dask.dashboard.terminal import view
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.printable import printable

HOSTILE = "<img src=x onerror=document.title='pwned'>\x1b[31m\x07\x9b2J\u202e"
LOCAL = ("--workers", "1", "--no-processes")


def is_clean(text: str) -> bool:
    """Return whether a terminal obeys nothing of a text but newlines."""
    return text == printable(text)


def assert_clean(*arguments: Any) -> str:
    done = answer(*arguments)
    assert is_clean(done.stdout), done.stdout
    assert is_clean(done.stderr), done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def _browsers_end() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def hostile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """A folder with a graph and a model whose names are hostile; logs must be clean."""
    ops = [
        {"name": f"{HOSTILE}-{i}", "duration_s": 0.01, "inputs": [f"{HOSTILE}-{i - 1}"] if i else []}
        for i in range(4)
    ]
    graph = {"format": "ferroflow graph", "version": 1, "name": HOSTILE, "ops": ops}
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    x = f"x{HOSTILE}"
    nodes = [helper.make_node("Relu", [x], [HOSTILE], name=f"node{HOSTILE}")]
    model = model_of(nodes, {x: (TensorProto.FLOAT, ("n", 3))}, [HOSTILE])
    model.graph.name = HOSTILE
    onnx.save(model, tmp_path / "model.onnx")
    caplog.set_level(logging.INFO, "ferroflow_dask")
    yield tmp_path
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("ferroflow")]
    assert all(map(is_clean, ours)), ours


def test_control_characters_are_escaped() -> None:
    assert printable("a b\tc\nd é") == "a b\tc\nd é"
    assert printable("\x1b[31m\x07\r\u202e") == "\\x1b[31m\\x07\\r\\u202e"
    assert str(UsageError("\x1b[31mred")) == "\\x1b[31mred"


@pytest.mark.parametrize("command", ["info", "simulate", "search"])
def test_commands_print_names_as_text(command: str, hostile: Path) -> None:
    budget = ("--steps", "3", "--costs", "analytic") if command == "search" else ()
    assert "\\x1b[31m" in assert_clean(command, "--dag", hostile / "graph.json", *budget)


def test_a_model_with_hostile_names_runs(hostile: Path) -> None:
    assert_clean("info", "--model", hostile / "model.onnx")
    assert "1 ops" in assert_clean("run", "--model", hostile / "model.onnx", *LOCAL)


def test_errors_are_clean(hostile: Path) -> None:
    done = ferroflow("run", "--model", hostile / "model.onnx", "--input", f"{HOSTILE}=x.npy", *LOCAL)
    assert done.exit_code != 0
    assert is_clean(done.stderr)
    assert done.stderr.count("\n") == 1


def test_the_tables_of_a_report_are_clean(tmp_path: Path) -> None:
    rows = [
        fields(workload=HOSTILE, policy=policy, repetition=i) for policy in ("dask", "x\x1b") for i in (0, 1)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert is_clean(ferroflow("report", tmp_path / "rows.jsonl").output)
    assert ferroflow("report", tmp_path / "rows.jsonl", "--page", tmp_path / "page.md").exit_code == 0
    for written in (tmp_path / "page.md", tmp_path / "page.svg"):
        assert is_clean(written.read_text())
    ElementTree.parse(tmp_path / "page.svg")


def test_a_worker_is_shown_as_text() -> None:
    load = WorkerLoad("a", HOSTILE[-12:], "cpu", 1, 0, 0, 0.0, True, 0.5, 1, 2)
    shown = io.StringIO()
    Console(width=100, file=shown).print(view(replace(EMPTY, loads=[load]), 100))
    assert is_clean(shown.getvalue())
    assert "x1b" in shown.getvalue()


def assert_text_in_browser(page: Path) -> None:
    chromium()
    with opened(page.as_uri()) as driver:
        assert driver.title != "pwned"
        assert not driver.find_elements("css selector", "img[src='x']")


@pytest.mark.cluster
def test_reports_show_names_as_text(hostile: Path) -> None:
    page, simulated, trace = hostile / "run.html", hostile / "simulated.html", hostile / "trace.json"
    graph = hostile / "graph.json"
    assert_clean("run", "--dag", graph, "--granularity", "ops", "--report", page, "--trace", trace, *LOCAL)
    assert_clean("simulate", "--dag", graph, "--html", simulated, "--repeat", "1")
    assert json.loads(trace.read_text())["traceEvents"]
    for one in (page, simulated):
        assert "<img src=x" not in one.read_text()
        assert_text_in_browser(one)


@pytest.mark.cluster
def test_metrics_and_explanations_are_clean() -> None:
    with served(2) as client:
        cluster = client.cluster
        ferroflow_dask.install(client)
        futures = client.map(np.sqrt, range(4), key=[f"{HOSTILE}-{i}" for i in range(4)])
        client.gather(futures)
        port = cluster.scheduler.http_server.port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as found:
            lines = [line for line in found.read().decode().splitlines() if "ferroflow" in line]
        assert lines
        assert all(is_clean(line) and "<img" not in line for line in lines)
        assert_clean("explain", futures[0].key, "--connect", cluster.scheduler_address)
        ferroflow_dask.uninstall(client)
