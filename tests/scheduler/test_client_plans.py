"""Client plans: which optimized data frames a client keeps, and that nothing else is different."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask import _expr
from dask._expr import FinalizeCompute
from distributed import Client
from in_charge import assert_stock, scheduler_of
from waiting import until

from ferroflow_dask import install, installed, uninstall
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.scheduler.features import client_plans

FRAME = pd.DataFrame({"x": np.arange(100) % 7, "y": np.arange(100.0)})
LARGE = pd.DataFrame({"y": np.arange(200_000.0)})


@pytest.fixture(autouse=True)
def _no_other_clients() -> None:
    """Forget the plans of clients that another test of this process did not close."""
    for client in list(client_plans._plans._clients):
        client_plans.forget(client)


@pytest.fixture(name="optimized")
def _optimized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each expression that Dask optimizes."""
    names: list[str] = []
    original = _expr.optimize_until

    def optimize_until(expr: Any, stage: Any) -> Any:
        names.append(expr._name)
        return original(expr, stage)

    monkeypatch.setattr(_expr, "optimize_until", optimize_until)
    return names


def grouped(frame: pd.DataFrame = FRAME) -> Any:
    return dd.from_pandas(frame, npartitions=4).groupby("x").y.sum()


@pytest.mark.usefixtures("ferroflow_client")
def test_from_the_third_run_on_a_frame_is_not_optimized(optimized: list[str]) -> None:
    expected = FRAME.groupby("x").y.sum()
    for _ in range(4):
        pd.testing.assert_series_equal(grouped().compute().sort_index(), expected)
    assert len(optimized) == 2


def test_keys_are_those_of_stock(thread_client: Client) -> None:
    stock = thread_client.compute(grouped())
    key = stock.key
    del stock
    install(thread_client)
    for _ in range(3):
        future = thread_client.compute(grouped())
        assert future.key == key
        del future
    uninstall(thread_client)


@pytest.mark.usefixtures("ferroflow_client")
def test_other_settings_and_other_data_have_other_plans(optimized: list[str]) -> None:
    for _ in range(3):
        grouped().compute()
    assert len(optimized) == 2
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        grouped().compute()
    assert len(optimized) == 3
    other = FRAME.assign(y=1.0)
    pd.testing.assert_series_equal(grouped(other).compute().sort_index(), other.groupby("x").y.sum())
    assert len(optimized) == 4


@pytest.mark.usefixtures("ferroflow_client")
def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    for factor in (1.0, 2.0):
        (FRAME * factor).to_parquet(tmp_path / "part.parquet")
        for _ in range(3):
            assert dd.read_parquet(tmp_path).y.sum().compute() == factor * FRAME.y.sum()


def test_no_plan_keeps_results_on_the_cluster(ferroflow_client: Client, optimized: list[str]) -> None:
    persisted = dd.from_pandas(FRAME, npartitions=4).persist()
    for _ in range(3):
        assert persisted.y.sum().compute() == FRAME.y.sum()
    assert len(optimized) >= 3
    del persisted
    until(lambda: not scheduler_of(ferroflow_client).tasks)


def test_no_plan_keeps_a_future_that_is_an_argument(ferroflow_client: Client) -> None:
    future = ferroflow_client.scatter(3.0)
    frame = dd.from_pandas(FRAME, npartitions=2).map_partitions(operator.mul, future, meta=FRAME)
    for _ in range(3):
        assert frame.y.sum().compute() == 3 * FRAME.y.sum()
    del frame, future
    until(lambda: not scheduler_of(ferroflow_client).tasks)


def test_a_function_of_a_module_that_is_reloaded_is_the_new_one(
    ferroflow_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for factor in (1, 2):
        (tmp_path / "edited_module.py").write_text(f"def scaled(frame):\n    return {factor} * frame\n")
        importlib.invalidate_caches()
        module = importlib.import_module("edited_module")
        importlib.reload(module)
        for _ in range(3):
            frame = dd.from_pandas(FRAME, npartitions=2).map_partitions(module.scaled, meta=FRAME)
            assert frame.y.sum().compute() == factor * FRAME.y.sum()
            del frame  # Dask gives an expression that still exists to all that have its name
            # The keys do not depend on the text of the function, and Dask gives a result that the client
            # still has to all that ask for its key.
            until(lambda: not ferroflow_client.futures)
    assert not plans()


def plans() -> list[Any]:
    return [plan for plan in client_plans._plans._kept.values() if plan is not None]


@pytest.mark.usefixtures("ferroflow_client")
@pytest.mark.parametrize(
    "build",
    [
        dd.from_pandas(LARGE, npartitions=2).y.sum,
        lambda: dask.delayed(sum)([1, 2]),
        lambda: da.ones(10, chunks=5).sum(),
    ],
    ids=["data above a megabyte", "delayed", "an array"],
)
def test_neither_large_data_nor_graphs_are_kept(build: Callable[[], Any]) -> None:
    first, *others = [build().compute() for _ in range(3)]
    assert others == [first, first]
    assert not plans()


def test_the_plans_used_last_are_kept(thread_client: Client, optimized: list[str]) -> None:
    with dask.config.set({"ferroflow.client-plans": 2}):
        install(thread_client)
    for factor in (1, 2, 3):
        for _ in range(2):
            grouped(FRAME * factor).compute()
    assert len(optimized) == 6
    assert len(plans()) == 2
    grouped(FRAME * 3).compute()
    grouped(FRAME * 2).compute()
    assert len(optimized) == 6
    grouped(FRAME).compute()
    assert len(optimized) == 7
    for factor in range(4, 40):
        grouped(FRAME * factor).compute()
    assert len(client_plans._plans._kept) <= 2 * client_plans._SEEN
    uninstall(thread_client)


def is_stock() -> bool:
    return "optimize" not in vars(FinalizeCompute)


def test_plans_end_with_the_last_client_that_keeps_them(thread_client: Client) -> None:
    assert is_stock()
    install(thread_client)
    with Client(thread_client.scheduler.address) as other:  # without the plans of its own
        install(other)
        for _ in range(2):
            grouped().compute()
        uninstall(thread_client)
        assert not is_stock()
        assert len(plans()) == 1
    grouped().compute()
    assert is_stock()
    assert not plans()
    assert_stock(thread_client)


def test_the_method_of_another_package_stays(thread_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def theirs(expr: Any, fuse: bool = False) -> Any:
        called.append(expr._name)
        return _expr.optimize_until(expr, "fused" if fuse else "simplified-physical")

    monkeypatch.setattr(FinalizeCompute, "optimize", theirs, raising=False)
    install(thread_client)
    grouped().compute()
    uninstall(thread_client)
    grouped().compute()
    assert len(called) == 2
    assert vars(FinalizeCompute)["optimize"] is theirs


@pytest.mark.parametrize("by", ["argument", "setting"])
def test_without_the_feature_nothing_is_kept(by: str, thread_client: Client) -> None:
    with dask.config.set({"ferroflow.features.client_plans": by != "setting"}):
        install(thread_client, without=["client_plans"] if by == "argument" else [])
        assert installed(thread_client).features["client_plans"] != "on"
        assert is_stock()
        uninstall(thread_client)


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", None, True])
def test_a_wrong_number_of_plans_is_one_line(value: object, thread_client: Client) -> None:
    with (
        dask.config.set({"ferroflow.client-plans": value}),
        pytest.raises(
            UsageError, match=r"ferroflow.client-plans is .*; it must be a whole number, at least 1"
        ),
    ):
        install(thread_client)
    assert_stock(thread_client)
    assert is_stock()
