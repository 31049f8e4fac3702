"""Measured runs."""

from ferroflow_dask.bench.record import RunRecord, versions
from ferroflow_dask.bench.row import bench_row
from ferroflow_dask.bench.runner import Run, run_on_cluster, run_sequentially
from ferroflow_dask.bench.warm import warm_up

__all__ = ["Run", "RunRecord", "bench_row", "run_on_cluster", "run_sequentially", "versions", "warm_up"]
