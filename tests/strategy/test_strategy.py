"""Strategies: files, and errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml
from split_cases import random_strategy

import ferroflow_dask.strategy
from ferroflow_dask.exceptions import FerroflowError, StrategyError
from ferroflow_dask.graph import Builder, Graph, generate_graph
from ferroflow_dask.strategy import (
    Configuration,
    Strategy,
    as_json,
    check_strategy,
    partition,
    read_strategy,
    signature_of,
    whole_on,
    write_strategy,
)

SCHEMA = yaml.safe_load(Path(ferroflow_dask.strategy.__file__).with_name("schema.yaml").read_text("utf-8"))


def graph() -> Graph:
    b = Builder("small")
    x = b.input("x", np.float32, (4, 6))
    b.output(
        y=b.op("Relu", b.op("MatMul", x, b.constant(np.eye(6, dtype=np.float32)), name="up"), name="act")
    )
    return b.to_graph()


STRATEGY = Strategy(
    ("a", "b"),
    {
        "up": Configuration(("a", "b", "b", "a"), {"sample": 2, "parameter1": 2}),
        "act": Configuration(("a", "b"), {"sample": 2}),
    },
    "small",
    signature_of(graph()),
)


def test_a_strategy_comes_back_from_its_file(tmp_path: Path) -> None:
    for strategy in (STRATEGY, random_strategy(generate_graph("transformer"), np.random.default_rng(0))):
        path = tmp_path / "s.json"
        write_strategy(strategy, path)
        found = read_strategy(path)
        assert as_json(found) == as_json(strategy)
        assert found.workers == strategy.workers
        jsonschema.validate(json.loads(path.read_text()), SCHEMA)


def test_the_file_has_one_line_for_each_operator() -> None:
    lines = as_json(STRATEGY).splitlines()
    assert '    "act": {"split": {"sample": 2}, "workers": ["a", "b"]}' in lines
    assert len(lines) == 10


def _changed(**changes: Any) -> str:
    return json.dumps({**json.loads(as_json(STRATEGY)), **changes})


BAD_TEXTS = {
    "truncated file": (as_json(STRATEGY)[:-40], "damaged or truncated"),
    "no object": ("[]", "must be an object"),
    "nested": ("[" * 100_000, "nested"),
    "version": (_changed(version=2), "version must be 1, got 2"),
    "unknown field": (_changed(devices=[]), "got 'devices'"),
    "no workers": (_changed(workers=[]), "workers must be a list of names"),
    "a worker twice": (_changed(workers=["a", "a"]), "workers must be different"),
    "numbers as workers": (_changed(workers=[0, 1]), "workers must be a list of names"),
    "operators as a list": (_changed(operators=[]), "operators must be an object"),
    "degree 0": (_changed(operators={"up": {"split": {"sample": 0}, "workers": ["a"]}}), "from 1 on, got 0"),
    "degree true": (_changed(operators={"up": {"split": {"sample": True}, "workers": ["a"]}}), "got True"),
    "field of an operator": (_changed(operators={"up": {"worker": "a"}}), "got 'worker'"),
    "name twice": ('{"version": 1, "version": 1}', "twice"),
    "model": (_changed(model=3), "model must be a text, got 3"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_a_bad_file_is_one_clear_line(name: str, tmp_path: Path) -> None:
    text, expected = BAD_TEXTS[name]
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(StrategyError) as caught:
        read_strategy(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "s.json" in str(caught.value)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="must be a JSON file"):
        read_strategy(tmp_path / "none.json")
    with pytest.raises(FerroflowError, match="cannot write"):
        write_strategy(STRATEGY, tmp_path / "no folder" / "s.json")


def _with(name: str, *workers: str, **degrees: Any) -> Strategy:
    operators = {**STRATEGY.operators, name: Configuration(workers, degrees)}
    return Strategy(STRATEGY.workers, operators, "small")


BAD_STRATEGIES = {
    "another model": (
        Strategy(("a",), {}, "other", "0123456789abcdef"),
        "another model or version of it: 'other', not 'small'",
    ),
    "unknown operator": (_with("upp", "a"), "unknown operator 'upp'; did you mean 'up'?"),
    "missing operator": (Strategy(("a",), {"up": Configuration(("a",))}), "it lacks 'act'"),
    "unknown worker": (_with("act", "c"), "'act' (Relu): unknown worker 'c'; the strategy has a, b"),
    "wrong degree": (_with("act", *"aaaaa", sample=5), "the degree of 'sample' must be 1 to 4, got 5"),
    "no number": (_with("act", "a", sample=0.5), "must be a number from 1 on, got 0.5"),
    "wrong axis": (_with("act", "a", "b", contracted=2), "cannot be split along 'contracted'; it has sample"),
    "too few workers": (_with("act", "a", sample=2), "a worker for each of 2 parts, got 1"),
    "no workers": (Strategy((), STRATEGY.operators), "at least one"),
}


@pytest.mark.parametrize("name", BAD_STRATEGIES)
def test_a_strategy_that_does_not_fit_is_one_clear_line(name: str) -> None:
    strategy, expected = BAD_STRATEGIES[name]
    with pytest.raises(StrategyError) as caught:
        partition(graph(), strategy)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_operator_that_cannot_be_split_says_why() -> None:
    slow = generate_graph("wide", width=1, depth=1)
    strategy = Strategy(("a",), {slow.ops[0].name: Configuration(("a", "a"), {"sample": 2})})
    with pytest.raises(StrategyError, match=r"cannot be split: ferroflow\.Slow has no rule"):
        check_strategy(strategy, slow)


def test_workers_become_addresses() -> None:
    cluster = {"a": "tcp://1", "b": "tcp://2", "c": "tcp://3"}
    found = STRATEGY.on(cluster)
    assert found.workers == ("tcp://1", "tcp://2")
    assert found.operators["up"].workers == ("tcp://1", "tcp://2", "tcp://2", "tcp://1")
    assert found.on(cluster).workers == found.workers  # addresses stay
    numbered = whole_on(graph(), ("0", "1"))
    assert numbered.on(cluster).workers == ("tcp://1", "tcp://2")  # any workers, in order
    with pytest.raises(StrategyError, match=r"worker 'b' of the strategy must be one of .* 1 workers: a"):
        STRATEGY.on({"a": "tcp://1"})
    with pytest.raises(StrategyError, match="worker '1' of the strategy"):
        numbered.on({"a": "tcp://1"})
