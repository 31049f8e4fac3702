"""`ferroflow run --strategy` and `ferroflow info --strategy`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow

from ferroflow_dask.graph import generate_graph
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.strategy import Configuration, Strategy, signature_of, write_strategy
from ferroflow_dask.strategy.report import describe

GRAPH = ("--dag", "uniform", "--n", "3", "--dim", "8")


def strategy() -> Strategy:
    """Split by columns, then rows; the last product stays whole on the second worker."""
    graph = generate_graph("uniform", n=3, dim=8)
    first, second, third = (op.name for op in graph.live_ops)
    operators = {
        first: Configuration(("0", "1"), {"parameter1": 2}),
        second: Configuration(("0", "1"), {"contracted": 2}),
        third: Configuration(("1",)),
    }
    return Strategy(("0", "1"), operators, graph.name, signature_of(graph))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "s.json"
    write_strategy(strategy(), path)
    return path


def test_the_report_counts_each_value_that_moves_once() -> None:
    graph = generate_graph("uniform", n=3, dim=8)
    report = describe(graph, strategy())
    first, second, third = report.operators.values()
    assert first.nbytes_sent == 0  # columns stay where they are
    assert second.nbytes_sent == 8 * 8 * 4  # the partial result of the first worker
    assert third.nbytes_sent == 0
    assert report.nbytes_moved == 8 * 8 * 4
    # The first worker reads X and half of W twice; the second one W as a whole, too.
    assert report.weight_nbytes == {"0": 256 + 2 * 128, "1": 2 * 256 + 2 * 128}
    assert report.n_ops == 7


def test_info_shows_what_becomes_of_each_operator(file: Path) -> None:
    text = answer("info", *GRAPH, "--strategy", file).output
    assert "7 ops in parts; 256 B move; weights: 0 512 B, 1 768 B" in " ".join(text.split())
    assert "parameter1 2" in text
    facts = json.loads(answer("info", *GRAPH, "--strategy", file, "--json").output)["strategy"]
    assert facts["bytes_moved"] == 256
    assert [one["split"] for one in facts["operators"].values()] == [{"parameter1": 2}, {"contracted": 2}, {}]


def test_info_predicts_and_draws_a_strategy(file: Path, tmp_path: Path) -> None:
    dot = tmp_path / "s.dot"
    facts = json.loads(answer("info", *GRAPH, "--strategy", file, "--dot", dot, "--json").output)["strategy"]
    # Three products of 8 × 8: messages cost more than the products.
    assert facts["predicted_s"] > facts["one_device_s"] > 0
    text = dot.read_text()
    assert text.count('style="striped"') == 2
    assert text.count('style="filled"') == 1
    assert "parameter1 2\\non 0 1" in text
    assert "predicted: " in answer("info", *GRAPH, "--strategy", file).output
    if shutil.which("dot") is not None:
        answer("info", *GRAPH, "--strategy", file, "--dot", tmp_path / "s.svg")
        assert "contracted 2" in (tmp_path / "s.svg").read_text()


@pytest.mark.cluster
def test_run_computes_the_same(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "y.npz"
    options = ("--strategy", file, "--workers", 2, "--output", output, "--json")
    facts = json.loads(answer("run", *GRAPH, *map(str, options)).output.splitlines()[-1])
    assert facts["executed_ops"] == facts["compute_ops"] == 7
    assert facts["granularity"] == "bundles"
    expected = evaluate(generate_graph("uniform", n=3, dim=8))
    with np.load(output) as found:
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4)


BAD = {
    "another model": ((), '"signature": "x"', "another model or version"),
    "an operator of none": (("--n", "2"), None, "another model or version"),
    "a truncated file": ((), "", "damaged or truncated"),
    "sequential": (("--policy", "sequential"), None, "--policy sequential has none"),
    "batches": (("--batch", "2"), None, "leave one out"),
    "whole": (("--granularity", "whole"), None, "needs --granularity auto, bundles or ops, got 'whole'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_line(name: str, file: Path) -> None:
    options, text, expected = BAD[name]
    if text == "":
        file.write_text(file.read_text()[:-20])
    elif text is not None:
        signature = strategy().signature
        file.write_text(file.read_text().replace(f'"signature": "{signature}"', text))
    result = ferroflow("run", *GRAPH, "--strategy", file, *options)
    assert_one_line(result.exit_code, result.stderr, USAGE, expected)


@pytest.mark.cluster
def test_a_cluster_that_lacks_a_worker_is_one_line(file: Path) -> None:
    result = ferroflow("run", *GRAPH, "--strategy", file, "--workers", "1")
    last = result.stderr.splitlines()[-1] + "\n"
    assert_one_line(result.exit_code, last, USAGE, "worker '1' of the strategy must be one of")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    for command in ("run", "info"):
        result = ferroflow(command, *GRAPH, "--strategy", tmp_path / "none.json")
        assert_one_line(result.exit_code, result.stderr, USAGE, "a strategy must be a JSON file")
