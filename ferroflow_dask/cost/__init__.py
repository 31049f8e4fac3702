"""What an op costs before it has run, and what the cluster is like that runs it."""

from ferroflow_dask.cost.analytic import AnalyticCost, flops
from ferroflow_dask.cost.kind import kind_name, kind_of
from ferroflow_dask.cost.measured import MeasuredCost
from ferroflow_dask.cost.model import CostModel, estimate
from ferroflow_dask.cost.profile import ClusterProfile

__all__ = [
    "AnalyticCost",
    "ClusterProfile",
    "CostModel",
    "MeasuredCost",
    "estimate",
    "flops",
    "kind_name",
    "kind_of",
]
