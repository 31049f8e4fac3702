"""What clusters of SLURM jobs survive, and each trap of dask-jobqueue's own: seen there, gone here."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import as_completed
from real_slurm import ask, queue, states
from slurm_clusters import client_of, job_ids, n_workers, ours, plain, soon

from ferroflow_dask.exceptions import ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("slurm")]

#: Within which a lost job is replaced, if it is at all [s].
_REPLACED_S = 8.0
TWO_WORKERS = {"cores": 2, "processes": 2}


@pytest.fixture(autouse=True)
def _losses_are_seen_soon() -> Iterator[None]:
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "500ms"}):
        yield


def function() -> Callable[..., int]:
    """Return a function that workers, who do not have this module, are sent whole."""

    def square(x: int, seconds: float = 0.1) -> int:
        time.sleep(seconds)
        return x * x

    return square


square = function()
SQUARES = [x * x for x in range(40)]


def worker_names(cluster: Any) -> set[str]:
    return {str(worker["name"]) for worker in cluster.scheduler_info["workers"].values()}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_is_cancelled_in_mid_run(
    tmp_path: Path, processes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with ours(tmp_path, cores=processes, processes=processes) as cluster, client_of(cluster) as client:
        cluster.scale(jobs=2)
        cluster.wait_for_jobs()
        assert worker_names(cluster) == cluster.plan
        futures = client.map(square, range(40), pure=False)
        assert soon(lambda: sum(future.done() for future in futures) > 5)
        lost = job_ids(cluster)[0]
        with caplog.at_level(logging.WARNING, "ferroflow_dask"):
            ask("scancel", lost)
            assert client.gather(futures) == SQUARES
            assert soon(lambda: n_workers(client) == 2 * processes and lost not in job_ids(cluster))
        assert soon(lambda: len(queue()) == 2)  # the lost one may be on its way out for a while
        told = rf"job {lost} (was CANCELLED|have left \(COMPLETING\)); job (\d+) replaces it"
        assert soon(lambda: (found := re.search(told, caplog.text)) and found[2] in job_ids(cluster))


def test_a_node_that_goes_down_in_mid_run(tmp_path: Path) -> None:
    with ours(tmp_path) as cluster, client_of(cluster) as client:
        cluster.scale(jobs=3)
        cluster.wait_for_jobs()
        node = next(iter(client.run(os.getenv, "SLURMD_NODENAME").values()))
        futures = client.map(square, range(40), pure=False)
        assert soon(lambda: sum(future.done() for future in futures) > 5)
        ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        try:
            assert client.gather(futures) == SQUARES
            assert soon(lambda: n_workers(client) == 3)
        finally:  # it returns by itself, as soon as it answers
            assert soon(lambda: "down" not in ask("sinfo", "-h", "-N", "-n", node, "-p", "debug", "-o", "%T"))
        # Slurm queues such a job anew, under its old number; we cancel it and submit another.
        (failure,) = cluster.failures
        assert re.fullmatch(r"(all workers of )?job \d+ .+; job \d+ replaces it", failure)


def test_workers_that_leave_before_the_walltime_ends(tmp_path: Path) -> None:
    lifetime = {"worker-extra-args": ["--lifetime", "12s", "--lifetime-stagger", "3s"]}
    with ours(tmp_path, **lifetime) as cluster, client_of(cluster) as client:
        cluster.scale(jobs=2)
        cluster.wait_for_jobs()
        first = set(job_ids(cluster))
        futures = client.map(square, range(40), pure=False)
        assert client.gather(futures) == SQUARES
        # Both jobs have been replaced, one after the other, and nothing was computed again.
        assert soon(lambda: n_workers(client) == 2 and not first & set(job_ids(cluster)))
        assert client.gather(futures) == SQUARES


@pytest.mark.slow
def test_the_walltime_ends_in_mid_run(tmp_path: Path) -> None:
    short = {"queue": "short", "walltime": "00:01:00", "worker-extra-args": ["--lifetime", "1h"]}
    with ours(tmp_path, **short) as cluster, client_of(cluster) as client:
        cluster.scale(jobs=2)
        cluster.wait_for_jobs()
        first = job_ids(cluster)
        # Taken as they come: results that nobody has fetched are lost with the jobs, both at once.
        with client.as_current():
            pending = as_completed(client.map(square, range(40), [5.0] * 40, pure=False), with_results=True)
            found = sorted(result for _, result in pending)
        assert found == SQUARES
        ended = states()
        assert {ended[job] for job in first if job in ended} <= {"TIMEOUT"}
        assert any("TIMEOUT" in failure for failure in cluster.failures)


class TestTraps:
    """Each trap of `dask_jobqueue.SLURMCluster`, seen there first."""

    def test_lost_jobs_and_workers_are_never_replaced(self, tmp_path: Path) -> None:
        with ExitStack() as stack:
            cases: dict[str, dict[str, Any]] = {
                # The first one that is waited for, as it leaves by itself.
                # Ours: test_workers_that_leave_before_the_walltime_ends.
                "scale, at the end of a lifetime": {"worker_extra_args": ["--lifetime", "8s"]},
                # Ours: test_a_job_that_is_cancelled_in_mid_run[2].
                "adapt with several workers": TWO_WORKERS,
                # Ours: test_a_job_that_is_cancelled_in_mid_run[1].
                "scale": {},
            }
            clusters = {
                name: stack.enter_context(plain(tmp_path, job_name=f"lost-{i}", **arguments))
                for i, (name, arguments) in enumerate(cases.items())
            }
            clients = {name: stack.enter_context(client_of(cluster)) for name, cluster in clusters.items()}
            for name, cluster in clusters.items():
                if name.startswith("adapt"):
                    cluster.adapt(minimum_jobs=1, maximum_jobs=1, interval="200ms")
                else:
                    cluster.scale(jobs=1)
            for name, client in clients.items():
                wanted = cases[name].get("processes", 1)
                assert soon(lambda client=client, wanted=wanted: n_workers(client) == wanted), name
            for name, cluster in clusters.items():
                if "lifetime" not in name:
                    ask("scancel", *job_ids(cluster))
            for name, client in clients.items():
                assert soon(lambda client=client: n_workers(client) == 0), name
            assert not soon(lambda: any(map(n_workers, clients.values())), _REPLACED_S)

    def test_adapt_gives_up_jobs_whose_results_are_held(self, tmp_path: Path) -> None:
        # Ours: test_adapt_comes_and_goes_in_whole_jobs_and_keeps_what_is_held.
        with plain(tmp_path, **TWO_WORKERS) as cluster, client_of(cluster) as client:
            cluster.adapt(maximum_jobs=3, interval="200ms", wait_count=2, target_duration="500ms")
            futures = client.map(square, range(40), pure=False)
            assert soon(lambda: all(future.done() for future in futures))
            assert soon(lambda: not all(future.done() for future in futures) or not queue())

    def test_workers_are_grouped_only_by_an_argument(self, tmp_path: Path) -> None:
        # Ours: test_a_job_that_is_cancelled_in_mid_run[2].
        with (
            dask.config.set({"jobqueue.slurm.processes": 2}),
            plain(tmp_path, cores=2) as cluster,
            client_of(cluster) as client,
        ):
            cluster.scale(jobs=1)
            assert soon(lambda: n_workers(client) == 2)
            assert not worker_names(cluster) & cluster.plan

    def test_a_refused_job_is_only_logged_and_breaks_close(self, tmp_path: Path) -> None:
        broken = ExitStack()
        cluster = broken.enter_context(plain(tmp_path, queue="nowhere"))
        cluster.scale(jobs=1)  # says nothing
        time.sleep(1)
        with pytest.raises((AssertionError, RuntimeError)):
            broken.close()
        with ours(tmp_path, queue="nowhere") as cluster:
            with pytest.raises(ClusterError, match="invalid partition"):
                cluster.scale(jobs=1)
            assert not cluster.worker_spec
