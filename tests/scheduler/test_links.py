"""Bandwidths of links within a host and between hosts, and memory of workers, by their heartbeats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, Scheduler, SpecCluster, Worker
from in_charge import in_charge, stealing_of, workers_of
from waiting import until

from ferroflow_dask.policy import ClusterView
from ferroflow_dask.scheduler.network import Links, NetworkView

HOSTS = ("10.0.0.1", "10.0.0.2")
A, B, C = "tcp://10.0.0.1:1", "tcp://10.0.0.1:2", "tcp://10.0.0.2:1"


def scheduler(told: dict[str, dict[str, tuple[float, int]]], *hosts: str) -> Any:
    """Return a scheduler of three workers, of which some tell the sum of bandwidths and their number."""
    workers = {
        address: SimpleNamespace(metrics={"bandwidth": {"workers": told.get(address, {})}}, host=host)
        for address, host in ((A, HOSTS[0]), (B, HOSTS[0]), (C, HOSTS[1]))
    }
    workers[B].metrics = {}  # it has told nothing yet
    return SimpleNamespace(bandwidth=1e8, host_info=dict.fromkeys(hosts), workers=workers)


def test_each_class_has_the_mean_of_its_transfers_and_dasks_on_one_host_and_until_there_are_any() -> None:
    assert Links(scheduler({A: {B: (1e9, 1)}}, "10.0.0.1")).bandwidths(0.0) == (1e8, 1e8)
    assert Links(scheduler({}, *HOSTS)).bandwidths(0.0) == (1e8, 1e8)
    assert Links(scheduler({A: {B: (4e9, 4)}}, *HOSTS)).bandwidths(0.0) == (1e9, 1e8)
    told = {A: {B: (4e9, 4), C: (6e6, 3)}, C: {B: (4e6, 1)}}
    assert Links(scheduler(told, *HOSTS)).bandwidths(0.0) == (1e9, 2.5e6)


def test_each_heartbeat_is_looked_at_and_the_old_count_less_and_less() -> None:
    known = scheduler({A: {B: (1e9, 1)}}, *HOSTS)
    links = Links(known)
    links.bandwidths(0.0)
    known.workers[A].metrics["bandwidth"]["workers"] = {B: (3e9, 1)}
    assert links.bandwidths(0.2)[0] == 1e9
    assert links.bandwidths(0.25)[0] == pytest.approx(3.8e9 / 1.8)
    known.workers[A].metrics["bandwidth"]["workers"] = {}
    assert links.bandwidths(0.5)[0] == pytest.approx(3.8e9 / 1.8)


@pytest.mark.parametrize(
    ("target", "short"),
    [(0.6, [False, True, False, False]), (0.9, [False] * 4), (False, [False] * 4)],
    ids=["Dask's target", "a higher target", "no target"],
)
def test_a_worker_is_short_of_memory_above_the_target_of_dask(
    target: float | bool, short: list[bool]
) -> None:
    metrics: list[tuple[dict[str, int], int]] = [
        ({"memory": 50}, 100),
        ({"memory": 70}, 100),
        ({}, 100),  # it has sent no heartbeat
        ({"memory": 70}, 0),  # it has no limit
    ]
    workers = {
        str(i): SimpleNamespace(metrics=metric, memory_limit=limit)
        for i, (metric, limit) in enumerate(metrics)
    }
    view = ClusterView()
    for address in workers:
        view.add_worker(address, 1)
    network: Any = SimpleNamespace(workers=workers)
    with dask.config.set({"distributed.worker.memory.target": target}):
        NetworkView(network, view).update_memory(0.0)
    assert [worker.is_short_of_memory for worker in view.workers.values()] == short


def test_the_memory_of_workers_is_read_again_with_the_next_heartbeat() -> None:
    worker = SimpleNamespace(metrics={"memory": 10}, memory_limit=100)
    view = ClusterView()
    view.add_worker("a", 1)
    network: Any = SimpleNamespace(workers={"a": worker})
    reader = NetworkView(network, view)
    for now, nbytes, is_short in ((0.0, 90, True), (0.1, 10, True), (1.0, 10, False)):
        worker.metrics["memory"] = nbytes
        reader.update_memory(now)
        assert view.workers["a"].is_short_of_memory is is_short


@pytest.mark.cluster
def test_a_cluster_on_two_hosts_tells_what_its_links_are_like() -> None:
    workers = {
        i: {"cls": Worker, "options": {"nthreads": 1, "host": f"127.0.0.{host}"}}
        for i, host in enumerate((1, 1, 2))
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "dashboard_address": ":0", "port": 0}}
    with SpecCluster(workers, scheduler) as cluster, Client(cluster) as client, in_charge(client):
        first, near, far = (worker.address for worker in workers_of(client))
        view = stealing_of(client).view
        assert [view.workers[address].host for address in (first, far)] == ["127.0.0.1", "127.0.0.2"]

        def are_known() -> bool:
            data = client.submit(bytes, 2_000_000, workers=[first], pure=False)
            lengths = [client.submit(len, data, workers=[address], pure=False) for address in (near, far)]
            assert client.gather(lengths) == [2_000_000] * 2
            return len({view.host_bandwidth, view.bandwidth, cluster.scheduler.bandwidth}) == 3

        until(are_known)
