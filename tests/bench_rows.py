"""Rows of a benchmark that nobody ran, for tests of what reads them."""

from __future__ import annotations

import re
from typing import Any

from ferroflow_dask.bench.schema import SCHEMA, BenchRecord

_FIELDS: dict[str, Any] = {
    "schema": SCHEMA,
    "workload": "merge",
    "suite": "rsds",
    "source": "",
    "arguments": {"n": 1000},
    "policy": "dask",
    "lowering": "",
    "costs": "learned",
    "workers": 4,
    "threads_per_worker": 1,
    "processes": True,
    "cluster": "local",
    "section": "",
    "tls": False,
    "fresh": False,
    "invocation": "5f3a",
    "repetition": 0,
    "makespan_s": 2.0,
    "bound_s": 1.0,
    "efficiency": 0.5,
    "predicted_s": None,
    "predicted_tasks": None,
    "predicted_bytes": None,
    "sent_s": 0.1,
    "created_s": 0.2,
    "started_s": 0.3,
    "first_result_s": None,
    "ops": 100,
    "tasks": 101,
    "executed": 101,
    "steals_asked": 4,
    "steals_confirmed": 3,
    "steals_refused": 1,
    "bytes_moved": 2_000_000,
    "p2p_bytes": 0,
    "messages": 1_000,
    "batches": 100,
    "bundled": None,
    "idle_fraction": 0.25,
    "scheduler_cpu_s": 0.125,
    "client_cpu_s": 0.25,
    "worker_cpu_s": 1.5,
    "others_cpu_s": 0.0,
    "peak_worker_memory": 100_000_000,
    "peak_client_memory": None,
    "peak_scheduler_memory": None,
    "status": "ok",
    "seed": 0,
    "versions": {"dask": "2026.8.0", "distributed": "2026.8.0", "python": "3.12.1"},
    "commit": "0123456789ab",
    "machine": "Test Processor, 2 cores, 8 GiB",
}


def fields(**changes: Any) -> dict[str, Any]:
    """Return the fields of a valid row."""
    return {**_FIELDS, **changes}


def row(**changes: Any) -> BenchRecord:
    """Return a valid row; its efficiency follows from its makespan."""
    chosen = fields(**changes)
    if "efficiency" not in changes and chosen["bound_s"] is not None:
        chosen["efficiency"] = chosen["bound_s"] / chosen["makespan_s"]
    return BenchRecord(**chosen)


def rows(makespans_s: list[float], **changes: Any) -> list[BenchRecord]:
    """Return a row for each makespan, one repetition after the other."""
    return [row(makespan_s=s, repetition=i, **changes) for i, s in enumerate(makespans_s)]


def section(text: str, title: str) -> str:
    """Return what a report has under a heading."""
    found = re.search(rf"^#+ {title}[^\n]*\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"no section {title!r} in:\n{text}"
    return found[1].strip()
