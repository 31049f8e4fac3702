"""Measured runs."""

from ferroflow_dask.bench.record import RunRecord, versions
from ferroflow_dask.bench.runner import Run, run_on_cluster, run_sequentially
from ferroflow_dask.bench.warm import warm_up

__all__ = ["Run", "RunRecord", "run_on_cluster", "run_sequentially", "versions", "warm_up"]
