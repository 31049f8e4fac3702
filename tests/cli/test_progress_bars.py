"""Progress bars on a terminal: amount, rate and time left of what takes longer than two seconds."""

from __future__ import annotations

import threading

import dask.array as da
import numpy as np
import pytest
from command_line import answer
from distributed import Client, wait
from models import mlp

import ferroflow_dask
from ferroflow_dask.cli.progress import _finished, late_bar
from ferroflow_dask.graph import generate_graph
from ferroflow_dask.lowering import scatter


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes any stream for a terminal
    monkeypatch.setattr("ferroflow_dask.cli.progress._DELAY_S", 0.05)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("unit", "amount"), [("rows", "30/40"), ("B", "30 B of 40 B")])
def test_a_bar_shows_amount_and_rate(capsys: pytest.CaptureFixture[str], unit: str, amount: str) -> None:
    shown: list[str] = []
    with late_bar("sheep", unit) as update:
        for done in (10, 20, 30):
            update(done, 40)
            threading.Event().wait(0.2)
        shown.append(capsys.readouterr().err)
    assert "sheep" in shown[0]
    assert amount in shown[0]
    assert f" {unit}/s" in shown[0]


@pytest.mark.parametrize(("is_terminal", "delay_s"), [(True, 60), (False, 0)])
def test_there_is_no_bar_of_what_ends_soon_and_where_output_is_no_terminal(
    is_terminal: bool, delay_s: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("ferroflow_dask.cli.progress._DELAY_S", delay_s)
    with late_bar("sheep", "sheep") as update:
        threading.Event().wait(0.1)
        update(1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.cluster
@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("run", "--dag", "imbalanced", "--n-heavy", "12", "--heavy-ms", "100", "--policy", "dask"), "tasks"),
        (("calibrate",), "measurements"),
    ],
    ids=["run", "calibrate"],
)
def test_commands_show_bars(arguments: tuple[str, ...], shown: str) -> None:
    done = answer(*arguments, "--workers", "1", "--no-processes")
    assert f"{shown} " in done.stderr
    assert f" {shown}/s" in done.stderr


@pytest.mark.cluster
def test_batches_are_counted(thread_client: Client) -> None:
    model = ferroflow_dask.load_onnx(mlp())
    y = model.map_batches(da.from_array(np.zeros((6, 784), np.float32), chunks=(2, -1)))
    future = thread_client.compute(y)
    wait(future)
    assert thread_client.run_on_scheduler(_finished, run=y.name) == 3


@pytest.mark.cluster
def test_weights_are_counted(thread_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = generate_graph("matmul-chain", n_ops=3, m=8)
    nbytes = [source.value.nbytes for source in graph.sources if not source.is_input]
    monkeypatch.setattr("ferroflow_dask.lowering.scattering._GROUP_NBYTES", 1)
    copied: list[tuple[int, int]] = []
    scatter(graph, thread_client, lambda *told: copied.append(told))
    assert copied == [(sum(nbytes[: i + 1]), sum(nbytes)) for i in range(len(nbytes))]
    assert len(copied) > 1
