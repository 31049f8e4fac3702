"""Working sets: tasks that end a worker together run one at a time, then as many as fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from conftest import checked_client
from distributed import Client
from in_charge import feature, stealing_of
from memory_tasks import double, recurse, take, wait_for_next
from virtual_runs import L
from waiting import until

from ferroflow_dask import install
from ferroflow_dask.scheduler.features.working_sets_worker import RESOURCE, TOPIC, WHOLE
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.memory import MemorySpec

LIMIT = 1000


def cluster_of(policy: str = "ferroflow", **options: Any) -> VirtualCluster:
    usual = {"workers": 2, "nthreads": 4, "latency_s": L, "memory": MemorySpec(LIMIT, 1e5)}
    return VirtualCluster(**{**usual, "policy": policy, **options})  # type: ignore[arg-type]


def tasks(n: int, working_nbytes: int, name: str = "big") -> dict[Any, VirtualTask]:
    return {(name, i): VirtualTask(1.0, nbytes=1, working_nbytes=working_nbytes) for i in range(n)}


def states(cluster: VirtualCluster) -> set[str]:
    return {ts.state for ts in cluster.scheduler.tasks.values() if ts.who_wants}


def most_at_once(cluster: VirtualCluster, since_s: float) -> int:
    """Return the most tasks that ran at once on a worker, of those that started after a time."""
    runs = [one for one in cluster.record.executions if one.start >= since_s]
    return max(
        sum(other.worker == one.worker and other.start <= one.start < other.stop for other in runs)
        for one in runs
    )


def limited(cluster: VirtualCluster) -> dict[str, Any]:
    return dict(feature(cluster.stealing, "working_sets")._learned.limited)


@pytest.mark.parametrize(("nbytes", "fit"), [(260, 3), (400, 2), (600, 1)])
def test_tasks_that_stock_gives_up_end(nbytes: int, fit: int) -> None:
    stock = cluster_of("dask")
    stock.submit(tasks(24, nbytes))
    stock.run()
    cluster = cluster_of()
    cluster.submit(tasks(24, nbytes))
    cluster.run()
    cluster.check()
    if nbytes > 300:
        assert "erred" in states(stock)
    assert states(cluster) == {"memory"}
    deaths = cluster.record.memory.deaths
    assert len(deaths) <= 2  # each worker had such tasks at the first
    last_death_s = max(one.stop for one in cluster.record.executions if one.worker in deaths)
    assert limited(cluster)["big"].nbytes == pytest.approx(nbytes, abs=2)
    assert "big" in cluster.stealing.core.learned.separate  # only single tasks are measured
    assert most_at_once(cluster, last_death_s) <= fit
    # The first after the deaths run alone.
    assert cluster.record.makespan_s <= 2 + 2 + 1 + math.ceil(24 / (2 * fit)) + 2


@pytest.mark.parametrize(
    "sizes", ["sssssbbssbsbsbbs", "sssssssssbbssbss", "ssssssbbsssbbssb", "sssssssbbsbsbsbs"]
)
def test_large_tasks_end_though_small_ones_are_measured_first(sizes: str) -> None:
    cluster = cluster_of(workers=1)
    nbytes = {"s": 5, "b": 600}
    cluster.submit(
        {("big", i): VirtualTask(1.0, nbytes=1, working_nbytes=nbytes[size]) for i, size in enumerate(sizes)}
    )
    cluster.run()
    cluster.check()
    assert states(cluster) == {"memory"}
    assert len(cluster.record.memory.deaths) <= 3


@pytest.mark.parametrize("n", [8, 16])
def test_tasks_that_end_a_worker_beside_a_limited_one_are_limited_too(n: int) -> None:
    cluster = cluster_of(workers=1, nthreads=2)
    cluster.submit({**tasks(n, 850, "big"), **tasks(n, 850, "mid"), **tasks(n, 150, "small")})
    cluster.run()
    cluster.check()
    assert states(cluster) == {"memory"}
    assert set(limited(cluster)) == {"big", "mid", "small"}
    assert len(cluster.record.memory.deaths) <= 6  # two for each


def test_what_is_known_holds_for_the_next_graph() -> None:
    cluster = cluster_of()
    cluster.submit(tasks(8, 400))
    cluster.run()
    n_deaths = len(cluster.record.memory.deaths)
    assert n_deaths
    cluster.submit({("big", 100 + i): task for i, task in enumerate(tasks(8, 400).values())})
    cluster.run()
    cluster.check()
    assert len(cluster.record.memory.deaths) == n_deaths


def test_tasks_of_other_prefixes_run_beside_them() -> None:
    cluster = cluster_of(workers=1)
    cluster.submit(tasks(4, 400))
    cluster.run()
    start_s = cluster.time.now
    cluster.submit({**{("big", 10 + i): task for i, task in enumerate(tasks(4, 400).values())}}, "a")
    cluster.submit(tasks(8, 1, "small"), "b")
    cluster.run()
    cluster.check()
    assert most_at_once(cluster, start_s) == 4


def test_a_task_that_fits_nowhere_is_given_up_as_in_stock() -> None:
    cluster = cluster_of(workers=1)
    cluster.submit(tasks(1, 2 * LIMIT))
    cluster.run()
    assert states(cluster) == {"erred"}
    assert len(cluster.record.memory.deaths) == 4
    cluster.submit(tasks(4, 10, "small"))
    cluster.run()
    assert states(cluster) == {"erred", "memory"}


@pytest.mark.parametrize("place", [0, 5, 12])
def test_tasks_that_wait_for_memory_are_not_blamed(place: int) -> None:
    cluster = cluster_of(workers=1)
    graph = tasks(24, 300)
    graph |= {("big", place): VirtualTask(1.0, nbytes=1, working_nbytes=2 * LIMIT)}
    cluster.submit(graph)
    cluster.run()
    cluster.check()
    erred = [ts.key for ts in cluster.scheduler.tasks.values() if ts.state == "erred"]
    assert erred == [("big", place)]


def test_a_worker_that_dies_for_another_reason_limits_nothing() -> None:
    cluster = cluster_of()
    cluster.submit(tasks(24, 10))
    cluster.run(until=0.5)
    cluster.leave(0)
    cluster.run()
    cluster.check()
    assert limited(cluster) == {}


def test_real_workers_whose_tasks_do_not_fit_together() -> None:
    with (
        dask.config.set({"distributed.worker.memory.pause": False}),
        checked_client(1, processes=True, set_as_default=False, nthreads=4, memory_limit="700MB") as client,
    ):
        install(client)
        futures = client.map(take, [200] * 8, pure=False, key="take")
        assert client.gather(futures) == [200] * 8
        sets = feature(stealing_of(client), "working_sets")
        assert sets.counts()["deaths"] == 2
        assert 150e6 < sets._learned.limited["take"].nbytes < 330e6


@pytest.fixture
def client() -> Iterator[Client]:
    with checked_client(1, processes=False, set_as_default=False, nthreads=2, resources={"GPU": 1}) as client:
        install(client)
        until(lambda: feature(stealing_of(client), "working_sets").remote.supporting)
        yield client


def limit(client: Client, prefix: str) -> Any:
    """Give each task of a prefix a whole worker, as after two deaths."""
    learned = feature(stealing_of(client), "working_sets")._learned
    assert not learned.died(prefix)
    assert learned.died(prefix)
    return learned.limited[prefix]


def test_tasks_that_leave_their_thread_give_the_memory_back_and_are_measured(client: Client) -> None:
    found = limit(client, "recurse")
    assert client.submit(recurse, 4, pure=False).result() == 4
    until(lambda: not found.is_whole)
    client.run(lambda dask_worker: dask_worker.state.validate_state())
    (available,) = client.run(lambda dask_worker: dict(dask_worker.state.available_resources)).values()
    assert available == {RESOURCE: WHOLE, "GPU": 1}


def test_a_task_that_leaves_its_thread_may_wait_for_one_that_was_sent_before(client: Client) -> None:
    limit(client, "wait_for_next")
    futures = client.map(wait_for_next, [0, 1], key="wait_for_next")
    assert client.gather(futures) == [True, True]


def test_the_users_own_resources_stay(client: Client) -> None:
    limit(client, "double")
    futures = client.map(double, range(8), key="double", resources={"GPU": 1})
    assert client.gather(futures) == list(range(0, 16, 2))


@pytest.mark.parametrize(
    ("topic", "msg"),
    [
        ("worker-restart-memory", {"hello": 1}),
        ("worker-restart-memory", {"worker": ["x"]}),
        (TOPIC, {"a": 1}),
        (TOPIC, {"prefix": "x", "nbytes": "y"}),
    ],
)
def test_events_of_others_change_nothing(client: Client, topic: str, msg: dict[str, Any]) -> None:
    client.log_event(topic, msg)
    (address,) = client.scheduler_info()["workers"]
    client.log_event(address, {"action": ["x"]})
    until(lambda: client.get_events(topic))
    assert stealing_of(client).error is None
