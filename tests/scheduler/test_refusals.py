"""Tasks that raise `Reschedule`: they end, and run on each worker at most once before they return to one."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import dask
import pytest
from cluster_tests import runs_on
from distributed import Event, Reschedule
from distributed.utils import thread_state  # type: ignore[attr-defined]
from one_loop import Cluster, on_cluster
from waiting import comes, pause, wait_for

pytestmark = pytest.mark.cluster

#: Runs of each task, by worker; the workers of a test share this process.
_runs: dict[int, list[str]] = {}


def refuse(i: int, refused: tuple[str, ...], times: int = 10_000) -> int:
    """Return the argument, but not on some workers the first times."""
    # `get_worker` would keep the task out of bundles.
    address: str = thread_state.execution_state["worker"].address
    runs = _runs.setdefault(i, [])
    runs.append(address)
    if address in refused and len(runs) <= times:
        raise Reschedule
    return pause(i, 0.002)


def addresses(cluster: Cluster, n: int) -> tuple[str, ...]:
    return tuple(worker.address for worker in cluster.workers[:n])


@pytest.mark.parametrize("n_refused", [1, 3], ids=["one of four workers", "three of four workers"])
@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "delayed"])
def test_tasks_that_refuse_workers_end(n_refused: int, is_mapped: bool) -> None:
    async def test(cluster: Cluster) -> None:
        _runs.clear()
        refused = addresses(cluster, n_refused)
        if is_mapped:
            futures = cluster.client.map(refuse, range(100), refused=refused, pure=False)
        else:
            futures = cluster.client.compute([dask.delayed(refuse)(i, refused) for i in range(100)])
        assert await cluster.client.gather(futures) == list(range(100))
        # Once in a bundle, once on each worker.
        assert max(map(len, _runs.values())) <= n_refused + 2
        assert cluster.stealing.core.refused == {}

    on_cluster(test, resources=(None,) * 4)


@runs_on(on_cluster, resources=(None,) * 4)
async def test_a_task_that_all_workers_refuse_tries_each_before_it_returns_to_one(cluster: Cluster) -> None:
    _runs.clear()
    future = cluster.client.submit(refuse, 0, addresses(cluster, 4), times=8, pure=False)
    assert await future == 0
    runs = _runs[0]
    assert len(runs) == 9
    assert set(Counter(runs[:4]).values()) == set(Counter(runs[4:7]).values()) == {1}
    assert all(one != following for one, following in itertools.pairwise(runs))


@runs_on(on_cluster)
async def test_a_task_returns_to_the_only_worker_that_its_restrictions_allow(cluster: Cluster) -> None:
    _runs.clear()
    only = cluster.workers[0].address
    future = cluster.client.submit(refuse, 0, (only,), times=2, workers=[only], pure=False)
    assert await future == 0
    assert _runs[0] == [only] * 3


@runs_on(on_cluster)
async def test_a_task_is_not_stolen_by_the_worker_that_it_refused(cluster: Cluster) -> None:
    _runs.clear()
    first, second = (worker.address for worker in cluster.workers)
    gate = await Event()
    blocked = cluster.client.submit(wait_for, 0, gate, workers=[second], pure=False)
    await cluster.processing(blocked)
    future = cluster.client.submit(refuse, 0, (first,), pure=False)
    await comes(lambda: future.key in cluster.stealing.core.refused)
    await comes(lambda: cluster.scheduler.tasks[future.key].state == "processing")
    task, worker = cluster.stealing.view.assigned[future.key]
    assert worker.key == second
    assert list(task.allowed) == [second]
    cluster.stealing.balance()
    assert cluster.stealing.steals["asked"] == 0
    await gate.set()
    assert await cluster.client.gather([blocked, future]) == [0, 0]
    assert _runs[0] == [first, second]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"stimulus_id": "worker-closing-1"}, id="from a worker that closes"),
        pytest.param({"stimulus_id": "ferroflow-confirm"}, id="from a worker that lacks a prefetched task"),
        pytest.param({"stimulus_id": "reschedule-1", "worker": "elsewhere"}, id="from another worker"),
        pytest.param({"stimulus_id": "reschedule-1", "key": "unknown"}, id="of an unknown task"),
    ],
)
def test_other_messages_are_no_refusals(message: dict[str, Any]) -> None:
    async def test(cluster: Cluster) -> None:
        gate = await Event()
        future = cluster.client.submit(wait_for, 0, gate, pure=False)
        ts = await cluster.processing(future)
        usual = {"key": ts.key, "worker": ts.processing_on.address}
        cluster.scheduler.stream_handlers["reschedule"](**{**usual, **message})
        assert cluster.stealing.core.refused == {}
        await gate.set()
        assert await future == 0

    on_cluster(test)
