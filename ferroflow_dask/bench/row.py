"""A row for a run that somebody has measured by other means than `ferroflow bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Client

from ferroflow_dask.bench.machine import commit, machine
from ferroflow_dask.bench.record import versions
from ferroflow_dask.bench.schema import OK, SCHEMA, BenchRecord


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
        schema=SCHEMA,
        workload=workload,
        family="dag",
        arguments=dict(arguments),
        policy=policy,
        lowering="",
        costs="learned",
        workers=len(threads),
        threads_per_worker=max(threads),
        processes=True,
        cluster="unknown",
        section=None,
        tls=None,
        fresh=None,
        invocation=invocation,
        repetition=repetition,
        makespan_s=makespan_s,
        bound_s=None,
        efficiency=None,
        predicted_s=None,
        predicted_tasks=None,
        predicted_bytes=None,
        ops=ops,
        tasks=0,
        executed=ops,
        steals_asked=0,
        steals_confirmed=0,
        steals_refused=0,
        bytes_moved=0,
        idle_fraction=0.0,
        scheduler_cpu_s=0.0,
        peak_worker_memory=0,
        status=OK,
        seed=0,
        versions=versions(),
        commit=commit(),
        machine=machine(),
    )
