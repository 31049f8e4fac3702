"""Costs of ops: analytic estimates and measured durations."""

from ferroflow_dask.cost.analytic import AnalyticCost, flops
from ferroflow_dask.cost.kind import kind_name, kind_of
from ferroflow_dask.cost.measured import MeasuredCost
from ferroflow_dask.cost.model import CostModel, estimate

__all__ = [
    "AnalyticCost",
    "CostModel",
    "MeasuredCost",
    "estimate",
    "flops",
    "kind_name",
    "kind_of",
]
