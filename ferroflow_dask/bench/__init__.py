"""Measured runs."""

from ferroflow_dask.bench.machine import versions
from ferroflow_dask.bench.record import RunRecord
from ferroflow_dask.bench.rows import bench_row
from ferroflow_dask.bench.runner import Run, run_on_cluster, run_sequentially
from ferroflow_dask.bench.warm import warm_up

__all__ = ["Run", "RunRecord", "bench_row", "run_on_cluster", "run_sequentially", "versions", "warm_up"]
