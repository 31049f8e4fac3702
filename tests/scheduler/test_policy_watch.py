"""Policies that take long: the scheduler logs them, and Dask schedules if they go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import dask
import pytest
from distributed import Client
from distributed.scheduler import DEFAULT_EXTENSIONS
from one_loop import Cluster, on_cluster
from waiting import soon

import ferroflow_dask
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.policy.events import WorkerIdle
from ferroflow_dask.policy.stealing import StealingPolicy
from ferroflow_dask.scheduler import installed
from ferroflow_dask.scheduler.core import Core, PolicyCalls
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.scheduler.features import policy_watch
from ferroflow_dask.scheduler.features.policy_watch import PolicyWatch

EVENT: Any = object.__new__(WorkerIdle)


class Slow:
    """Stands for a policy."""


def watch_of(*calls: int) -> PolicyWatch:
    """Return the watch over a policy that was slow in calls of these numbers."""
    calls_of_policy = PolicyCalls()
    watch = PolicyWatch(cast(Core, SimpleNamespace(policy=Slow(), policy_calls=calls_of_policy)))
    for calls_of_policy.n in calls:
        watch.policy_took(EVENT, 1.5)
    return watch


def test_a_slow_answer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # clusters of other tests silence handlers
    watch_of(1, 2)
    (record,) = caplog.records
    assert "the policy Slow took 1.5 s to answer WorkerIdle; the limit is 1 s" in record.message


def test_three_slow_answers_end_the_plugin_unless_many_are_between() -> None:
    with pytest.raises(ClusterError, match=r"took 1\.5 s to answer WorkerIdle, and at least 1 s in 3 calls"):
        watch_of(1, 100, 200)
    watch_of(1, 102, 203, 304, 305)  # large graphs, the garbage collector


def test_a_policy_that_is_slow_again_and_again_is_replaced_by_dask(
    thread_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, least_s = thread_client, 0.0

    def handle(self: Any, event: Any, view: Any, now: float) -> Iterator[Any]:
        start_s = time.thread_time()
        while time.thread_time() - start_s < least_s:
            pass
        yield from ()

    monkeypatch.setattr(StealingPolicy, "handle", handle)
    with dask.config.set({"ferroflow.policy-limit": "10ms"}):
        ferroflow_dask.install(client, without=["bundles"])
    least_s = 0.02
    with pytest.warns(UserWarning, match=r"ClusterError.*StealingPolicy took 0.*Dask's own scheduling"):
        assert answers(client)
    assert installed(client) is None
    assert client.submit(sum, [1, 2]).result() == 3


def answers(client: Client) -> bool:
    root = client.submit(int)
    futures = client.map(max, [root] * 30, range(30))
    assert client.gather(futures) == [*range(30)]
    return soon(lambda: installed(client) is None, 30.0)


def test_a_policy_that_does_not_return_is_logged_with_its_stack(
    thread_client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = thread_client
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(policy_watch, "_LOOK_S", 0.05)
    original = StealingPolicy.handle
    slow: Iterator[bool] = iter(())

    def handle(self: Any, event: Any, view: Any, now: float) -> Iterator[Any]:
        nonlocal slow
        if next(slow, False):
            time.sleep(2.0)  # no processor time: it waits for something
        yield from original(self, event, view, now)

    monkeypatch.setattr(StealingPolicy, "handle", handle)
    ferroflow_dask.install(client, without=["bundles"])
    slow = iter([True])
    root = client.submit(int)
    assert client.gather(client.map(max, [root] * 9, range(9))) == [*range(9)]
    (told,) = [record.message for record in caplog.records if "has not answered" in record.message]
    assert "time.sleep(2.0)" in told
    assert installed(client) is not None


# The end of the thread


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "ferroflow-policy-watch"}


async def nothing(cluster: Cluster) -> None:
    """Leave the plugin installed."""


async def uninstall(cluster: Cluster) -> None:
    await ferroflow_dask.uninstall(cluster.client)


async def not_registered(cluster: Cluster) -> None:
    """Start an extension that is only a plugin of the scheduler, as distributed's tests of stealing do."""
    extension = FerroflowStealing(cluster.scheduler)
    await extension.start()
    assert extension not in cluster.scheduler.extensions.values()


@pytest.mark.parametrize(
    ("use", "plugin"),
    [
        pytest.param(nothing, True, id="of a plugin that stays installed"),
        pytest.param(uninstall, True, id="of a plugin that is uninstalled"),
        pytest.param(not_registered, False, id="of an extension that the scheduler does not know"),
        pytest.param(nothing, None, id="of an extension that starts with the scheduler"),
    ],
)
def test_the_thread_ends_with_its_scheduler(
    use: Any, plugin: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, started = threads(), set()

    async def run(cluster: Cluster) -> None:
        started.update(threads() - before)
        await use(cluster)
        started.update(threads() - before)

    if plugin is None:
        monkeypatch.setitem(DEFAULT_EXTENSIONS, "stealing", FerroflowStealing)
    stealing = {"distributed.scheduler.work-stealing": plugin is not False}
    on_cluster(run, config=stealing, plugin=bool(plugin))
    assert started
    for thread in started:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in started)
