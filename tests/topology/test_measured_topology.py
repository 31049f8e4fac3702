"""Topologies that are measured on real clusters."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import answer
from distributed import Client

from ferroflow_dask import ClusterProfile, install, installed, uninstall
from ferroflow_dask.deploy import Calibration
from ferroflow_dask.deploy.measured import measured_topology
from ferroflow_dask.replay import Job, JobGraph, simulate
from ferroflow_dask.topology import load_topology, topology_from_dict
from ferroflow_dask.virtual import VirtualTask

SLEEPS = {("t", i): VirtualTask(0.05, core_share=0.0) for i in range(80)}


def calibration(client: Client) -> Calibration:
    """Return a calibration without measuring."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    profile = ClusterProfile(tuple(worker["nthreads"] for worker in workers.values()), bandwidth=2e8)
    hosts = {address: worker["host"] for address, worker in workers.items()}
    return Calibration(profile, hosts, {}, {}, {"on one host": 2e8})


@pytest.mark.cluster
def test_a_cluster_of_processes_becomes_a_topology(process_client: Client) -> None:
    install(process_client)
    try:
        topology = measured_topology(process_client, calibration(process_client))
        assert installed(process_client) is not None  # again
    finally:
        uninstall(process_client)
    (host,) = topology.hosts
    runtime = topology.runtime
    assert len(host.workers) == len(process_client.nthreads())
    assert 1 <= host.cores < 10_000
    assert host.inside.bandwidth == 2e8
    # The scheduler is in the client's process: it has the time of both.
    assert runtime.client_task_s == 0
    costs = (
        runtime.submit_s,
        runtime.graph_task_s,
        runtime.of_message("task-finished"),
        runtime.worker_task_s,
    )
    assert all(1e-7 < seconds < 0.5 for seconds in costs)
    assert 0 < runtime.noise <= 0.5
    assert topology_from_dict(topology.as_dict()) == topology
    for found in simulate(Job((JobGraph(SLEEPS, tuple(SLEEPS)),)), topology, ["dask", "ferroflow"]):
        assert found.bound_s < found.makespan_s < 20 * found.bound_s


def test_the_threads_of_one_process_share_its_time(thread_client: Client) -> None:
    topology = measured_topology(thread_client, calibration(thread_client))
    runtime = topology.runtime
    assert runtime.graph_task_s == runtime.worker_task_s == runtime.of_message("task-finished") > 0


def test_calibrate_writes_a_topology_that_simulate_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "here.yaml"
    local = ("--workers", "2", "--threads", "1", "--no-processes")
    answer("calibrate", *local, "--topology", file)
    assert len(load_topology(file).workers) == 2
    assert (tmp_path / "ferroflow-dask" / "topology.yaml").read_text() == file.read_text()
    for name in (str(file), "calibrated"):
        shown = answer("simulate", "--dag", "imbalanced", "--topology", name, "--workers", "2,4").output
        assert "imbalanced on calibrated" in shown
