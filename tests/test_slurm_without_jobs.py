"""Clusters of SLURM jobs that have none: needs no Slurm."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed import Worker
from distributed.core import Status
from slurm_clusters import SCHEDULER, sections, soon

from ferroflow_dask import slurm_cluster
from ferroflow_dask.cli.slurm import SlurmOptions
from ferroflow_dask.exceptions import UsageError

pytestmark = pytest.mark.cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    with slurm_cluster(
        "cpu", "gpu", config_file=sections(tmp_path), scheduler_options=SCHEDULER
    ) as of_both_kinds:
        yield of_both_kinds


def test_sections_are_named_as_on_the_command_line(tmp_path: Path) -> None:
    with (
        slurm_cluster(section="cpu", config_file=sections(tmp_path), scheduler_options=SCHEDULER) as cluster,
        pytest.raises(UsageError, match="give slurm_cluster a gpu_section"),
    ):
        cluster.scale(gpu_jobs=1)


def all_are(cluster: Any, state: str) -> bool:
    return [adaptive.state for adaptive in cluster.adaptives] == [state, state]


@pytest.mark.parametrize("again", ["collected", "stopped"])
def test_what_was_stopped_does_not_stop_what_came_after_it(cluster: Any, again: str) -> None:
    first = cluster.adapt(maximum_jobs=2)
    assert soon(lambda: all_are(cluster, "running"))
    second = cluster.adapt(maximum_jobs=20)
    assert first.state == "stopped"
    assert soon(lambda: all_are(cluster, "running"))
    if again == "stopped":
        first.stop()
    del first
    gc.collect()
    assert all_are(cluster, "running")
    second.stop()
    assert all_are(cluster, "stopped")


def test_what_has_yet_to_start_is_stopped_too(cluster: Any) -> None:
    async def adapt_and_stop() -> None:
        cluster.adapt(maximum_jobs=2).stop()  # both start when the loop has time for them

    cluster.sync(adapt_and_stop)
    assert all_are(cluster, "stopped")


@pytest.mark.parametrize("name", [None, "mine", "mine-cpu-0"])
def test_workers_that_others_have_added_stay(cluster: Any, name: str | None) -> None:
    async def added() -> Worker:
        return await Worker(cluster.scheduler_address, name=name, nthreads=1, dashboard=False)

    worker = cluster.sync(added)
    try:
        assert soon(lambda: worker.address in cluster.scheduler_info["workers"])
        cluster.scale(jobs=0, gpu_jobs=0)
        assert worker.status == Status.running
        assert worker.address in cluster.scheduler.workers
    finally:
        cluster.sync(worker.close)


@pytest.mark.parametrize(
    ("state", "reason", "is_kept"),
    [
        ("PENDING", "Priority", True),
        ("PENDING", "ReqNodeNotAvail, Reserved for maintenance", True),
        # That its nodes are down or drained as well: they come back.
        ("PENDING", "PartitionNodeLimit", True),
        ("PENDING", "PartitionTimeLimit", False),
        ("PENDING", "BadConstraints", False),
    ],
)
def test_jobs_wait_for_what_time_cures(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, state: str, reason: str, is_kept: bool
) -> None:
    async def states_of(job_ids: list[str]) -> dict[str, tuple[str, str]]:
        return dict.fromkeys(job_ids, (state, reason))

    monkeypatch.setattr("ferroflow_dask.deploy.slurm.states_of", states_of)

    class Submitted:
        status = Status.running
        job_id, job_name, log_directory, has_connected = "1", "ff-cpu", None, False

        async def close(self) -> None:
            self.status = Status.closed

    async def look() -> bool:
        cluster.set_jobs("cpu", 1)
        (name,) = cluster.worker_spec
        cluster.workers[name] = Submitted()
        await cluster._look()
        was_kept = name in cluster.workers and name in cluster.worker_spec
        cluster.worker_spec.clear()
        cluster.workers.clear()
        return was_kept

    assert cluster.sync(look) == is_kept


def test_jobs_with_gpus_alone_need_no_section_of_others(tmp_path: Path) -> None:
    gpu = {"cores": 1, "memory": "1 GiB", "interface": "lo", "scheduler-options": {"dashboard_address": ":0"}}
    file = tmp_path / "q.yaml"
    file.write_text(yaml.safe_dump({"jobqueue": {"gpu": gpu}}), encoding="utf-8")
    options = SlurmOptions(0, 2, "cpu", "gpu", str(file), is_encrypted=False, wait_s=1.0)
    with options.cluster() as cluster:
        assert cluster.kinds["gpu"].section == "gpu"
        assert cluster.scheduler_address.startswith("tcp://127.")  # their network, too
    with pytest.raises(UsageError, match=r"no section jobqueue\.cpu"):
        replace(options, jobs=1).cluster()
