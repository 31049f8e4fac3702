"""Clusters on this machine: the interfaces on which their ports are open."""

from __future__ import annotations

from contextlib import AbstractContextManager

import psutil
import pytest
from distributed import Client

from ferroflow_dask.deploy import DeviceChoice, device_client, local_client

pytestmark = pytest.mark.cluster


def listening() -> set[tuple[int, str, int]]:
    """Return process, address and port of each listening socket of this process and its children."""
    me = psutil.Process()
    return {
        (process.pid, *connection.laddr)
        for process in [me, *me.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def processes() -> AbstractContextManager[Client]:
    return local_client(1)


def threads() -> AbstractContextManager[Client]:
    return local_client(1, processes=False)


def devices() -> AbstractContextManager[Client]:
    choice = DeviceChoice.parse("emulated", "fp32")
    assert choice is not None
    return device_client(choice, 0)


@pytest.mark.parametrize("start", [processes, threads, devices])
def test_all_ports_are_on_the_loopback_interface(start: object) -> None:
    assert callable(start)
    before = listening()
    with start() as client:
        opened = listening() - before
        dashboard = client.scheduler_info()["services"]["dashboard"]
    assert dashboard in {port for _, _, port in opened}
    assert {address for _, address, _ in opened} == {"127.0.0.1"}
