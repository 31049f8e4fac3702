"""Clusters of jobs of the private Slurm, ours and dask-jobqueue's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import waiting
import yaml
from distributed import Client
from distributed.core import Status
from real_slurm import queue

from ferroflow_dask import slurm_cluster
from ferroflow_dask.clients import workers_of

#: Jobs come within a second or two; the rest is for a machine that does other things as well.
_WAIT_S = 60.0
SCHEDULER = {"host": "127.0.0.1", "dashboard_address": ":0"}


def sections(folder: Path, **cpu: Any) -> Path:
    """Write a jobqueue.yaml with a section `cpu` and a section `gpu` of small jobs."""
    common = {"cores": 1, "memory": "900 MiB", "walltime": "00:30:00", "log-directory": str(folder / "logs")}
    gpu = {"job-extra-directives": ["--gres=gpu:1"], "worker-extra-args": ["--resources", "GPU=1"]}
    settings = {
        "slurm": common,
        "cpu": {"name": "ff-cpu", **cpu},
        "gpu": {"name": "ff-gpu", **gpu},
    }
    path = folder / "jobqueue.yaml"
    path.write_text(yaml.safe_dump({"jobqueue": settings}), encoding="utf-8")
    return path


@contextmanager
def ours(folder: Path, gpu: str | None = None, policy: str | None = None, **cpu: Any) -> Iterator[Any]:
    """Start a cluster of ours; expect that it leaves no job behind."""
    with slurm_cluster(
        "cpu", gpu, config_file=sections(folder, **cpu), policy=policy, scheduler_options=SCHEDULER
    ) as cluster:
        yield cluster
    assert no_jobs()


@contextmanager
def plain(folder: Path, **arguments: Any) -> Iterator[Any]:
    """Start a cluster of dask-jobqueue as it is."""
    from dask_jobqueue import SLURMCluster

    common = {"cores": 1, "memory": "900 MiB", "walltime": "00:30:00", "log_directory": str(folder / "logs")}
    cluster = SLURMCluster(scheduler_options=SCHEDULER, **{**common, **arguments})
    try:
        yield cluster
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                cluster.close()
            finally:
                cluster.status = Status.closed  # else it warns when it is collected, during another test


@contextmanager
def client_of(cluster: Any) -> Iterator[Client]:
    """Yield a client that is nobody's default."""
    with Client(cluster, set_as_default=False) as client:
        yield client


def soon(condition: Callable[[], object], within_s: float = _WAIT_S) -> bool:
    """Return whether something comes true in time."""
    return waiting.soon(condition, within_s)


def no_jobs() -> bool:
    """Return whether Slurm soon has no job that waits or runs."""
    return soon(lambda: not queue())


def n_workers(client: Client) -> int:
    return len(workers_of(client))


def job_ids(cluster: Any) -> list[str]:
    """Return the numbers of the jobs that were submitted, oldest first."""
    return sorted((job.job_id for job in list(cluster.workers.values()) if job.job_id), key=int)
