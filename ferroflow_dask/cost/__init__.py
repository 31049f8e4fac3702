"""What an op costs: seconds and bytes, before it has run."""

from ferroflow_dask.cost.analytic import AnalyticCost, flops
from ferroflow_dask.cost.model import CostModel, estimate

__all__ = ["AnalyticCost", "CostModel", "estimate", "flops"]
