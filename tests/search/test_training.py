"""Training as a problem: backward passes, synchronisation of weights, microbatches, recomputation."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow
from evaluate import main as program
from flexflow_training import Setting, compared
from searches import SLOW, assert_equal, dense, machine
from split_models import MODELS

from ferroflow_dask.exceptions import StrategyError, UsageError
from ferroflow_dask.graph import Graph
from ferroflow_dask.search import Choice, Problem, Simulation, search, simulate, simulate_change
from ferroflow_dask.search.candidates import random_choice, seeds, spread
from ferroflow_dask.search.training import SYNCHRONIZATIONS, TrainingProblem
from ferroflow_dask.search.training_baselines import compute_s, least_traffic
from ferroflow_dask.search.training_memory import state_nbytes
from ferroflow_dask.search.training_search import search_training
from ferroflow_dask.simulation import Machine
from ferroflow_dask.topology import Route


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
    found = json.loads(answer("flexflow", *arguments, "--json", command=program).stdout)
    assert (found["network"], found["devices"]) == ("AlexNet", 4)
    assert found["found"]["samples_per_s"] >= found["data_parallel"]["samples_per_s"]
    table = answer("flexflow", *arguments, "--microbatches", "2", command=program).stdout.splitlines()
    assert [cell.strip() for cell in table[-1].split("|")][1:4] == ["AlexNet", "K80", "4"]
    assert len(table[-1].split("/")) == 9  # speed, bytes in all and between hosts: three strategies each
    odd = ferroflow("flexflow", *arguments, "--samples", "9", "--microbatches", "2", command=program)
    assert_one_line(odd.exit_code, odd.stderr, USAGE, "microbatches must divide the 9 samples of a device")
    refused = ferroflow("flexflow", "--network", "VGG", command=program)
    assert_one_line(refused.exit_code, refused.stderr, USAGE, "'VGG' is not one of")


#: Samples of an iteration.
ROWS = 64
#: Forward pass of one layer for all samples; the backward pass takes twice as long [s].
LAYER_S = 1.0


class Layers:
    """Layers of equal duration, whose samples take equal time."""

    def seconds(self, op: object, graph: Graph) -> float:
        rows, _ = graph.spec(graph.outputs[0]).shape or (0, 0)
        return LAYER_S * int(rows or 0) / ROWS


def free(n: int, nbytes: int = 0) -> Machine:
    """Return devices between which values move in no time."""
    links = (1e30,) * n
    return Machine(
        (1,) * n, (1.0,) * n, links, lambda _, to: Route((to,), 0.0, 1e30), memory_nbytes=(nbytes,) * n
    )


def pipeline(p: int, m: int, in_flight: int | None = None) -> tuple[TrainingProblem, Simulation]:
    """Return the simulation of one layer on each of p devices, with m microbatches."""
    graph = dense(*[8] * (p + 1), rows=ROWS // m)
    problem = TrainingProblem(graph, free(p), Layers(), microbatches=m, in_flight=in_flight)
    names = {op.name: Choice((), (i,)) for i, op in enumerate(graph.ops)}
    return problem, simulate(problem, problem.of_names(names))


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (2, 2), (2, 8), (4, 2), (4, 8), (3, 4)])
def test_the_makespan_of_a_pipeline_is_that_of_gpipe(p: int, m: int) -> None:
    # Huang et al., 2019: p stages and m microbatches take m + p - 1 slots, forward and backward.
    problem, found = pipeline(p, m)
    forward_s = max(max(found.stops_s[node]) for node in problem.changeable)
    slot_s = LAYER_S / m
    assert found.makespan_s == pytest.approx((m + p - 1) * 3 * slot_s)
    assert forward_s >= (m + p - 1) * slot_s - 1e-9


def test_one_microbatch_in_flight_is_accumulation_without_a_pipeline() -> None:
    p, m = 3, 4
    _, found = pipeline(p, m, in_flight=1)
    assert found.makespan_s == pytest.approx(p * 3 * LAYER_S)  # each microbatch goes through all stages alone
    # As many microbatches in flight as stages fill them (Narayanan et al., 2019). Devices serve first in,
    # first out, so that one forward pass comes before a backward pass that others wait for.
    _, filled = pipeline(4, 8, in_flight=4)
    assert filled.makespan_s == pytest.approx(((8 + 4 - 1) * 3 + 1) * LAYER_S / 8)


@pytest.mark.parametrize("in_flight", [0, 5])
def test_microbatches_in_flight_are_some_of_all(in_flight: int) -> None:
    with pytest.raises(UsageError, match=f"in_flight must be from 1 to 4 microbatches, got {in_flight}"):
        TrainingProblem(dense(8, 8), free(1), Layers(), microbatches=4, in_flight=in_flight)


def test_gradients_of_microbatches_are_sent_once() -> None:
    problems = [
        TrainingProblem(dense(8, 16, 4, rows=ROWS // m), machine(4), SLOW, microbatches=m) for m in (1, 4)
    ]
    whole, parts = (simulate(one, seeds(one)["data-parallel"]) for one in problems)
    assert whole.nbytes_moved == parts.nbytes_moved > 0
    # They are sent when the last microbatch has ended.
    found = problems[1]
    for sync, first in found._first_of.items():
        backward_s = max(max(parts.stops_s[found._backward[node]]) for node in found.groups[first])
        assert min(parts.starts_s[sync]) >= backward_s


def test_the_delta_simulation_of_microbatches_is_the_full_one_bit_by_bit() -> None:
    graph = dense(32, 64, 32, 16, rows=16)
    for in_flight in (1, 2, 4):
        problem = TrainingProblem(graph, machine(4), SLOW, microbatches=4, in_flight=in_flight)
        rng = np.random.default_rng(0)
        current = simulate(problem, seeds(problem)["data-parallel"])
        for _ in range(30):
            node = problem.leading[int(rng.integers(len(problem.leading)))]
            choice = random_choice(problem, node, rng)._replace(recompute=bool(rng.integers(2)))
            choices = list(current.choices)
            choices[node] = choice
            found = simulate_change(problem, current, node, choice)
            assert_equal(found, simulate(problem, choices))
            current = found


def test_memory_by_hand() -> None:
    rows, m, w = 16, 4, 2
    graph = dense(8, 32, 4, rows=rows)
    problem = TrainingProblem(graph, free(2, 10**9), Layers(), microbatches=m, in_flight=w)
    first, second = (op.name for op in graph.ops)
    weights = (4 * 8 * 32, 4 * 32 * 4)
    samples, hidden, result = 4 * rows * 8, 4 * rows * 32, 4 * rows * 4

    def held(*choices: Choice) -> list[float]:
        return state_nbytes(problem, problem.of_names(dict(zip((first, second), choices, strict=True))))

    here, there = Choice((), (0,)), Choice((), (1,))
    assert held(here, here) == [2 * sum(weights) + w * (samples + hidden + result), 0]
    # The second device keeps what it received.
    apart = [2 * weights[0] + w * (samples + hidden), 2 * weights[1] + w * (hidden + result)]
    assert held(here, there) == apart
    twice = here._replace(recompute=True)
    assert held(twice, there) == [2 * weights[0] + w * samples + hidden, apart[1]]
    halves = spread(problem, (("sample", 2),))
    each = 2 * sum(weights) + w * (samples + hidden + result) / 2
    assert held(halves, halves) == [each, each]
    columns = spread(problem, (("parameter1", 2),))
    assert held(columns, here)[1] == weights[0] + w * (samples + hidden / 2)


#: Four layers of equal width on one device: 64 × 256 values each, 64 KiB, and weights of 256 KiB.
SIZES = [256] * 5
RESULT, WEIGHT = 4 * ROWS * 256, 4 * 256 * 256
NEEDED = 2 * 4 * WEIGHT + 5 * RESULT


@pytest.mark.parametrize("nbytes", [0, NEEDED], ids=["no limit", "just enough memory"])
def test_nothing_is_computed_twice_if_memory_suffices(nbytes: int) -> None:
    problem = TrainingProblem(dense(*SIZES), free(1, nbytes), Layers())
    found = search(problem, steps=300)
    assert not any(found.best.choices[node].recompute for node in problem.changeable)
    assert found.best.makespan_s == pytest.approx(12 * LAYER_S)


def test_as_little_is_computed_twice_as_memory_demands() -> None:
    # With two microbatches in flight, the result of a recomputed layer is there for one of them, RESULT / 2.
    # Those of layers 1 and 3 are not there at the same time. Of three or four layers, two are neighbours.
    graph, names = dense(*SIZES, rows=ROWS // 2), ("microbatches", "in_flight")
    both = dict.fromkeys(names, 2)
    for missing, n_recomputed in (
        (0, 0),
        (1, 1),
        (RESULT // 2, 1),
        (RESULT // 2 + 1, 2),
        (3 * RESULT // 2, 2),
        (3 * RESULT // 2 + 1, 3),
        (2 * RESULT, 3),
    ):
        problem = TrainingProblem(graph, free(1, NEEDED - missing), Layers(), **both)
        found = search(problem, steps=400).best
        assert found.excess_nbytes == 0
        assert sum(found.choices[node].recompute for node in problem.first_copy) == n_recomputed
        assert found.makespan_s == pytest.approx((12 + n_recomputed) * LAYER_S)
    problem = TrainingProblem(graph, free(1, NEEDED - 2 * RESULT - 1), Layers(), **both)
    with pytest.raises(StrategyError, match="whose weights, gradients and results fit: 1 B are too much"):
        search(problem, steps=400)


def test_one_microbatch_saves_memory_by_segments() -> None:
    graph = dense(*SIZES)
    for missing, n_recomputed in ((1, 2), (RESULT, 2)):
        found = search(TrainingProblem(graph, free(1, NEEDED - missing), Layers()), steps=400).best
        assert sum(choice.recompute for choice in found.choices[1:5]) == n_recomputed
        assert found.makespan_s == pytest.approx((12 + n_recomputed) * LAYER_S)
    with pytest.raises(StrategyError, match="fit: 1 B are too much"):
        search(TrainingProblem(graph, free(1, NEEDED - RESULT - 1), Layers()), steps=400)


def test_the_number_of_microbatches_is_chosen() -> None:
    def make(limit: int) -> Callable[[int, int], TrainingProblem]:
        def of(m: int, w: int) -> TrainingProblem:
            graph = dense(*SIZES, rows=ROWS // m)
            return TrainingProblem(graph, free(1, limit), Layers(), microbatches=m, in_flight=w)

        return of

    # One device: microbatches gain nothing, unless memory is short. Then they are cheaper than a second pass.
    for limit, expected in ((NEEDED, (1, 1)), (NEEDED - 1, (2, 1)), (NEEDED - 3 * RESULT, (4, 1))):
        problem, found = search_training(make(limit), steps=200, most=4)
        assert (problem.microbatches, problem.in_flight) == expected
        assert found.best.excess_nbytes == 0
        assert found.best.makespan_s == pytest.approx(12 * LAYER_S)
