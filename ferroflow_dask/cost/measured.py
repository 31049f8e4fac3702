"""Costs as they were measured: what ops of the same kind have taken."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ferroflow_dask.cost.kind import kind_of
from ferroflow_dask.cost.model import CostModel
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op

#: Part of a new duration in the mean.
_WEIGHT = 0.3


class MeasuredCost:
    """Durations by kind of op, learned from runs.

    Parameters
    ----------
    otherwise : CostModel, optional
        Asked for ops whose kind has not run yet; their costs are unknown if left out.
    kept : mapping of str to float, optional
        What `as_dict` gave earlier.
    """

    def __init__(self, otherwise: CostModel | None = None, kept: Mapping[str, float] | None = None) -> None:
        self._otherwise = otherwise
        self._kept = dict(kept or {})
        self._mean_s: dict[Hashable, float] = {}

    def observe(self, graph: Graph, seconds: Mapping[int, float]) -> None:
        """Learn from a run: how long ops took, by op id [s]."""
        new: dict[Hashable, list[float]] = {}
        for op in graph.live_ops:
            if op.id in seconds:
                new.setdefault(kind_of(op, graph), []).append(seconds[op.id])
        for kind, spent_s in new.items():
            mean_s = sum(spent_s) / len(spent_s)
            before_s = self._known_s(kind)
            before_s = mean_s if before_s is None else before_s
            self._mean_s[kind] = before_s + _WEIGHT * (mean_s - before_s)

    def seconds(self, op: Op, graph: Graph) -> float | None:
        """Return what ops of this kind have taken [s]."""
        known = self._known_s(kind_of(op, graph))
        if known is None and self._otherwise is not None:
            return self._otherwise.seconds(op, graph)
        return known

    def as_dict(self) -> dict[str, float]:
        """Return what was learned, to be kept [s]; what was learned last comes last."""
        new = {repr(kind): mean_s for kind, mean_s in self._mean_s.items()}
        return {**{kind: mean_s for kind, mean_s in self._kept.items() if kind not in new}, **new}

    def _known_s(self, kind: Hashable) -> float | None:
        known = self._mean_s.get(kind)
        return self._kept.get(repr(kind)) if known is None and self._kept else known
