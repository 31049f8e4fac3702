"""Options and tables of strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dask.utils import format_bytes
from rich.table import Table
from rich.text import Text

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Graph, random_inputs
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.lowering import AUTO
from ferroflow_dask.search import Problem, simulate
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy import Strategy, check_strategy, read_strategy, whole_on, with_shapes
from ferroflow_dask.strategy.report import StrategyReport, describe


def sized(graph: Graph, inputs: Mapping[str, Any] | None = None) -> Graph:
    """Return a graph with known shapes; sizes that inputs leave open are 1, as `run` draws them."""
    values = random_inputs(graph) if inputs is None else inputs
    return with_shapes(
        graph,
        {
            name: TensorSpec(value.dtype, value.shape)
            for name, value in values.items()
            if hasattr(value, "shape")
        },
    )


def strategy_for(graph: Graph, inputs: Mapping[str, Any], path: str) -> Strategy:
    """Return the strategy in a file, if it fits a graph."""
    strategy = read_strategy(path)
    check_strategy(strategy, sized(graph, inputs))
    return strategy


def check_options(strategy: str | None, policy: str, granularity: str | None, batch: int | None) -> None:
    """Raise `UsageError` for options that a strategy, if there is one, does not go with."""
    if strategy is None:
        return
    if policy == "sequential":
        raise UsageError("--strategy splits operators for workers; --policy sequential has none")
    if batch is not None:
        raise UsageError("--strategy splits operators; --batch runs the whole model; leave one out")
    if granularity not in (None, AUTO, "bundles", "ops"):
        raise UsageError(f"--strategy needs --granularity auto, bundles or ops, got {granularity!r}")


class Shown(NamedTuple):
    """A strategy of a file: what it does with a graph, and how long that should take at nominal rates."""

    strategy: Strategy
    report: StrategyReport
    predicted_s: float
    one_device_s: float


def shown(graph: Graph, path: str, threads: int) -> Shown:
    """Return the strategy in a file for a graph, predicted for workers that nobody has measured."""
    known, strategy = sized(graph), read_strategy(path)
    report = describe(known, strategy)
    profile = ClusterProfile((threads,) * len(strategy.workers))
    cost = AnalyticCost(profile.flop_rate, profile.memory_bandwidth)
    problem = Problem(known, Machine.of_profile(profile), cost)
    chosen = (strategy, whole_on(known, strategy.workers))
    predicted_s, one_device_s = (simulate(problem, problem.choices(one)).makespan_s for one in chosen)
    return Shown(strategy, report, predicted_s, one_device_s)


def as_facts(found: Shown) -> dict[str, Any]:
    """Return a strategy as JSON has it."""
    report = found.report
    operators = {
        name: {
            "kind": one.kind,
            "split": one.split,
            "workers": list(one.workers),
            "reason": one.reason,
            "bytes_sent": one.nbytes_sent,
        }
        for name, one in report.operators.items()
    }
    return {
        "ops": report.n_ops,
        "bytes_moved": report.nbytes_moved,
        "weight_bytes": report.weight_nbytes,
        "predicted_s": found.predicted_s,
        "one_device_s": found.one_device_s,
        "operators": operators,
    }


def as_table(found: Shown) -> Table:
    """Return the operators of a strategy as a table."""
    report = found.report
    weights = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in report.weight_nbytes.items())
    table = Table(
        "operator",
        "kind",
        "split",
        "workers",
        "sends",
        box=None,
        title=f"{report.n_ops} ops in parts; {format_bytes(report.nbytes_moved)} move; weights: {weights}\n"
        f"predicted: {found.predicted_s:.3g} s, one device {found.one_device_s:.3g} s (at nominal rates)",
        title_justify="left",
    )
    for name, one in report.operators.items():
        split = ", ".join(f"{axis} {n}" for axis, n in one.split.items()) or "whole"
        if one.reason:
            split = f"whole: {one.reason}"
        cells = (name, one.kind, split, " ".join(one.workers), format_bytes(one.nbytes_sent))
        table.add_row(*map(Text, cells))  # no markup: names may have brackets
    return table
