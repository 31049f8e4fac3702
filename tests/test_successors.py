"""Tasks that are sent ahead of their inputs: when they are, what it saves, and what may come between."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task
from distributed import Client, Event, KilledWorker, LocalCluster, Worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.worker_state_machine import ComputeTaskEvent
from one_loop import Cluster, on_cluster, wait_for
from virtual_runs import L, chain, finished

from ferroflow_dask import explain, install, uninstall
from ferroflow_dask.plugin.successors_worker import CONFIRM, SEND, STARTED, WITHDRAW, WorkerSuccessors
from ferroflow_dask.plugin.worker_plugins import by_value
from ferroflow_dask.virtual import VirtualCluster, VirtualTask


def cluster_of(graph: dict[Any, VirtualTask], workers: int = 1, **options: Any) -> VirtualCluster:
    cluster = VirtualCluster(workers, **{"latency_s": L, "bandwidth": math.inf, **options})
    cluster.submit(graph)
    return cluster


def outcomes(cluster: VirtualCluster) -> dict[str, int]:
    """Return what became of the tasks that were sent ahead, as far as there were any."""
    stealing: Any = cluster.stealing
    return {outcome: n for outcome, n in stealing.successors.outcomes.items() if n}


def test_a_chain_pays_for_its_messages_once() -> None:
    cluster = finished(cluster_of(chain(100, 1 / 64), validate=False))
    assert cluster.record.makespan_s == 100 / 64 + 2 * L
    assert outcomes(cluster) == {"confirmed": 99}


def test_a_sum_of_results_of_one_worker_is_sent_ahead_and_of_two_is_not() -> None:
    graph = {("a", i): VirtualTask(0.5) for i in range(2)} | {"sum": VirtualTask(0.5, (("a", 0), ("a", 1)))}
    assert outcomes(finished(cluster_of(graph, nthreads=2))) == {"confirmed": 1}
    assert outcomes(finished(cluster_of(graph, workers=2))) == {}


def test_one_of_many_dependents_is_sent_ahead_and_the_others_go_to_who_has_time() -> None:
    graph = {"a": VirtualTask(0.5)} | {("b", i): VirtualTask(0.5, ("a",)) for i in range(4)}
    cluster = finished(cluster_of(graph, workers=4))
    assert outcomes(cluster) == {"confirmed": 1}
    assert {worker for key, worker, *_ in cluster.record.timeline() if key != "a"} == {0, 1, 2, 3}


def test_of_a_chain_behind_other_tasks_nothing_is_sent_ahead() -> None:
    graph = {("t", i): VirtualTask(0.5, annotations={"ferroflow_cost": 0.5}) for i in range(8)}
    graph |= {("u", i): VirtualTask(0.5, (("t", i),)) for i in range(8)}
    cluster = cluster_of(graph)
    cluster.run(until=3.0)
    assert outcomes(cluster) == {}


@pytest.mark.parametrize("policy", ["static", "random", "ring"])
def test_other_policies_place_every_task_themselves(policy: str) -> None:
    assert outcomes(finished(cluster_of(chain(5), policy=policy))) == {}


def test_slow_workers_get_nothing_ahead() -> None:
    cluster = VirtualCluster(2, latency_s=L, bandwidth=math.inf, speeds={0: 1 / 8})
    cluster.submit({("t", i): VirtualTask(0.1) for i in range(60)})
    cluster.run()
    before = outcomes(cluster)
    cluster.submit({"a": VirtualTask(0.1, annotations={"workers": [0]}), "b": VirtualTask(0.1, ("a",))})
    finished(cluster)
    assert outcomes(cluster) == before
    assert {key: worker for key, worker, *_ in cluster.record.timeline()}["b"] == 1


@pytest.mark.parametrize("restriction", [{"workers": [0]}, {"resources": {"GPU": 1}}])
def test_restricted_tasks_wait_for_the_scheduler(restriction: dict[str, Any]) -> None:
    graph = {"a": VirtualTask(0.5), "b": VirtualTask(0.5, ("a",), annotations=restriction)}
    cluster = finished(cluster_of(graph, resources={0: {"GPU": 1}}))
    assert outcomes(cluster) == {}


# What may come between. All runs are checked: nothing stays on a worker that the scheduler does not know of.


@pytest.mark.parametrize("at_s", [0.25, 0.5, 0.5 + L / 2, 0.5 + 2 * L, 0.75, 1.0 + L])
def test_a_worker_dies(at_s: float) -> None:
    cluster = cluster_of(chain(6), workers=2)
    (first,) = [ws for ws in cluster.scheduler.workers.values() if ws.processing]
    cluster.at(at_s, cluster.leave, int(str(first.name)))
    finished(cluster)
    assert {ts.state for ts in cluster.scheduler.tasks.values()} <= {"memory", "released"}
    assert max(cluster.record.n_started.values()) <= 2
    blamed = [ts.suspicious for ts in cluster.scheduler.tasks.values() if ts.suspicious]
    assert blamed == [1]


@pytest.mark.parametrize("at_s", [0.25, 0.5, 0.5 + L / 2, 0.5 + 2 * L, 0.75, 1.0 + L])
def test_a_worker_pauses(at_s: float) -> None:
    cluster = cluster_of(chain(6), workers=2)
    (first,) = [ws for ws in cluster.scheduler.workers.values() if ws.processing]
    cluster.at(at_s, cluster.pause, int(str(first.name)))
    cluster.at(20.0, cluster.resume, int(str(first.name)))
    finished(cluster)
    assert cluster.scheduler.tasks["c", 5].state == "memory"
    assert cluster.record.makespan_s < 20.0  # another one goes on
    assert outcomes(cluster)["withdrawn"] > 0


@pytest.mark.parametrize("at_s", [0.25, 0.5, 0.5 + L / 2, 0.5 + 2 * L, 0.75])
def test_a_client_releases_what_was_sent_ahead(at_s: float) -> None:
    cluster = cluster_of(chain(4))
    cluster.at(at_s, cluster.release, [("c", 3)])
    finished(cluster)
    assert not cluster.scheduler.tasks
    assert outcomes(cluster)["withdrawn"] > 0
    assert cluster.record.n_started["c", 3] == 0


def test_a_task_fails() -> None:
    graph = {"a": VirtualTask(0.5, failures=1)} | {
        "b": VirtualTask(0.5, ("a",)),
        "c": VirtualTask(0.5, ("b",)),
    }
    cluster = finished(cluster_of(graph))
    assert {ts.state for ts in cluster.scheduler.tasks.values()} == {"erred"}
    assert outcomes(cluster) == {"withdrawn": 2}
    assert cluster.record.n_started == {"a": 1}


def test_a_task_is_tried_again() -> None:
    again = {"retries": 1}
    graph = {"a": VirtualTask(0.5, annotations=again, failures=1), "b": VirtualTask(0.5, ("a",))}
    cluster = finished(cluster_of(graph, workers=2))
    assert cluster.scheduler.tasks["b"].state == "memory"
    assert cluster.record.n_started == {"a": 2, "b": 1}
    assert outcomes(cluster)["withdrawn"] == 1


def test_a_task_that_was_sent_ahead_fails_as_any_other() -> None:
    graph = {"a": VirtualTask(0.5), "b": VirtualTask(0.5, ("a",), failures=1), "c": VirtualTask(0.5, ("b",))}
    cluster = finished(cluster_of(graph))
    assert {key: ts.state for key, ts in cluster.scheduler.tasks.items()} == {
        "a": "released",
        "b": "erred",
        "c": "erred",
    }
    assert cluster.record.n_started == {"a": 1, "b": 1}


def test_keys_are_asked_for_again_while_their_last_run_is_being_told() -> None:
    graph = {"a": VirtualTask(0.001), "b": VirtualTask(0.02, ("a",))}
    cluster = cluster_of(graph, latency_s=0.005)

    def ask_again() -> None:
        assert cluster.scheduler.tasks["b"].state == "processing"
        assert cluster.workers[0].state.tasks["b"].state == "memory"
        cluster.release(["b"])
        cluster.submit(graph)

    cluster.at(0.028, ask_again)
    finished(cluster)
    assert cluster.scheduler.tasks["b"].state == "memory"


def test_a_copy_of_an_input_stays_while_a_worker_may_be_using_it() -> None:
    cluster = cluster_of({}, workers=2, latency_s=0.005)
    here, there = (worker.state.address for worker in cluster.workers)
    cluster.submit(
        {
            "m": VirtualTask(0.01, annotations={"workers": [1]}),
            "u": VirtualTask(0.01, ("m",), annotations={"workers": [0]}),
        },
        keep=["m", "u"],
    )
    cluster.run()
    copies = cluster.scheduler.tasks["m"].who_has
    assert {ws.address for ws in copies or ()} == {here, there}
    cluster.submit(
        {
            "c": VirtualTask(0.05, ("u",), annotations={"workers": [0]}),
            "b": VirtualTask(0.05, ("m", "c")),
        },
        keep=["b"],
    )

    def drop() -> None:
        assert cluster.workers[0].state.tasks["b"].state == "executing"
        assert cluster.scheduler.tasks["b"].state == "waiting"
        cluster.scheduler.request_remove_replicas(here, ["m"], stimulus_id="drop")

    cluster.at(cluster.time.now + 0.005 + 0.05 + 0.003, drop)
    finished(cluster)
    assert outcomes(cluster) == {"confirmed": 1}
    assert {ws.address for ws in copies or ()} == {here, there}
    cluster.scheduler.request_remove_replicas(here, ["m"], stimulus_id="drop")
    assert {ws.address for ws in copies or ()} == {there}
    finished(cluster)


@pytest.mark.parametrize("n", [1, 8])
def test_what_ends_workers_before_they_have_told_anything_is_found_out(n: int) -> None:
    cluster = cluster_of(
        chain(n, 0.0005) | {"bad": VirtualTask(10.0, (("c", n - 1),))}, workers=2, latency_s=0.005
    )
    deaths = 0

    def die_of_it(worker: Any) -> None:
        nonlocal deaths
        deaths += 1
        worker.die()
        cluster.scheduler.leave(worker.state.address)  # what was on its way to the scheduler is lost
        cluster.join()

    def look() -> None:
        for worker in cluster.workers:
            if (
                worker.is_alive
                and "bad" in worker.state.tasks
                and worker.state.tasks["bad"].state == "executing"
            ):
                die_of_it(worker)
        if cluster.scheduler.tasks["bad"].state != "erred":
            cluster.at(cluster.time.now + 0.0005, look)

    look()
    finished(cluster)
    erred = {key for key, ts in cluster.scheduler.tasks.items() if ts.state == "erred"}
    assert erred == {"bad"}
    assert deaths <= cluster.scheduler.allowed_failures + 2  # one more than without
    assert max(ts.suspicious for ts in cluster.scheduler.tasks.values() if ts.key != "bad") <= 1


class RestrictWhileItRuns(SchedulerPlugin):
    """As a shuffle does: it decides where tasks run while the one before them runs."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def restrict(self, key: Any, address: str) -> None:
        self._scheduler.set_restrictions({key: {address}})


def test_a_task_is_restricted_after_it_was_sent_ahead() -> None:
    cluster = cluster_of({"a": VirtualTask(0.5), "b": VirtualTask(0.5, ("a",))}, workers=2)
    (first,) = [ws for ws in cluster.scheduler.workers.values() if ws.processing]
    (other,) = [ws for ws in cluster.scheduler.workers.values() if ws is not first]
    plugin = RestrictWhileItRuns(cluster.scheduler)
    cluster.at(0.25, plugin.restrict, "b", other.address)
    finished(cluster)
    assert outcomes(cluster) == {"withdrawn": 1}
    (ts,) = other.has_what
    assert ts.key == "b"


def test_a_leading_task_is_stolen() -> None:
    async def test(cluster: Cluster) -> None:
        event = await Event(name="go", client=cluster.client)
        address = cluster.workers[0].address
        blocking = cluster.client.submit(wait_for, 0, event, workers=[address])
        await cluster.processing(blocking)
        leading = cluster.client.submit(wait_for, 1, event, workers=[address], allow_other_workers=True)
        ts = await cluster.processing(leading)
        following = cluster.client.submit(lambda i: i + 1, leading)
        while cluster.scheduler.tasks.get(following.key) is None:
            await asyncio.sleep(0.005)
        # Nothing follows a task that waits; here it is sent all the same, as if there had been time.
        successors = cluster.stealing.successors
        successors._send(cluster.scheduler.tasks[following.key], ts.processing_on)
        cluster.ask(ts, cluster.workers[0], cluster.workers[1])
        while successors.n_ahead:
            await asyncio.sleep(0.005)
        await event.set()
        assert await cluster.client.gather([blocking, leading, following]) == [0, 1, 2]
        assert cluster.stealing.steals["confirmed"] == 1
        assert following.key not in cluster.workers[0].state.tasks

    on_cluster(test, config={"distributed.scheduler.work-stealing": False})


class OtherTask(Task):
    """A task that does more than call a function, as a barrier of distributed's shuffles does."""


def test_only_plain_calls_lead_and_follow_and_are_led_to() -> None:
    async def test(cluster: Cluster) -> None:
        successors = cluster.stealing.successors
        event = await Event(name="go", client=cluster.client)
        for cls in (Task, OtherTask):
            graph = {}
            for one, classes in {
                "leads": (cls, Task, Task),
                "follows": (Task, cls, Task),
                "comes": (Task, Task, cls),
            }.items():
                first = classes[0](f"{one}-{cls.__name__}-0", wait_for, 1, event)
                second = classes[1](f"{one}-{cls.__name__}-1", abs, first.ref())
                third = classes[2](f"{one}-{cls.__name__}-2", abs, second.ref())
                graph |= {task.key: task for task in (first, second, third)}
                future = cluster.client.get(graph, third.key, sync=False)
                await cluster.processing(SimpleNamespace(key=first.key))
                if cls is Task:
                    while successors.n_ahead < 2:
                        await asyncio.sleep(0.005)
                else:
                    await asyncio.sleep(
                        0.02
                    )  # it would come with the pass that follows, within a millisecond
                    assert successors.n_ahead == 0
                await event.set()
                assert await future == 1
                await event.clear()

    on_cluster(test)


@pytest.mark.cluster
def test_shuffles_find_their_tasks_where_they_look_for_them() -> None:
    settings: dict[str, Any] = {
        "ferroflow.low-latency-streams": False,  # so that what goes another way comes first
        "array.rechunk.method": "p2p",
        "distributed.p2p.storage.disk": False,
        "optimization.fuse.active": False,
    }
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as local,
        Client(local) as client,
    ):
        install(client)
        assert client.gather(client.map(abs, range(4))) == [0, 1, 2, 3]
        for n in range(8):
            x = da.map_blocks(a_block, chunks=((20,) * 2, (20,)), dtype=float, name=f"block-{n}")
            total = x.rechunk((40, 10), method="p2p").sum()
            assert client.compute(total, optimize_graph=False).result(timeout=30) == 800


# On real workers


def test_workers_are_told_as_they_join_and_until_it_is_uninstalled() -> None:
    async def test(cluster: Cluster) -> None:
        def listening() -> list[bool]:
            return [
                any("ferroflow-successors" in name for name in worker.plugins) for worker in cluster.workers
            ]

        async with Worker(cluster.scheduler.address, nthreads=1) as late:
            cluster.workers.append(late)
            while len(cluster.stealing.successors._listening) < 3 or not all(listening()):
                await asyncio.sleep(0.005)
            event = await Event(name="go", client=cluster.client)
            first = cluster.client.submit(wait_for, 1, event, workers=[late.address])
            last = cluster.client.submit(lambda i: i + 1, first)
            while not cluster.stealing.successors.n_ahead:
                await asyncio.sleep(0.005)
            successors = cluster.stealing.successors
            await uninstall(cluster.scheduler)
            assert successors.n_ahead == 0
            assert "_task_to_msg" not in vars(cluster.scheduler)
            await event.set()
            assert await last == 2
            while any(listening()):
                await asyncio.sleep(0.005)
            cluster.workers.remove(late)

    on_cluster(test)


def test_a_setting_turns_it_off() -> None:
    async def test(cluster: Cluster) -> None:
        await asyncio.sleep(0.1)
        assert not any(
            "ferroflow-successors" in name for worker in cluster.workers for name in worker.plugins
        )
        assert "_task_to_msg" not in vars(cluster.scheduler)

    on_cluster(test, config={"ferroflow.send-successors": False})


def a_block(block_info: Any = None) -> Any:
    return np.ones((20, 20))


def increment(i: int) -> int:
    return i + 1


def end_the_process(i: int) -> None:
    os._exit(i)


@pytest.mark.cluster
def test_chains_on_processes_and_the_task_that_ends_them_is_named() -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as local,
        Client(local) as client,
    ):
        install(client)
        for _ in range(3):
            future = client.submit(increment, 0, pure=False)
            for _ in range(100):
                future = client.submit(increment, future, pure=False)
            assert future.result(timeout=30) == 101
        graph: dict[str, Any] = {"k0": (increment, 0)}
        graph |= {f"k{i}": (increment, f"k{i - 1}") for i in range(1, 200)}
        assert client.get(graph, "k199") == 200
        counts = client.run_on_scheduler(
            lambda dask_scheduler: dask_scheduler.extensions["stealing"].successors.outcomes
        )
        assert counts["confirmed"] > 100
        kept = client.get({"first": (increment, 0), "second": (increment, "first")}, "second", sync=False)
        assert kept.result(timeout=30) == 2
        assert "sent ahead" in str(explain(client, "second"))
        # The worker may end before it has told that the first task has ended: for once, that is suspected.
        killing = client.get({"good": (increment, 0), "bad": (end_the_process, "good")}, "bad", sync=False)
        with pytest.raises(KilledWorker, match="'bad'"):
            killing.result(timeout=60)


class Loose:
    """What is kept for a worker, without one: its state, and what it did."""

    def __init__(self) -> None:
        self.tasks: dict[Any, Any] = {}
        self.data: dict[Any, Any] = {}
        self.events: list[Any] = []
        self.sent: list[dict[str, Any]] = []
        self.stream_handlers: dict[str, Any] = {}
        self.loop = SimpleNamespace(asyncio_loop=SimpleNamespace(call_soon=lambda call, *args: call(*args)))
        self.state: Any = self

    def handle_stimulus(self, event: Any) -> None:
        self.events.append(event)

    def batched_send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def log_event(self, topic: str, message: Any) -> None:
        """Say nothing."""

    def has(self, key: str, state: str, run_id: int = 1) -> None:
        self.tasks[key] = SimpleNamespace(state=state, run_id=run_id)
        if state == "memory":
            self.data[key] = None

    @property
    def started(self) -> list[str]:
        return [event.key for event in self.events if isinstance(event, ComputeTaskEvent)]


def plugged(worker: Loose) -> Any:
    plugin = WorkerSuccessors()
    plugin.setup(worker)  # type: ignore[arg-type]
    return plugin


def sent(key: str, priority: int = 0, run_id: int = 2, **awaits: int) -> dict[str, Any]:
    return {
        "key": key,
        "run_id": run_id,
        "priority": (priority,),
        "stimulus_id": "s",
        "who_has": dict.fromkeys(awaits, ("here",)),
        "nbytes": dict.fromkeys(awaits, -1),
        "run_spec": None,
        "resource_restrictions": {},
        "actor": False,
        "annotations": {},
        "span_id": None,
        "awaits": list(awaits.items()),
    }


@pytest.mark.parametrize(
    "state", [*STARTED, "released", "cancelled", "resumed", "fetch", "flight", "missing"]
)
def test_a_confirmed_task_that_does_not_run_there_is_placed_anew(state: str) -> None:
    worker = Loose()
    plugged(worker)
    worker.has("known", state)
    for key, run_id in (("known", 1), ("known", 2), ("unknown", 1)):
        worker.stream_handlers[CONFIRM](key=key, run_id=run_id, stimulus_id="s")
    again = (
        [("known", 2), ("unknown", 1)] if state in STARTED else [("known", 1), ("known", 2), ("unknown", 1)]
    )
    assert [message["key"] for message in worker.sent] == [key for key, _ in again]
    assert {message["op"] for message in worker.sent} == {"reschedule"}


def test_inputs_of_an_earlier_run_are_no_inputs() -> None:
    worker = Loose()
    plugin = plugged(worker)
    worker.has("a", "memory", run_id=1)
    worker.stream_handlers[SEND](**sent("b", a=2))
    plugin.transition("a", "flight", "memory")
    assert worker.started == []
    worker.has("a", "memory", run_id=2)
    plugin.transition("a", "executing", "memory")
    assert worker.started == ["b"]


def test_what_has_become_complete_starts_by_priority() -> None:
    worker = Loose()
    plugin = plugged(worker)
    for key, priority in (("b", 3), ("c", 1), ("d", 2)):
        worker.stream_handlers[SEND](**sent(key, priority, a=1))
    worker.has("a", "memory")
    plugin.transition("a", "executing", "memory")
    assert worker.started == ["c", "d", "b"]


def test_what_has_lost_an_input_waits_to_be_confirmed() -> None:
    worker = Loose()
    plugin = plugged(worker)
    worker.stream_handlers[SEND](**(sent("b", a=1) | {"nbytes": {"a": -1, "m": 8}}))
    worker.has("a", "memory")
    plugin.transition("a", "executing", "memory")
    assert worker.started == []
    worker.stream_handlers[CONFIRM](key="b", run_id=2, stimulus_id="s")
    assert worker.started == ["b"]


def test_what_was_sent_before_the_plugin_came_again_is_still_withdrawn() -> None:
    worker = Loose()
    earlier = plugged(worker)
    worker.stream_handlers[SEND](**sent("b", a=1))
    plugged(worker)
    worker.stream_handlers[WITHDRAW](runs=[("b", 2)], stimulus_id="s")
    worker.has("a", "memory")
    earlier.transition("a", "executing", "memory")
    assert worker.started == []


def test_the_workers_need_not_have_the_package() -> None:
    script = """
import sys, pickle, types
sys.modules["ferroflow_dask"] = None  # importing it raises
plugin = pickle.loads(sys.stdin.buffer.read())
worker = types.SimpleNamespace(
    state=types.SimpleNamespace(tasks={}), handle_stimulus=None, batched_send=None, stream_handlers={},
    loop=types.SimpleNamespace(asyncio_loop=types.SimpleNamespace(call_soon=None)), log_event=lambda *_: None,
)
plugin.setup(worker)
worker.stream_handlers["ferroflow-send"](awaits=[("a", 1)], key="b", nbytes={"a": 1})
plugin.teardown(worker)
print(*worker.stream_handlers)
"""
    payload = by_value(WorkerSuccessors())
    done = subprocess.run(
        [sys.executable, "-c", script], input=payload, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.decode().split() == [SEND, CONFIRM, WITHDRAW]
    assert pickle.loads(payload)
