"""All ways to install the plugin, and what each says where it cannot work."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from operator import add
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, Scheduler
from distributed.scheduler import DEFAULT_EXTENSIONS, WorkerState
from in_charge import feature
from waiting import pause

from ferroflow_dask import FerroflowPlugin, install, uninstall
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.scheduler import _distributed, installed
from ferroflow_dask.scheduler.extension import FerroflowStealing

pytestmark = pytest.mark.cluster

PRELOAD = "ferroflow_dask.preload"
#: The module, not the function of the same name.
install_module = importlib.import_module("ferroflow_dask.scheduler.installation")


def check_that_it_works(client: Client) -> None:
    """Make tasks that only stealing can spread, and expect that ours spread them."""
    first = next(iter(client.nthreads()))
    futures = client.map(pause, range(40), workers=[first], allow_other_workers=True, pure=False)
    assert client.gather(futures) == list(range(40))
    scheduler = client.cluster.scheduler
    extensions = [plugin for plugin in scheduler.plugins.values() if isinstance(plugin, FerroflowStealing)]
    assert extensions == [scheduler.extensions["stealing"]]
    assert extensions[0].steals["confirmed"] > 0
    assert extensions[0].error is None


@contextmanager
def cluster(**options: Any) -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0", **options
        ) as started,
        Client(started) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"distributed.scheduler.preload": [PRELOAD]}, {}),
        ({}, {"plugins": [FerroflowPlugin()]}),
        ({}, {"extensions": {**DEFAULT_EXTENSIONS, "stealing": FerroflowStealing}}),
    ],
    ids=["a preload in the configuration", "a plugin as an argument", "an extension as an argument"],
)
def test_by_settings_of_the_scheduler(config: dict[str, Any], options: dict[str, Any]) -> None:
    with dask.config.set(config), cluster(scheduler_kwargs=options) as client:
        check_that_it_works(client)
        made = client.cluster.scheduler.extensions["stealing"].changes.names
    with cluster() as client:
        install(client)
        assert made == client.cluster.scheduler.extensions["stealing"].changes.names  # each once
        if "extensions" not in options:
            assert installed(client) is not None
            uninstall(client)
            assert installed(client) is None


def test_by_a_preload_of_the_client_in_the_configuration() -> None:
    with dask.config.set({"distributed.client.preload": [PRELOAD]}), cluster() as client:
        check_that_it_works(client)
        with Client(client.cluster) as second:
            plugin = installed(second)
        assert plugin is not None  # and the second client has left the first one's in place
        check_that_it_works(client)


def test_it_schedules_until_it_is_uninstalled_whoever_drops_the_plugin() -> None:
    with cluster() as client:
        install(client, "ring")
        client.unregister_scheduler_plugin("ferroflow")
        assert installed(client).policy == "ring"
        check_that_it_works(client)
        uninstall(client)
        assert installed(client) is None
        client.cluster.scheduler.validate_state()


def test_by_the_configured_policy() -> None:
    setting = {"distributed.scheduler.preload": [PRELOAD], "ferroflow.policy": "static"}
    with dask.config.set(setting), cluster() as client:
        stealing = client.cluster.scheduler.extensions["stealing"]
        assert type(stealing.placement.policy).__name__ == "StaticPolicy"


def test_by_an_option_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    arguments = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    process = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_scheduler", "--preload", PRELOAD, *arguments],
        env=dict(os.environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with Client(scheduler_file=str(file), set_as_default=False, timeout=120) as client:
            assert installed(client) is not None
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_asynchronously_through_client_cluster_and_scheduler() -> None:
    async def test() -> None:
        async with (
            LocalCluster(n_workers=1, processes=False, dashboard_address=":0", asynchronous=True) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            for target in (client, cluster, cluster.scheduler):
                await install(target)
                assert type(cluster.scheduler.extensions["stealing"]) is FerroflowStealing
                assert await installed(client) is not None
                assert await client.submit(add, 1, 2, pure=False) == 3
                await uninstall(target)
                assert await installed(client) is None

    asyncio.run(test())


# Where it cannot work


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"ferroflow-dask": None}, "has no package ferroflow-dask; run there, in a clone: pip install"),
        (
            {"ferroflow-dask": "9.9"},
            r"has ferroflow-dask 9\.9, here it is .*; run there, in a clone of .*: pip install",
        ),
        ({"distributed": "2026.3.0"}, r"runs distributed 2026\.3\.0; 2026\.7\.1 or newer is needed"),
    ],
    ids=["without the package", "another version of it", "a distributed that is too old"],
)
def test_a_scheduler_that_cannot_run_it_is_told_and_left_alone(
    versions: dict[str, str | None], message: str, thread_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = install_module._version_there

    async def pretend(client: Client, distribution: str) -> str | None:
        return versions[distribution] if distribution in versions else await there(client, distribution)

    monkeypatch.setattr(install_module, "_version_there", pretend)
    with pytest.raises(ClusterError, match=message):
        install(thread_client)
    assert type(thread_client.cluster.scheduler.extensions["stealing"]) is DEFAULT_EXTENSIONS["stealing"]


def test_configuration_alone_never_breaks_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(install_module, "_version_there", nothing)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with dask.config.set({"distributed.client.preload": [PRELOAD]}), cluster() as client:
            assert client.submit(add, 1, 2).result() == 3
    # Dask warns of its own where the machine is slow.
    messages = [str(warning.message) for warning in told]
    ours = [message for message in messages if "scratch directories" not in message]
    assert ["not installed: the scheduler at" in message for message in ours] == [True]


def test_where_upstream_lacks_a_name_dask_goes_on(
    thread_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_distributed.REQUIRED, WorkerState, ("renamed_upstream",))
    with pytest.raises(ClusterError, match=r"lacks WorkerState\.renamed_upstream; Dask keeps scheduling"):
        install(thread_client)
    assert thread_client.submit(add, 1, 2).result() == 3


#: A worker on a machine on which neither the package nor NumPy is installed.
WORKER_WITHOUT_US = """
import asyncio, sys
from distributed import Worker
sys.modules["ferroflow_dask"] = sys.modules["numpy"] = None  # importing them raises

async def work():
    async with Worker(sys.argv[1], nthreads=1, dashboard=False) as worker:
        await worker.finished()

asyncio.run(work())
"""


def test_workers_need_nothing_of_ours_for_plain_dask() -> None:
    async def test() -> None:
        async with (
            Scheduler(dashboard=False, dashboard_address=":0", port=0) as scheduler,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            await install(client)
            script = ["-c", WORKER_WITHOUT_US, scheduler.address]
            process = await asyncio.create_subprocess_exec(sys.executable, *script)
            try:
                await client.wait_for_workers(1, timeout=30)
                ours: list[str] = []
                while len(ours) < 6:
                    (plugins,) = (await client.run(lambda dask_worker: list(dask_worker.plugins))).values()
                    ours = sorted(name for name in plugins if name.startswith("ferroflow"))
                assert [name.rstrip("-0123456789") for name in ours] == [
                    "ferroflow-batching",
                    "ferroflow-bundles",
                    "ferroflow-capable",
                    "ferroflow-inlined_results",
                    "ferroflow-prefetch",
                    "ferroflow-working_sets",
                ]
                intervals = await client.run(lambda dask_worker: repr(dask_worker.batched_stream.interval))
                assert "Interval" in str(intervals)
                stealing = scheduler.extensions["stealing"]
                future = client.submit(abs, 0)
                for _ in range(50):  # a chain, of which tasks are prefetched
                    future = client.submit(add, future, 1)
                assert await future == 50
                assert feature(stealing, "prefetch").counts()["confirmed"] > 0
                parts = [client.submit(add, i, future) for i in range(2)]
                assert await client.submit(add, *parts) == 101
                assert feature(stealing, "inlined_results").counts()["received"] > 0
            finally:
                if process.returncode is None:
                    process.terminate()
                await process.wait()

    asyncio.run(asyncio.wait_for(test(), 60))
