"""Reports: what a strategy does with each operator, and how many bytes that moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.strategy.partition import Partition
from ferroflow_dask.strategy.strategy import Strategy, check_strategy


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """What a strategy does with one operator.

    Parameters
    ----------
    kind : str
    split : dict of str to int
        Number of parts along the axes that are split.
    workers : tuple of str
        Of each part.
    reason : str
        Why the operator cannot be split; empty if it can.
    nbytes_sent : int
        Size of the parts of its results that move to other workers [B].
    """

    kind: str
    split: dict[str, int]
    workers: tuple[str, ...]
    reason: str
    nbytes_sent: int


@dataclass(frozen=True, slots=True)
class StrategyReport:
    """What a strategy does with a graph.

    Parameters
    ----------
    n_ops : int
        Operators of the graph in parts, with those that cut, join and send.
    nbytes_moved : int
        Size of all values that move between workers, inputs of the graph among them [B].
    weight_nbytes : dict of str to int
        Size of the constants that each worker reads [B].
    operators : dict of str to OperatorReport
    """

    n_ops: int
    nbytes_moved: int
    weight_nbytes: dict[str, int] = field(default_factory=dict)
    operators: dict[str, OperatorReport] = field(default_factory=dict)


def describe(graph: Graph, strategy: Strategy) -> StrategyReport:
    """Return what a strategy does with a graph of known shapes; the errors are those of `partition`."""
    spaces = check_strategy(strategy, graph)
    partition = Partition(graph, strategy, spaces)
    parts = partition.graph()
    sent: dict[str, int] = {}
    moved = {
        (value, op.worker)
        for op in parts.ops
        for value in op.operands
        if value in parts.producers and parts.producers[value].worker != op.worker
    }
    for value, _ in moved:
        origin = partition.origins[parts.producers[value].name]
        sent[origin] = sent.get(origin, 0) + (parts.spec(value).nbytes or 0)
    read = {(op.worker, value) for op in parts.ops for value in op.operands if value in parts.constants}
    weights = dict.fromkeys(strategy.workers, 0)
    for worker, value in read:
        weights[worker] += parts.spec(value).nbytes or 0
    operators = {}
    for op in graph.live_ops:
        found, space = strategy.operators[op.name], spaces[op.name]
        split = {axis: degree for axis, degree in found.degrees.items() if degree > 1}
        reason = space if isinstance(space, str) else ""
        operators[op.name] = OperatorReport(op.kind, split, found.workers, reason, sent.get(op.name, 0))
    return StrategyReport(len(parts.ops), sum(sent.values()), weights, operators)


#: Fill of each worker's operators, in turn: Brewer's qualitative palette `Set3`.
_FILLS = ("#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5")


def drawn(report: StrategyReport, workers: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return marks for `to_dot`: what becomes of each operator, with a stripe for each worker.

    Parameters
    ----------
    report : StrategyReport
    workers : sequence of str
        All workers of the strategy.
    """
    fill = {worker: _FILLS[i % len(_FILLS)] for i, worker in enumerate(workers)}
    marks = {}
    for name, one in report.operators.items():
        split = ", ".join(f"{axis} {n}" for axis, n in one.split.items()) or "whole"
        used = list(dict.fromkeys(one.workers))
        marks[name] = {
            "label": f"{one.kind}\n{split}\non {' '.join(used)}",
            "tooltip": f"{name}: sends {one.nbytes_sent:,} B",
            "style": "filled" if len(used) == 1 else "striped",
            "fillcolor": ":".join(fill[worker] for worker in used),
        }
    return marks
