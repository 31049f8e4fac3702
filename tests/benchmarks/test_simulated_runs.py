"""Simulations against reality: the numbers of a comparison, and one small real run."""

from __future__ import annotations

import json

import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow
from measure_simulator import main as program
from simulated_runs import Comparison, comparison_table, dask_graph, sleep, winners

from ferroflow_dask.bench.simulated_graphs import SLEEPS, virtual_graph
from ferroflow_dask.virtual.task import sinks


def test_a_comparison_knows_error_and_noise() -> None:
    one = Comparison("wide", 2, "dask", (1.0, 1.2, 1.1), 1.32)
    assert (one.median_s, one.error, one.noise) == (1.1, pytest.approx(0.2), pytest.approx(0.2))


def test_the_mean_error_counts_both_directions_alike() -> None:
    found = [
        Comparison("wide", 2, "dask", (1.0, 1.1), 2.1),
        Comparison("wide", 2, "ferroflow", (2.0, 2.2), 1.05),
    ]
    text = comparison_table(found)
    assert "| wide | 2 | dask | 1.05 | 10% | 2.10 | +100% |" in text
    assert "Geometric mean of |error|: 100%; worst 100%." in text
    assert "Real repetitions differ by 10%, at most 10%." in text


@pytest.mark.parametrize(
    ("dask_s", "ferroflow_s", "simulated_s", "expected"),
    [
        pytest.param((2.0, 2.1), (1.0, 1.1), (3.0, 2.0), (1, 1), id="right"),
        pytest.param((2.0, 2.1), (1.0, 1.1), (2.0, 3.0), (0, 1), id="wrong"),
        pytest.param((1.0, 2.0), (1.5, 2.5), (2.0, 3.0), (0, 0), id="noise"),
    ],
)
def test_a_winner_counts_if_the_policies_differ_by_more_than_noise(
    dask_s: tuple[float, ...],
    ferroflow_s: tuple[float, ...],
    simulated_s: tuple[float, float],
    expected: tuple[int, int],
) -> None:
    found = [
        Comparison("a", 2, "dask", dask_s, simulated_s[0]),
        Comparison("a", 2, "ferroflow", ferroflow_s, simulated_s[1]),
    ]
    assert winners(found) == expected


@pytest.mark.parametrize("name", SLEEPS)
def test_both_versions_of_a_graph_are_the_same(name: str) -> None:
    sleeps = SLEEPS[name]()
    graph, keys = dask_graph(sleeps, name)
    virtual = virtual_graph(sleeps, name)
    assert {key: set(task.dependencies) for key, task in virtual.items()} == {
        key: set(task.dependencies) for key, task in graph.items()
    }
    assert sinks(virtual) == keys
    assert len(sleep(0.0, sleeps[0][2])) == virtual[name, 0].nbytes


@pytest.mark.cluster
def test_a_real_run_is_laid_against_a_simulation() -> None:
    options = ("--graph", "fork-join", "--workers", "2", "--no-processes", "--repeat", "2", "--json")
    lines = [json.loads(line) for line in answer("simulator", *options, command=program).stdout.splitlines()]
    assert [(one["policy"], one["workers"], len(one["real_s"])) for one in lines] == [
        ("dask", 2, 2),
        ("ferroflow", 2, 2),
    ]
    for one in lines:
        assert min(one["real_s"]) > 0.9  # 6 × 16 × 20 ms of sleep on two threads
        assert one["simulated_s"] > 0.9


@pytest.mark.cluster
def test_a_recorded_program_is_replayed_under_both_policies() -> None:
    options = ("--program", "bag", "--workers", "2", "--no-processes", "--repeat", "2", "--json")
    lines = [json.loads(line) for line in answer("simulator", *options, command=program).stdout.splitlines()]
    assert [(one["recorded"], one["policy"]) for one in lines] == [
        ("dask", "dask"),
        ("dask", "ferroflow"),
        ("ferroflow", "dask"),
        ("ferroflow", "ferroflow"),
    ]
    for one in lines:
        assert min(one["real_s"]) > 0.39  # 80 × 10 ms of sleep on two threads
        assert one["simulated_s"] > 0.39


def test_wrong_numbers_of_workers_get_one_line() -> None:
    for workers, message in (("2;4", "numbers like 2,4,8; got '2;4'"), ("0", "from 1 to 1,024 .*, got 0")):
        result = ferroflow("simulator", "--workers", workers, command=program)
        assert_one_line(result.exit_code, result.stderr, USAGE, message)
