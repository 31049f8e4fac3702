"""Found strategies against a session: what sleeps, what is printed, and a small real run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow
from found_strategies import Measured, accounts_table, measure, sleeping, strategies_table
from measure_strategies import main as program
from strategy_account import Account, Span, account_of, measured, predicted
from strategy_models import cnn, transformer
from strategy_order import Ordered, order, order_table

from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.graph import random_inputs
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.search import Problem, simulate
from ferroflow_dask.search.candidates import seeds
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy import Configuration, Strategy, partition, spaces_of
from ferroflow_dask.topology import load_topology


def test_models_are_those_of_onnx_and_can_be_split() -> None:
    for graph in (transformer(2, 8, 32, 4), cnn(32)):
        assert evaluate(graph, random_inputs(graph)).keys() == {"y"}
        assert not any(isinstance(space, str) for space in spaces_of(graph).values())


def test_parts_that_sleep_yield_what_is_as_large() -> None:
    graph = cnn(32)
    axes = {name: dict(space.axes) for name, space in spaces_of(graph).items() if not isinstance(space, str)}
    rows = {name: {"attribute2": 2} if "attribute2" in found else {} for name, found in axes.items()}
    operators = {name: Configuration(("0", "1") if split else ("0",), split) for name, split in rows.items()}
    parts = partition(graph, Strategy(("0", "1"), operators))
    asleep = sleeping(parts, AnalyticCost())
    assert [op.name for op in asleep.ops] == [op.name for op in parts.ops]
    assert {op.op_type for op in asleep.ops} == {"Slow", "Slice", "Concat", "Identity"}
    durations = [op.attributes["duration"] for op in asleep.ops if op.op_type == "Slow"]
    assert min(durations) > 0
    found = evaluate(asleep, random_inputs(asleep))
    assert found["y"].shape == (1, 100)
    assert found["y"].dtype == np.float32


def test_the_table_compares_with_the_faster_other_way() -> None:
    seconds = {
        "whole": [2.0],
        "auto": [3.0],
        "found": [1.0],
        "whole (sleeping)": [1.5],
        "found (sleeping)": [1.0],
    }
    row = Measured("block", 0.9, 10, 7, [1.6, 1.5, 1.9], seconds, {"whole": [1.8], "found": [1.0]})
    assert (row.speedup, row.cpu_speedup, row.sleeping_speedup) == (2.0, 1.8, 1.5)
    line = "| block | 1.60 (1.50–1.90) | 2.000 | 3.000 | 1.000 | 2.00 | 125% | 1.80 | 0.900 | 1.50 | 7 |"
    assert line in strategies_table([row])


@pytest.mark.cluster
def test_a_small_model_is_measured_in_each_way() -> None:
    (row,) = measure({"cnn": lambda: cnn(16)}, 2, 0.2)
    assert {way: len(found) for way, found in row.seconds.items()} == dict.fromkeys(
        ("whole", "auto", "found", "whole (sleeping)", "found (sleeping)"), 2
    )
    assert len(row.together) == 2
    assert row.predicted_s > 0
    assert json.dumps(row.seconds)
    for way, accounts in row.accounts.items():
        for account, elapsed_s in zip(accounts, row.seconds[way], strict=True):
            parts = (account.compute_s, account.transfer_s, account.dask_s, account.waiting_s)
            assert min(parts) >= 0
            assert account.compute_s > 0
            assert sum(parts) == pytest.approx(elapsed_s)
    lines = accounts_table([row]).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["found", "found (sleeping)", "whole"]


def test_pairs_differ_if_no_run_of_one_is_as_fast_as_one_of_the_other() -> None:
    row = Ordered("block", [1.0, 2.0, 3.0], [[1.0, 1.2], [1.1, 1.3], [0.8, 0.9]])
    assert row.pairs() == (2, 0)  # the first two overlap; the third should be the slowest
    assert Ordered("block", [1.0, 2.0], [[1.0], [1.5]]).pairs() == (1, 1)
    line = "| block | 3 | 1.000–3.000 | 0.850–1.200 | -72% / -40% / +10% | 2 | 0 |"
    assert line in order_table([row])


@pytest.mark.cluster
def test_strategies_are_run_in_the_order_of_their_predictions() -> None:
    (row,) = order({"cnn": lambda: cnn(16)}, n=3, repeat=2, seconds=0.2)
    assert row.predicted_s == sorted(row.predicted_s)
    assert [len(one) for one in row.seconds] == [2, 2, 2]
    assert row.predicted_s[-1] > row.predicted_s[0]


def test_bad_options_are_one_line() -> None:
    result = ferroflow("strategies", "--d-model", "100", command=program)
    assert_one_line(
        result.exit_code, result.stderr, USAGE, "--d-model must be a multiple of its 16 heads, got 100"
    )
    assert "--image" in answer("strategies", "--help", command=program).output


def test_an_account_by_hand() -> None:
    spans = {
        "a": Span("here", 1.0, 4.0),
        "b": Span("there", 1.5, 6.0),
        # Waits for `b` until 6, for its result until 7.5, and for Dask until 8.
        "c": Span("here", 8.0, 10.0, ("a", "b"), ((6.0, 7.0), (6.5, 7.5))),
        "d": Span("there", 10.5, 11.0, ("c",), ((10.0, 10.25),)),
    }
    account = account_of(spans, 0.0, 12.0)
    # `here` computes 5 s of all 10; it waits from 4 to 6 and for the last task from 10 to 11.
    assert account == Account(5.0, 1.5, 1.0 + 0.5 + 1.0, 2.0 + 1.0, 10.0)
    stream = [
        {
            "key": key,
            "worker": span.worker,
            "startstops": [
                *({"action": "transfer", "start": first, "stop": last} for first, last in span.transfers),
                {"action": "compute", "start": span.start_s, "stop": span.stop_s},
            ],
        }
        for key, span in spans.items()
    ]
    other = {"key": "other", "worker": "here", "startstops": [{"action": "compute", "start": 0, "stop": 99}]}
    reads = {key: span.reads for key, span in spans.items()}
    assert measured([*stream, other], reads, 0.0, 12.0) == account


@pytest.mark.parametrize("name", ["one device", "sequence-parallel", "output dimensions"])
def test_the_predicted_account_is_all_of_the_makespan(name: str) -> None:
    topology = load_topology("this-machine").with_workers(2)
    problem = Problem(transformer(1, 64, 64, 4), Machine.of_topology(topology), AnalyticCost())
    found = simulate(problem, seeds(problem)[name])
    account = predicted(problem, found)
    parts = (account.compute_s, account.transfer_s, account.dask_s, account.waiting_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(found.makespan_s)
    assert account.in_all_s == pytest.approx(sum(map(sum, found.durations_s)))
    assert (account.transfer_s > 0) == (name != "one device")
