"""What goes wrong around the plugin: workers that die or hang, restrictions that come late, large results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask
import pytest
from cluster_tests import runs_on
from distributed.diagnostics.plugin import SchedulerPlugin
from one_loop import Cluster, on_cluster

from ferroflow_dask.policy import ClusterView, Policy
from ferroflow_dask.policy.events import Event, GraphArrived
from ferroflow_dask.policy.instructions import AssignTask, Instruction, SetPriority
from ferroflow_dask.scheduler import steal_exchange
from ferroflow_dask.scheduler.steal_exchange import exchange
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

KNOWN = {"ferroflow_cost": 0.2}


def test_of_the_tasks_of_a_dead_worker_those_that_waited_are_not_blamed() -> None:
    cluster = VirtualCluster(4, 2, policy="ferroflow")
    cluster.submit({("t", i): VirtualTask(0.2) for i in range(100)}, annotations=KNOWN)
    cluster.at(1.05, cluster.leave, 0)
    cluster.run()
    cluster.check()
    blamed = [ts.suspicious for ts in cluster.scheduler.tasks.values() if ts.suspicious]
    # What ran, and one more that may have: so many are sent to it from Dask's queue.
    assert blamed == [1, 1, 1]
    assert cluster.scheduler.task_prefixes["t"].suspicious == 3


class RestrictLate(SchedulerPlugin):
    """Somebody else's plugin, that learns of graphs after ours."""

    name = "restrict"

    def __init__(self, **restrictions: Any) -> None:
        self._restrictions = restrictions

    def update_graph(self, scheduler: Any, *, tasks: list[Any], **kwargs: Any) -> None:
        for key in tasks:
            for name, value in self._restrictions.items():
                setattr(scheduler.tasks[key], name, value)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["worker", "resource"])
@runs_on(on_cluster, resources=({"A": 1}, {}))
async def test_restrictions_that_come_after_a_task_was_planned_hold(cluster: Cluster, kind: str) -> None:
    first = cluster.workers[0]
    given = {
        "worker": {"worker_restrictions": {first.address}},
        "resource": {"resource_restrictions": {"A": 1}},
    }
    cluster.scheduler.add_plugin(RestrictLate(**given[kind]))
    with dask.annotate(ferroflow_cost=0.05):
        futures = cluster.map(8, 0.01)
    await cluster.client.gather(futures)
    assert {future.key for future in futures} <= set(first.data)


def test_restrictions_that_come_while_a_task_waits_hold_for_steals() -> None:
    cluster = VirtualCluster(2, policy="ferroflow", validate=True)
    first = cluster.workers[0].state.address
    preferred = {"workers": [first], "allow_other_workers": True}
    keys = [f"t-{i}" for i in range(10)]
    cluster.submit({key: VirtualTask(1.0, annotations=preferred) for key in keys})

    def bind_them() -> None:
        for key in keys:
            cluster.scheduler.tasks[key].loose_restrictions = False
        cluster.scheduler.set_restrictions({key: {first} for key in keys})

    cluster.at(0.001, bind_them)
    cluster.run()
    assert {run.worker for run in cluster.record.executions} == {0}


@pytest.mark.cluster
def test_a_worker_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steal_exchange, "_PATIENCE_S", 0.05)

    async def test(cluster: Cluster) -> None:
        victim, thief = cluster.workers
        futures = cluster.pinned(4, 0.2)
        states = [await cluster.processing(future) for future in futures]
        asked: list[dict[str, Any]] = []
        answer = victim.stream_handlers["steal-request"]
        victim.stream_handlers["steal-request"] = lambda **request: asked.append(request)
        there = [ts for ts in states if ts.processing_on and ts.processing_on.address == victim.address]
        if not cluster.stealing.in_flight:
            cluster.ask(there[-1], victim, thief)
        assert cluster.stealing.in_flight
        await exchange(cluster.scheduler, None)
        assert "stealing" not in cluster.scheduler.extensions
        for request in asked:  # it goes on
            answer(**request)
        assert sorted(await cluster.client.gather(futures)) == [0, 1, 2, 3]

    on_cluster(test)


class PlaceThenOrder(Policy):
    """A policy that orders tasks after it has placed them."""

    places_queued = True

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        if isinstance(event, GraphArrived):
            for task in event.tasks:
                yield AssignTask(task.key, view.running[0].key, "first")
            for place, task in enumerate(reversed(event.tasks)):
                yield SetPriority(task.key, place)


def test_tasks_may_be_ordered_after_they_were_placed() -> None:
    cluster = VirtualCluster(2, policy=PlaceThenOrder())
    keys = [("t", i) for i in range(6)]
    cluster.submit({key: VirtualTask(1.0) for key in keys}, annotations=KNOWN)
    cluster.run()
    cluster.check()
    assert cluster.stealing.error is None
    assert cluster.stealing.view.assigned == {}
    for number in range(2):
        ran = [run.key for run in cluster.record.executions if run.worker == number]
        assert ran[1:] == sorted(ran[1:], reverse=True)  # the first starts as it comes
        assert len(ran) == 3


def test_results_that_are_used_by_few_of_many_tasks_do_not_pile_up() -> None:
    """Eight times 64 results of 100 MB into one small: more at a time than there are threads."""

    def peak_nbytes(policy: str) -> int:
        cluster = VirtualCluster(4, 2, policy=policy)
        graph: dict[Any, VirtualTask] = {}
        for j in range(8):
            loads = tuple(f"load-{64 * j + i}" for i in range(64))
            graph |= {key: VirtualTask(0.1, nbytes=10**8) for key in loads}
            graph[f"reduce-{j}"] = VirtualTask(0.1, dependencies=loads, nbytes=100)
        cluster.submit(
            graph, annotations={"ferroflow_cost": 0.1}, order={key: i for i, key in enumerate(graph)}
        )
        most = [0]

        def look() -> None:
            most.append(sum(ws.nbytes for ws in cluster.scheduler.workers.values()))

        for i in range(500):
            cluster.at(0.02 * i, look)
        cluster.run()
        return max(most)

    assert peak_nbytes("ferroflow") <= 1.05 * peak_nbytes("dask")


class TooMany(set[Any]):
    """What nobody should go through for each of them."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError


def test_one_of_many_readers_is_described_without_a_look_at_the_others() -> None:
    cluster = VirtualCluster(2, policy="ferroflow")
    cluster.submit({"source": VirtualTask(0.1, nbytes=10**6)})
    cluster.run()
    cluster.submit({("t", i): VirtualTask(0.1, dependencies=("source",)) for i in range(100)})
    tasks = cluster.scheduler.tasks
    tasks["source"].dependents = TooMany(tasks["source"].dependents)
    task = cluster.stealing.parts.task_views(tasks["t", 0])
    assert (task.n_inputs, task.input_bytes, len(task.held)) == (1, 10**6, 1)
