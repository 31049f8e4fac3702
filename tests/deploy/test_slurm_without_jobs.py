"""Clusters of SLURM jobs that have none: needs no Slurm."""

from __future__ import annotations

import gc
import math
import socket
from collections.abc import Callable, Iterator
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
from ferroflow_dask.deploy import JobKind
from ferroflow_dask.deploy.slurm.adaptive import job_limits
from ferroflow_dask.exceptions import ClusterError, UsageError

pytestmark = pytest.mark.cluster


def slurm_says(
    patch: pytest.MonkeyPatch, states: Callable[[list[str]], Any], module: str = "replacing"
) -> None:
    """Let Slurm answer with the states of some jobs; None if it does not answer."""

    async def states_of(job_ids: list[str]) -> Any:
        return states(job_ids)

    patch.setattr(f"ferroflow_dask.deploy.slurm.{module}.states_of", states_of)


def add_workers(cluster: Any, *names: str | None) -> list[Worker]:
    """Return workers of no job."""

    async def added() -> list[Worker]:
        options = {"nthreads": 1, "dashboard": False}
        return [await Worker(cluster.scheduler_address, name=name, **options) for name in names]

    found: list[Worker] = cluster.sync(added)
    return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    with slurm_cluster(
        "cpu", "gpu", config_file=sections(tmp_path), scheduler_options=SCHEDULER
    ) as of_both_kinds:
        yield of_both_kinds


def test_numbers_of_jobs_with_gpus_where_there_are_none(tmp_path: Path) -> None:
    told = "give slurm_cluster a gpu_section"
    with slurm_cluster(section="cpu", config_file=sections(tmp_path), scheduler_options=SCHEDULER) as cluster:
        with pytest.raises(UsageError, match=told):
            cluster.scale(gpu_jobs=1)
        for limit in ("minimum_gpu_jobs", "maximum_gpu_jobs"):
            with pytest.raises(UsageError, match=told):
                cluster.adapt(**{limit: 1})


# distributed does not close the socket that it could not bind.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_dashboard_whose_port_is_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    # dask-jobqueue silences the handlers of pytest.
    monkeypatch.setattr(
        "ferroflow_dask.deploy.slurm.cluster.logger.warning",
        lambda text, *values: lines.append(text % values),
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = {"host": "127.0.0.1", "dashboard_address": f"127.0.0.1:{port}"}
        with slurm_cluster("cpu", config_file=sections(tmp_path), scheduler_options=options) as cluster:
            link = cluster.dashboard_link
    assert lines == [f"port {port} is in use; the dashboard is at {link}"]
    assert f":{port}/" not in link


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"jobs": 2, "gpu_jobs": -1}, "jobs must be a whole number from 0 up, got -1"),
        ({"n": -1}, "n must be a whole number from 0 up, got -1"),
        ({"cores": -4}, "jobs must be from 0 to 100,000 .*, got -4"),
        ({"jobs": 10**12}, r"jobs must be from 0 to 100,000 \(.* MaxJobCount.*\), got 1,000,000,000,000$"),
        ({"memory": "1000 PiB"}, "jobs must be from 0 to 100,000 .*, got "),
        ({"gpu_jobs": "2"}, "jobs must be a whole number from 0 up, got '2'"),
    ],
    ids=str,
)
def test_numbers_of_jobs_that_make_no_sense(cluster: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cluster.scale(**given)
    assert not cluster.worker_spec


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"minimum_jobs": 3, "maximum_jobs": 1}, "minimum_jobs is 3 and maximum_jobs 1; no number"),
        ({"minimum": 3, "maximum": 2}, "minimum is 3 and maximum 2; no number"),
        ({"minimum": 3, "maximum_jobs": 2}, "minimum_jobs is 3 and maximum_jobs 2; no number"),
        ({"minimum": 1, "minimum_jobs": 3}, "minimum is in workers, and minimum_jobs in jobs; give one"),
        ({"minimum_jobs": -1}, "minimum_jobs is -1; it must be a whole number"),
        ({"maximum_gpu_jobs": 1.5}, r"maximum_gpu_jobs is 1\.5; it must be a whole number"),
        ({"minimum": math.inf}, "minimum is inf; it must be a whole number"),
    ],
    ids=str,
)
def test_limits_that_make_no_sense(cluster: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cluster.adapt(**given)
    assert not cluster.adaptives


def test_limits_in_jobs_and_in_workers() -> None:
    kinds = {kind: JobKind(kind, {"cores": 4, "memory": "1 GiB", "processes": 4}) for kind in ("cpu", "gpu")}
    assert job_limits(kinds, {}) == {"cpu": (0, math.inf), "gpu": (0, math.inf)}
    assert job_limits(kinds, {"minimum": 5, "maximum": 9})["cpu"] == (2, 3)
    assert job_limits(kinds, {"minimum_jobs": 2, "maximum": math.inf})["cpu"] == (2, math.inf)
    assert job_limits(kinds, {"minimum_gpu_jobs": 1, "maximum_gpu_jobs": 2})["gpu"] == (1, 2)


def test_workers_under_other_names_are_told(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def planned() -> None:
        cluster.set_jobs("cpu", 1)

    slurm_says(monkeypatch, lambda _: {}, "waiting")
    cluster.sync(planned)  # as if Slurm had it
    (name,) = cluster.worker_spec
    workers = add_workers(cluster, f"{name}-0", f"{name}-1")
    try:
        assert soon(lambda: len(cluster.scheduler_info["workers"]) == 2)
        with pytest.raises(
            ClusterError, match=f"1 of 1 workers .* connected under other names: {name}-0, {name}-1$"
        ):
            cluster.wait_for_jobs(0)
    finally:
        cluster.worker_spec.clear()
        for worker in workers:
            cluster.sync(worker.close)


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


def test_who_scales_adapts_no_more(cluster: Any) -> None:
    adaptive = cluster.adapt(maximum_jobs=2)
    cluster.scale(0)
    assert not cluster.adaptives
    assert adaptive.state == "stopped"


def test_what_has_yet_to_start_is_stopped_too(cluster: Any) -> None:
    async def adapt_and_stop() -> None:
        cluster.adapt(maximum_jobs=2).stop()  # both start when the loop has time for them

    cluster.sync(adapt_and_stop)
    assert all_are(cluster, "stopped")


@pytest.mark.parametrize("name", [None, "mine", "mine-cpu-0"])
def test_workers_that_others_have_added_stay(cluster: Any, name: str | None) -> None:
    (worker,) = add_workers(cluster, name)
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
        ("", "Slurm does not answer", True),
    ],
)
def test_jobs_wait_for_what_time_cures(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, state: str, reason: str, is_kept: bool
) -> None:
    slurm_says(monkeypatch, lambda ids: dict.fromkeys(ids, (state, reason)) if state else None)
    assert keeps_a_job(cluster) == is_kept
    assert bool(cluster.failures) != is_kept


class Submitted:
    """A job that Slurm has, and whose workers have not connected."""

    status = Status.running
    job_id, job_name, log_directory, has_connected = "1", "ff-cpu", None, False
    last_state, kind = "", None

    async def close(self) -> None:
        self.status = Status.closed


def keeps_a_job(cluster: Any) -> bool:
    """Return whether a job is still there after a look at what Slurm says of it."""

    async def look() -> bool:
        cluster.set_jobs("cpu", 1)
        (name,) = cluster.worker_spec
        cluster.workers[name] = Submitted()
        await cluster._look()
        was_kept = name in cluster.workers and name in cluster.worker_spec
        cluster.worker_spec.clear()
        cluster.workers.clear()
        return was_kept

    return bool(cluster.sync(look))


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ({"1": ("CANCELLED", "")}, "job 1 was CANCELLED; job 2 replaces it"),
        ({"1": ("FAILED", "NonZeroExitCode")}, "job 1 was FAILED (NonZeroExitCode); job 2 replaces it"),
        ({"1": ("RUNNING", "")}, "all workers of job 1 have left (RUNNING); job 2 replaces it"),
        ({}, "job 1 was gone; job 2 replaces it"),
        (None, "all workers of job 1 have left (Slurm does not answer); job 2 replaces it"),
    ],
    ids=["cancelled", "with a reason", "running", "forgotten", "silence"],
)
def test_the_message_about_a_lost_job_names_its_replacement(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, states: dict[str, tuple[str, str]] | None, told: str
) -> None:
    async def correct() -> None:
        cluster.workers["cpu-0"] = replacement

    slurm_says(monkeypatch, lambda _: states)
    monkeypatch.setattr(cluster, "correct_and_log", correct)
    job, replacement = Submitted(), Submitted()
    replacement.job_id = "2"
    cluster.sync(cluster._replace_lost, "cpu-0", job)
    assert [*cluster.failures] == [told]
    assert job.status == Status.closed


def test_jobs_are_part_of_the_representations(cluster: Any) -> None:
    running, pending = Submitted(), Submitted()
    running.has_connected, pending.last_state, pending.job_id = True, "PENDING (Priority)", "2"

    async def planned() -> None:
        cluster.set_jobs("cpu", 3)
        cluster.workers.update(zip(cluster.worker_spec, (running, pending), strict=False))

    cluster.sync(planned)
    try:
        assert repr(cluster).endswith(", jobs: 1 running, 2 pending)")
        line = "1 of 3 jobs running; 2 PENDING (Priority)"
        assert line in cluster._repr_html_()  # in a notebook
        assert line in cluster._scaling_status()
    finally:
        cluster.workers.clear()
        cluster.worker_spec.clear()


def test_failures_count_anew_when_a_worker_connects(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_says(monkeypatch, lambda ids: dict.fromkeys(ids, ("FAILED", "NonZeroExitCode")))
    for _ in range(10):
        assert not keeps_a_job(cluster)
    assert cluster.has_given_up
    (worker,) = add_workers(cluster, None)
    try:
        assert soon(lambda: not cluster.has_given_up)
    finally:
        cluster.sync(worker.close)
    assert not keeps_a_job(cluster)
    assert not cluster.has_given_up  # one failure more is the first again


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
