"""Training as a problem: backward passes, gradients, and the synchronisation of weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow
from searches import SLOW, assert_equal, dense, machine
from split_models import MODELS

from ferroflow_dask.bench.flexflow import Setting, compared
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Graph
from ferroflow_dask.search import Choice, Problem, simulate, simulate_change
from ferroflow_dask.search.candidates import random_choice, seeds, spread
from ferroflow_dask.search.training import SYNCHRONIZATIONS, TrainingProblem
from ferroflow_dask.search.training_baselines import compute_s, least_traffic


def training(graph: Graph, n: int, synchronization: str = "server") -> TrainingProblem:
    return TrainingProblem(graph, machine(n), SLOW, synchronization=synchronization)


def test_an_iteration_on_one_device_takes_three_times_the_forward_pass() -> None:
    graph = dense(32, 64, 16)
    whole = [Choice((), (0,))]
    forward, both = Problem(graph, machine(1), SLOW), training(graph, 1)
    forward_s = simulate(forward, whole * forward.n_nodes).makespan_s
    found = simulate(both, whole * both.n_nodes)
    assert found.makespan_s == pytest.approx(3 * forward_s)
    assert compute_s(both, found) == pytest.approx(3 * forward_s)
    assert found.nbytes_moved == 0


@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
@pytest.mark.parametrize("n", [2, 4])
def test_data_parallel_training_moves_each_weight_twice_for_each_further_device(
    n: int, synchronization: str
) -> None:
    graph = dense(32, 64, 16)
    problem = training(graph, n, synchronization)
    found = simulate(problem, seeds(problem)["data-parallel"])
    n_weights = 32 * 64 + 64 * 16
    moved = 2 * (n - 1) * n_weights + 64 * 32 * (n - 1) // n  # and the samples of the other devices
    assert found.nbytes_moved == 4 * moved


def test_a_layer_that_is_split_by_its_weights_moves_values_and_gradients_but_no_weights() -> None:
    graph = dense(32, 64)
    problem = training(graph, 4)
    (node,) = problem.changeable
    choices = [Choice((), (0,))] * problem.n_nodes
    choices[node] = spread(problem, (("parameter1", 4),))
    for there, choice in problem.following(node, choices[node]).items():
        choices[there] = choice
    assert all(len(holders) == 1 for holders, _ in problem.shards(node, choices[node].degrees))
    # Each of the three other devices gets the input; its gradient stops at the input, which nobody computes.
    assert simulate(problem, choices).nbytes_moved == 3 * 64 * 32 * 4


@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_delta_simulation_of_training_is_the_full_one_bit_by_bit(name: str, synchronization: str) -> None:
    problem = training(MODELS[name], 4, synchronization)
    rng = np.random.default_rng(0)
    current = simulate(problem, least_traffic(problem))
    for _ in range(20):
        node = int(rng.integers(problem.changeable.start, problem.changeable.stop))
        choice = random_choice(problem, node, rng)
        choices = list(current.choices)
        choices[node] = choice
        for there, following in problem.following(node, choice).items():
            choices[there] = following
        found = simulate_change(problem, current, node, choice)
        assert_equal(found, simulate(problem, choices))
        current = found


def test_an_unknown_synchronization_gets_one_line() -> None:
    with pytest.raises(UsageError, match="must be server or ring, got 'tree'"):
        training(dense(4, 4), 1, "tree")


def test_a_recurrent_network_gains_and_a_convolutional_one_does_not() -> None:
    gain = compared("RNNLM", "flexflow-k80", 16, 60.0, steps=150)
    assert gain.over_data_parallel > 1.3
    assert gain.over_expert > 1.3
    assert 0 < gain.efficiency <= 1
    even = compared("ResNet-101", "flexflow-p100", 4, 60.0, steps=3)
    assert even.over_data_parallel == pytest.approx(1.0, abs=0.02)


def test_without_memory_results_are_computed_twice_or_microbatches_are_chosen() -> None:
    # 128 samples of ResNet-101 need more than the 12 GB of a K80.
    short = compared("ResNet-101", "flexflow-k80", 4, 1e9, steps=1, setting=Setting(samples=128))
    assert short.found.fits
    assert short.data_parallel.fits
    assert 0 < short.data_parallel.recomputed < 0.5
    parts = Setting(samples=128, microbatches=2)
    chosen = compared("ResNet-101", "flexflow-k80", 4, 1e9, steps=2, setting=parts).found
    assert (chosen.fits, chosen.microbatches, chosen.in_flight, chosen.recomputed) == (True, 2, 1, 0.0)
    assert short.data_parallel.compute_s > chosen.compute_s


def test_the_command_prints_what_was_compared() -> None:
    arguments = ("--network", "AlexNet", "--topology", "flexflow-k80", "--devices", "4", "--seconds", "1")
    found = json.loads(answer("bench", "flexflow", *arguments, "--json").stdout)
    assert (found["network"], found["devices"]) == ("AlexNet", 4)
    assert found["found"]["samples_per_s"] >= found["data_parallel"]["samples_per_s"]
    table = answer("bench", "flexflow", *arguments, "--microbatches", "2").stdout.splitlines()
    assert [cell.strip() for cell in table[-1].split("|")][1:4] == ["AlexNet", "K80", "4"]
    assert len(table[-1].split("/")) == 9  # speed, bytes in all and between hosts: three strategies each
    odd = ferroflow("bench", "flexflow", *arguments, "--samples", "9", "--microbatches", "2")
    assert_one_line(odd.exit_code, odd.stderr, USAGE, "microbatches must divide the 9 samples of a device")
    refused = ferroflow("bench", "flexflow", "--network", "VGG")
    assert_one_line(refused.exit_code, refused.stderr, USAGE, "'VGG' is not one of")
