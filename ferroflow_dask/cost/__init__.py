"""What an op costs before it has run, and what the cluster is like that runs it."""

from ferroflow_dask.cost.analytic import AnalyticCost, flops
from ferroflow_dask.cost.model import CostModel, estimate
from ferroflow_dask.cost.profile import ClusterProfile

__all__ = ["AnalyticCost", "ClusterProfile", "CostModel", "estimate", "flops"]
