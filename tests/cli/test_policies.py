"""The policy that a command puts in charge, what it is given, and what is told of a cluster that fails it."""

from __future__ import annotations

from concurrent.futures import CancelledError
from importlib import import_module
from typing import Any

import pytest
from command_line import FAILURE, SMALL, answer, assert_one_line, ferroflow
from distributed import Client, KilledWorker

from ferroflow_dask.cli import clusters
from ferroflow_dask.scheduler import uninstall

#: The module, which the command of that name hides.
run_command = import_module("ferroflow_dask.cli.run")
HERE = ("run", *SMALL, "--workers", "1", "--no-processes")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("options", "policy", "expected"),
    [
        ("", "ferroflow", {}),
        ("--steal-threshold 2", "ring", {"threshold": 2}),
        ("--no-adaptive-threshold", "ring", {"adaptive": False}),
        ("--steal-threshold 2 --no-adaptive-threshold", "ring", {"threshold": 2, "adaptive": False}),
        ("--seed 7", "ferroflow", {}),
        ("--seed 7", "random", {"seed": 7}),
        ("--seed 7", "ring", {}),
    ],
)
def test_policies_are_given_what_was_asked_for(
    options: str, policy: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install, given = clusters.install, []

    def noted(client: Client, policy: str, **of_policy: Any) -> None:
        given.append((policy, of_policy))
        install(client, policy, **of_policy)

    monkeypatch.setattr(clusters, "install", noted)
    answer(*HERE, "--policy", policy, *options.split())
    assert given == [(policy, expected)]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            KilledWorker("matmul-1", None, 3),
            "workers died while they ran task 'matmul-1'; they may lack memory",
        ),
        (
            CancelledError("matmul-1"),
            "workers were lost, with data that only they held; they may lack memory",
        ),
        (OSError("timed out"), "the cluster failed: timed out"),
        (RuntimeError("no loop"), "the cluster failed: no loop"),
    ],
    ids=["tasks killed workers", "data were lost", "no connection", "no loop"],
)
def test_a_cluster_that_fails_a_run_is_told_of_in_one_line(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(run_command, "run_graph", fails)
    result = ferroflow(*HERE)
    assert_one_line(result.exit_code, result.stderr, FAILURE, told)


@pytest.mark.cluster
@pytest.mark.parametrize("policy", ["ferroflow", "dask"])
def test_a_policy_that_is_taken_off_during_a_run_is_told_of(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_graph = run_command.run_graph

    def taken_off(graph: Any, inputs: Any, client: Client, *more: Any, **options: Any) -> Any:
        runs = run_graph(graph, inputs, client, *more, **options)
        uninstall(client)
        return runs

    monkeypatch.setattr(run_command, "run_graph", taken_off)
    result = ferroflow(*HERE, "--policy", policy)
    if policy == "dask":  # which has no plugin to lose
        assert result.exit_code == 0, result.output
    else:
        assert_one_line(result.exit_code, result.stderr, FAILURE, "policy 'ferroflow' was taken off during")
