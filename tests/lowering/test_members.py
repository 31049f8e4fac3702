"""Which workers a cluster has, asked while the client refreshes what it remembers; and by which clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import pytest
from distributed import Client
from one_loop import Cluster, on_cluster

import ferroflow_dask
from ferroflow_dask.clients import ask_workers, workers_of
from ferroflow_dask.devices.workers import gpu_workers
from ferroflow_dask.exceptions import UsageError

pytestmark = pytest.mark.cluster


def test_workers_are_all_told_whatever_the_client_refreshes(process_client: Client) -> None:
    address = process_client.scheduler.address
    with (
        dask.config.set({"distributed.client.scheduler-info-interval": "1 ms"}),
        Client(address, set_as_default=False) as client,
    ):
        found = [workers_of(client) for _ in range(300)]
    assert {len(workers) for workers in found} == {2}
    assert all(worker["nthreads"] == 1 for workers in found for worker in workers.values())


def test_a_worker_that_has_gone_has_no_answer(process_client: Client) -> None:
    alive = list(workers_of(process_client))
    with dask.config.set({"distributed.comm.timeouts.connect": "5s"}):
        found = ask_workers(process_client, abs, -1, workers=["tcp://127.0.0.1:1", *alive])
    assert found == dict.fromkeys(alive, 1)


def test_what_a_worker_raises_is_raised(process_client: Client) -> None:
    with pytest.raises(ZeroDivisionError):
        ask_workers(process_client, divmod, 1, 0)


CALLS: dict[str, Callable[[Client], Any]] = {
    "calibrate": ferroflow_dask.calibrate,
    "executed": lambda client: ferroflow_dask.executed(client, "run"),
    "gpu_workers": gpu_workers,
    "scatter": ferroflow_dask.generate("uniform", n=1, dim=2).scatter,
    "use_gpus": ferroflow_dask.use_gpus,
    "workers_of": workers_of,
}


def test_what_waits_for_a_cluster_refuses_asynchronous_clients() -> None:
    async def test(cluster: Cluster) -> None:
        for name, call in CALLS.items():
            with pytest.raises(UsageError, match=rf"{name} waits for the cluster.*: Client\('.*://.*'\)"):
                call(cluster.client)

    on_cluster(test)
