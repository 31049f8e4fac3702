"""Paused workers: if all of them stay paused while tasks wait, one is restarted."""

from __future__ import annotations

import time

import pytest
from conftest import checked_client
from distributed import Client
from in_charge import feature, scheduler_of, stealing_of
from memory_tasks import double, nap, pause, resume
from virtual_runs import L
from waiting import until

from ferroflow_dask import install, uninstall
from ferroflow_dask.scheduler.features import paused_workers
from ferroflow_dask.virtual import VirtualCluster, VirtualTask


def pause_all(client: Client) -> None:
    client.run(pause)
    until(lambda: not scheduler_of(client).running)


def n_restarted(client: Client) -> int:
    return int(feature(stealing_of(client), "paused_workers").counts()["restarted"])


def wait_for_the_refusal() -> None:
    with pytest.warns(UserWarning, match="none can be restarted without a loss of data") as caught:
        until(lambda: len(caught))  # the client hears of it after the scheduler


@pytest.fixture
def _is_hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paused_workers, "_PATIENCE_S", 5.0)  # a restart takes 2 s


@pytest.mark.usefixtures("_is_hasty")
def test_the_worker_with_the_least_data_is_restarted_and_the_tasks_end() -> None:
    with checked_client(2, processes=True, set_as_default=False) as client:
        install(client)
        rich, poor = scheduler_of(client).workers
        lost = client.submit(double, 1, workers=[poor])
        kept = client.submit(bytes, 10**6, workers=[rich])
        kept.result()
        lost.result()
        scheduler_of(client).tasks[lost.key].worker_restrictions = None  # it may run elsewhere from now on
        pause_all(client)
        futures = client.map(double, range(20))
        with pytest.warns(UserWarning, match="all workers have been paused for 5 s.* is restarted"):
            assert client.gather(futures) == [double(i) for i in range(20)]
        assert n_restarted(client) == 1
        assert rich in scheduler_of(client).workers
        assert poor not in scheduler_of(client).workers
        assert lost.result() == 2
        assert not any(ts.suspicious for ts in scheduler_of(client).tasks.values())


@pytest.mark.usefixtures("_is_hasty")
def test_scattered_data_and_actors_are_not_lost() -> None:
    with checked_client(1, processes=True, set_as_default=False) as client:
        install(client)
        data = client.scatter([1, 2])
        pause_all(client)
        futures = client.map(double, data)
        wait_for_the_refusal()
        assert n_restarted(client) == 0
        client.run(resume)
        assert client.gather(futures) == [2, 4]


@pytest.mark.usefixtures("_is_hasty")
@pytest.mark.parametrize("kind", ["computed from released data", "bound to the worker"])
def test_results_that_cannot_be_computed_again_are_not_lost(kind: str) -> None:
    with checked_client(1, processes=True, set_as_default=False) as client:
        install(client)
        (address,) = scheduler_of(client).workers
        if kind == "bound to the worker":
            result = client.submit(double, 2, workers=[address])
        else:
            result = client.submit(double, client.scatter(2))
        assert result.result() == 4
        is_bound = kind == "bound to the worker"
        until(lambda: is_bound or scheduler_of(client).tasks[result.key].has_lost_dependencies)
        pause_all(client)
        future = client.submit(double, 4)
        wait_for_the_refusal()
        client.run(resume)
        assert future.result() == 8
        assert result.result() == 4


@pytest.mark.usefixtures("_is_hasty")
def test_no_task_is_blamed_for_a_restart() -> None:
    with checked_client(1, processes=True, set_as_default=False) as client:
        install(client)
        running = client.submit(nap, 2.0)
        # Each is a task group of its own, so that the worker gets all of them.
        futures = [client.submit(double, i, key=f"double{i}-{i}") for i in range(6)]
        (ws,) = scheduler_of(client).workers.values()
        until(lambda: len(ws.processing) == 7)
        pause_all(client)
        assert running.result() == 2.0
        assert client.gather(futures) == [2 * i for i in range(6)]
        assert n_restarted(client) == 1
        assert {ts.suspicious for ts in scheduler_of(client).tasks.values()} == {0}


@pytest.mark.usefixtures("_is_hasty")
def test_a_worker_whose_task_runs_is_left_alone() -> None:
    with checked_client(1, processes=True, set_as_default=False) as client:
        install(client)
        running = client.submit(nap, 12.0)
        until(lambda: next(iter(scheduler_of(client).workers.values())).executing)
        pause_all(client)
        waiting = client.submit(double, 4)
        assert running.result() == 12.0
        assert n_restarted(client) == 0
        assert waiting.result() == 8  # after a restart
        assert n_restarted(client) == 1


@pytest.mark.usefixtures("_is_hasty")
def test_nothing_is_restarted_after_the_plugin_has_left() -> None:
    with checked_client(1, processes=True, set_as_default=False) as client:
        install(client)
        own = feature(stealing_of(client), "paused_workers")
        pause_all(client)
        future = client.submit(double, 4)
        uninstall(client)
        time.sleep(7.0)
        assert own.counts()["restarted"] == 0
        assert not own._is_armed
        client.run(resume)
        assert future.result() == 8


def looks(cluster: VirtualCluster) -> list[float]:
    """Note restarts, which need a nanny."""
    found: list[float] = []
    own = feature(cluster.stealing, "paused_workers")
    own._restart = lambda: found.append(cluster.time.now)
    return found


@pytest.mark.parametrize(
    ("at_s", "restarts"),
    [
        pytest.param({}, [31.0, 61.0], id="paused for a minute"),
        pytest.param({20.0: "resume"}, [], id="one resumes"),
        pytest.param({20.0: "resume", 22.0: "pause"}, [52.0], id="one goes on for a while"),
    ],
)
def test_nothing_is_restarted_before_all_have_been_paused_for_long(
    at_s: dict[float, str], restarts: list[float]
) -> None:
    cluster = VirtualCluster(2, latency_s=L)
    found = looks(cluster)
    cluster.submit({f"a{i}": VirtualTask(0.1) for i in range(8)})
    for worker in (0, 1):
        cluster.at(1.0, cluster.pause, worker)
    for when, what in at_s.items():
        cluster.at(when, getattr(cluster, what), 0)
    cluster.at(1.5, cluster.submit, {f"b{i}": VirtualTask(0.1) for i in range(8)}, "other")
    cluster.at(25.0, cluster.submit, {f"c{i}": VirtualTask(0.1) for i in range(8)}, "a third")
    cluster.run(until=70.0)
    assert found == pytest.approx(restarts, abs=0.5)
