"""What Dask's scheduler offers beside running graphs goes on working with the plugin."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from operator import add, neg
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, Event, Status, Worker, fire_and_forget, rejoin, secede, wait, worker_client
from in_charge import cluster_of, in_charge, pinned, scheduler_of, stealing_of, workers_of
from waiting import pause, until

pytestmark = pytest.mark.cluster

#: What tasks have noted, in this order: the workers are in this process.
NOTES: list[Any] = []


@pytest.fixture(autouse=True)
def _no_notes() -> None:
    NOTES.clear()


def note(i: Any) -> Any:
    NOTES.append(i)
    return i


def hold(name: str) -> str:
    """Occupy a thread until the event of this name is set."""
    Event(name).wait()
    return name


def holders(client: Client, futures: list[Any]) -> set[str]:
    return {address for addresses in client.who_has(futures).values() for address in addresses}


@pytest.fixture
def client(thread_client: Client) -> Iterator[Client]:
    """A client of three workers in this process, with the policy in charge."""
    with in_charge(thread_client):
        yield thread_client


# Workers and their data


def test_workers_that_retire_leave_their_data_and_their_tasks(client: Client) -> None:
    futures = pinned(client, 60)
    wait(futures[:10])
    first = workers_of(client)[0].address
    client.retire_workers([first])
    assert client.gather(futures) == list(range(60))
    assert first not in client.nthreads()
    assert len(stealing_of(client).view.workers) == 2


def test_rebalance_spreads_data() -> None:
    managed = {"distributed.worker.memory.rebalance.measure": "managed"}
    with cluster_of({}, {}, {}, config=managed) as client:
        first = workers_of(client)[0].address
        futures = client.map(np.full, [1000] * 30, range(30), workers=[first])
        wait(futures)
        client.rebalance(futures)
        assert min(len(worker.data) for worker in workers_of(client)) >= 5
        assert [array[0] for array in client.gather(futures)] == list(range(30))


def test_the_active_memory_manager_drops_surplus_replicas() -> None:
    with cluster_of(
        {}, {}, {}, config={"distributed.scheduler.active-memory-manager.start": False}
    ) as client:
        (future,) = client.scatter([np.arange(10)], broadcast=True)
        assert len(holders(client, [future])) == 3
        client.amm.run_once()
        until(lambda: len(holders(client, [future])) == 1)
        assert client.submit(np.sum, future).result() == 45


def test_adaptive_clusters_grow_with_the_work_and_shrink_after(client: Client) -> None:
    # The first task that ends would tell how short the others are, which ends the growth.
    client.cluster.adapt(minimum=1, maximum=4, interval="20ms", wait_count=2)
    futures = client.map(hold, ["grown"] * 40, pure=False)
    client.wait_for_workers(4, timeout=60)
    Event("grown").set()
    assert client.gather(futures) == ["grown"] * 40
    until(lambda: len(scheduler_of(client).workers) == 1)
    assert client.gather(futures) == ["grown"] * 40


def test_after_a_restart_all_works_as_before(process_client: Client) -> None:
    # Worker processes cannot import this module: they get functions of the standard library.
    with process_client.as_current(), in_charge(process_client):
        before = process_client.map(time.sleep, [0.05] * 20, pure=False)
        wait(before[:1])
        process_client.restart()
        assert process_client.gather(process_client.map(neg, range(20))) == [-i for i in range(20)]
        assert all(future.cancelled() for future in before)


def set_status(client: Client, worker: Any, status: Status) -> None:
    def change(dask_worker: Worker) -> None:
        dask_worker.status = status

    client.run(change, workers=[worker.address])
    until(lambda: scheduler_of(client).workers[worker.address].status == status)


def test_paused_workers_get_nothing_until_they_resume() -> None:
    with cluster_of({}, {}, {}) as client:
        *others, paused = workers_of(client)
        set_status(client, paused, Status.paused)
        assert client.gather(pinned(client, 30)) == list(range(30))
        assert client.gather(client.map(pause, range(30), pure=False)) == list(range(30))
        assert not paused.state.tasks
        set_status(client, paused, Status.running)
        futures = pinned(client, 60)
        assert client.gather(futures) == list(range(60))
        assert holders(client, futures) == {worker.address for worker in [*others, paused]}


def test_others_run_what_a_paused_worker_has_not_started() -> None:
    with cluster_of({}, {}, {}) as client:
        first, *others = workers_of(client)
        blocking = client.submit(hold, "first", workers=[first.address])
        busy = [client.submit(hold, "others", workers=[one.address], pure=False) for one in others]
        until(lambda: all(worker.state.executing for worker in (first, *others)))
        futures = client.map(neg, range(5), workers=[first.address], allow_other_workers=True)
        until(lambda: len(first.state.tasks) == 6)
        set_status(client, first, Status.paused)
        Event("first").set()
        wait(blocking)
        Event("others").set()
        wait(busy)
        assert client.gather(futures) == [0, -1, -2, -3, -4]
        assert not any(future.key in first.data for future in futures)


def test_spilling_workers_give_right_results(tmp_path: Path) -> None:
    limits = {f"distributed.worker.memory.{name}": False for name in ("spill", "pause", "terminate")}
    options = {"memory_limit": "8 MB", "local_directory": str(tmp_path)}
    with cluster_of(options, options, config={**limits, "distributed.worker.memory.target": 0.5}) as client:
        arrays = client.map(np.full, [100_000] * 30, np.arange(30.0))
        wait(arrays)
        assert any(worker.data.disk for worker in workers_of(client))
        sums = client.map(np.sum, [client.submit(add, *pair) for pair in itertools.pairwise(arrays)])
        assert client.gather(sums) == [100_000.0 * (2 * i + 1) for i in range(29)]


# What tasks do


def by_worker_client(n: int) -> int:
    with worker_client() as client:
        return sum(client.gather(client.map(pause, range(n), pure=False)))


def by_seceding(n: int) -> int:
    secede()
    with worker_client(separate_thread=False) as client:
        total = sum(client.gather(client.map(pause, range(n), pure=False)))
    rejoin()
    return total


@pytest.mark.parametrize("function", [by_worker_client, by_seceding])
def test_tasks_that_wait_for_tasks_free_their_threads(function: Callable[[int], int], client: Client) -> None:
    # More of them than threads: without seceding they would wait for each other for ever.
    assert client.gather(client.map(function, [6] * 8, pure=False)) == [15] * 8


def test_a_seceded_task_leaves_its_worker_to_others() -> None:
    def leaves() -> str:
        secede()
        return hold("gate")

    with cluster_of({}) as client:
        gate, away = Event("gate"), client.submit(leaves)
        assert client.gather(client.map(pause, range(10), pure=False)) == list(range(10))
        until(lambda: stealing_of(client).view.workers[workers_of(client)[0].address].n_tasks == 0)
        gate.set()
        assert away.result() == "gate"


class Tally:
    """An actor that adds up."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, n: int) -> int:
        self.total += n
        return self.total


def test_actors_keep_their_state_and_their_place(client: Client) -> None:
    first = workers_of(client)[0].address
    futures = client.map(lambda _: Tally(), range(3), actor=True, workers=[first], allow_other_workers=True)
    actors = client.gather(futures)
    places = client.who_has(futures)
    work = pinned(client, 40)
    for i in range(10):
        assert [actor.add(i).result() for actor in actors] == [sum(range(i + 1))] * 3
    assert client.gather(work) == list(range(40))
    assert client.who_has(futures) == places


def test_a_forgotten_task_runs_to_its_end(client: Client) -> None:
    def ends() -> None:
        # Not before it is forgotten: of a task that has ended Dask does not forget.
        Event("forgotten").wait()
        Event("ended").set()

    future = client.submit(ends)
    key = future.key
    fire_and_forget(future)
    del future
    tasks = scheduler_of(client).tasks
    until(
        lambda: key in tasks and [cs.client_key for cs in tasks[key].who_wants or ()] == ["fire-and-forget"]
    )
    Event("forgotten").set()
    assert Event("ended").wait(timeout=30)
    until(lambda: key not in tasks)


def fails_twice(i: int) -> int:
    if NOTES.count(note(i)) < 3:
        raise ConnectionError(f"{i} is not there yet")
    return i


@pytest.mark.parametrize(("retries", "fails"), [(3, False), (1, True)], ids=["enough", "too few"])
def test_retries(retries: int, fails: bool, client: Client) -> None:
    futures = client.map(fails_twice, range(6), retries=retries)
    wait(futures)
    assert [future.status for future in futures] == ["error" if fails else "finished"] * 6
    assert sorted(NOTES) == sorted([*range(6)] * (retries + 1 if fails else 3))
    assert client.submit(note, 6).result() == 6


# What users ask for


HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        pytest.param({"workers": [1]}, {1}, id="one worker by its name"),
        pytest.param({"workers": [0, 2]}, {0, 2}, id="two workers by their names"),
        pytest.param({"workers": [HOSTS[1]]}, {1}, id="one host"),
        pytest.param({"workers": list(HOSTS[1:])}, {1, 2}, id="two hosts"),
        pytest.param({"resources": {"GPU": 1}}, {0, 1}, id="a resource"),
        pytest.param({"resources": {"GPU": 2}}, {1}, id="more of a resource than one worker has"),
        pytest.param({"workers": [0, 2], "resources": {"GPU": 1}}, {0}, id="workers and a resource"),
        pytest.param({"workers": [2], "allow_other_workers": True}, {0, 1, 2}, id="a preferred worker"),
    ],
)
def test_restrictions_hold_and_accounts_return_to_zero(options: dict[str, Any], allowed: set[int]) -> None:
    gpus: list[dict[str, float]] = [{"GPU": 1}, {"GPU": 2}, {}]
    workers = [{"host": host, "resources": gpu} for host, gpu in zip(HOSTS, gpus, strict=True)]
    with cluster_of(*workers) as client:
        names = {worker.address: name for name, worker in client.cluster.workers.items()}
        futures = client.map(pause, range(40), pure=False, **options)
        assert client.gather(futures) == list(range(40))
        assert {names[address] for address in holders(client, futures)} == allowed


@pytest.mark.parametrize(
    ("saturation", "annotations"),
    [
        pytest.param("inf", {}, id="all tasks sent at once"),
        pytest.param(1.0, {}, id="tasks wait on the scheduler"),
        pytest.param(1.0, {"ferroflow_cost": 0.01}, id="the policy places tasks"),
    ],
)
def test_tasks_run_in_the_order_of_their_priorities(
    saturation: float | str, annotations: dict[str, float]
) -> None:
    with cluster_of({}, config={"distributed.scheduler.worker-saturation": saturation}) as client:
        scheduler, (worker,) = scheduler_of(client), workers_of(client)
        gate, held = Event("gate"), client.submit(hold, "gate")
        until(lambda: worker.state.executing)

        def waits(key: str) -> bool:
            return key in worker.state.tasks or any(ts.key == key for ts in scheduler.queued)

        with dask.annotate(**annotations):
            futures = [
                future
                for priority in (-1, 5, 0)
                for future in client.map(note, [(priority, i) for i in range(4)], priority=priority)
            ]
        until(lambda: all(waits(future.key) for future in futures))
        gate.set()
        wait([held, *futures])
    assert [priority for priority, _ in NOTES] == [5] * 4 + [0] * 4 + [-1] * 4


def test_several_clients_at_once(client: Client) -> None:
    with (
        Client(client.cluster, set_as_default=False) as second,
        Client(client.cluster, set_as_default=False) as third,
    ):
        clients = [client, second, third]
        futures = [
            user.map(pause, range(start, start + 40), pure=False)
            for start, user in zip((0, 100, 200), clients, strict=True)
        ]
        left = third.map(pause, range(50), pure=False)
        shared = [user.submit(add, 1, 2, key="shared") for user in clients]
        assert [future.result() for future in shared] == [3] * 3
        for start, user, mine in zip((0, 100, 200), clients, futures, strict=True):
            assert user.gather(mine) == list(range(start, start + 40))
    assert client.gather(futures[0]) == list(range(40))
    keys = {future.key for future in [*futures[1], *futures[2], *left]}
    until(lambda: not keys & {*scheduler_of(client).tasks})
