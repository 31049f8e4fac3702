"""A row for a run that somebody has measured by other means than `ferroflow bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Client

from ferroflow_dask.bench.machine import commit, machine
from ferroflow_dask.bench.record import versions
from ferroflow_dask.bench.schema import BenchRecord


def bench_row(
    client: Client,
    workload: str,
    arguments: Mapping[str, Any],
    *,
    policy: str,
    repetition: int,
    makespan_s: float,
    ops: int,
    invocation: str | None = None,
) -> BenchRecord:
    """Return what `ferroflow report` reads, with nothing in the columns that only `bench` can tell.

    Parameters
    ----------
    client : distributed.Client
        Of the cluster that was measured.
    workload, arguments, policy, repetition, makespan_s, ops, invocation
        As in `BenchRecord`.
    """
    threads = list(client.nthreads().values())
    return BenchRecord(
        workload=workload,
        arguments=dict(arguments),
        policy=policy,
        workers=len(threads),
        threads_per_worker=max(threads),
        invocation=invocation,
        repetition=repetition,
        makespan_s=makespan_s,
        ops=ops,
        executed=ops,
        versions=versions(),
        commit=commit(),
        machine=machine(),
    )
