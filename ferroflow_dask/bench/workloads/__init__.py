"""What can be measured, by name."""

from __future__ import annotations

from collections.abc import Mapping

from ferroflow_dask.bench.workloads.arrays import ARRAYS
from ferroflow_dask.bench.workloads.base import Cluster, Instance, Request, Workload
from ferroflow_dask.bench.workloads.dags import DAGS
from ferroflow_dask.bench.workloads.frames import FRAMES
from ferroflow_dask.bench.workloads.rsds import RSDS
from ferroflow_dask.bench.workloads.scenarios import SCENARIOS, SUBMISSIONS
from ferroflow_dask.bench.workloads.task_bench import TASK_BENCH
from ferroflow_dask.exceptions import UnknownNameError

__all__ = ["WORKLOADS", "Cluster", "Instance", "Request", "Workload", "get_workload"]

_ALL = (*DAGS, *SCENARIOS, *SUBMISSIONS, *TASK_BENCH, *RSDS, *ARRAYS, *FRAMES)

#: Every workload by name.
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}


def get_workload(name: str) -> Workload:
    """Return the workload of that name.

    Raises
    ------
    UnknownNameError
        There is none; the message lists all.
    """
    workload = WORKLOADS.get(name)
    if workload is None:
        raise UnknownNameError.of("workload", name, WORKLOADS)
    return workload
