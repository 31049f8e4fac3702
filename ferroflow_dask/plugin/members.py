"""Which workers a cluster has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Client

from ferroflow_dask.lowering.clients import check_synchronous


def workers_of(client: Client) -> Mapping[str, Mapping[str, Any]]:
    """Return what the scheduler knows of each worker, by address.

    `Client.scheduler_info` returns what the client remembers, and between its asking and its returning the
    client may have refreshed that without any workers, as it does every two seconds.
    """
    check_synchronous(client, "workers_of")
    scheduler: Any = client.scheduler
    found: Mapping[str, Any] = client.sync(scheduler.identity, n_workers=-1)["workers"]
    return found
