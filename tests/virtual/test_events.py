"""What may happen in a run of a virtual cluster: workers come and go, tasks fail, clients release."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from virtual_runs import L, chain, finished, independent, pinned, run

from ferroflow_dask.virtual import Outcome, VirtualCluster, VirtualTask


def eventful(workers: int, graph: dict[Any, VirtualTask], policy: str = "ferroflow") -> VirtualCluster:
    cluster = VirtualCluster(workers, policy=policy, latency_s=L, bandwidth=math.inf)
    cluster.submit(graph)
    return cluster


@pytest.mark.parametrize("policy", ["ferroflow", "dask"])
def test_tasks_and_results_of_a_dead_worker_are_made_again(policy: str) -> None:
    cluster = eventful(2, {("t", i): VirtualTask(0.5, annotations={"retries": 0}) for i in range(4)}, policy)
    cluster.at(0.75, cluster.leave, 1)
    finished(cluster)
    lost = [e for e in cluster.record.executions if e.outcome is Outcome.LOST]
    assert [(e.worker, e.start, e.stop) for e in lost] == [(1, 0.5 + L, 0.75)]
    # Its result and the task that it ran are made again, after the two that worker 0 has.
    assert sorted(cluster.record.n_started.values()) == [1, 1, 2, 2]
    assert cluster.record.makespan_s == 4 * 0.5 + 2 * L
    assert not cluster.workers[1].is_alive


def test_a_transfer_from_a_worker_that_dies_begins_again_elsewhere() -> None:
    graph = {
        "a": VirtualTask(0.5, nbytes=1, annotations={"workers": [0], "allow_other_workers": True}),
        "b": VirtualTask(0.5, ("a",), annotations={"workers": [1]}),
    }
    cluster = VirtualCluster(2, latency_s=L, bandwidth=1.0)  # a transfer takes a second
    cluster.submit(graph)
    cluster.at(1.0, cluster.leave, 0)
    finished(cluster)
    assert cluster.record.transfers == []
    assert cluster.record.n_started == {"a": 2, "b": 1}
    # Told, sent again, run and reported; then the same for b, which finds its input where it runs.
    assert cluster.record.makespan_s == 1.0 + L + 2 * (0.5 + 2 * L)


def test_a_worker_that_joins_is_given_work() -> None:
    cluster = eventful(1, pinned(4))
    cluster.at(0.25, cluster.join)
    finished(cluster)
    assert [e.worker for e in cluster.record.executions].count(1) == 2


def test_a_worker_that_joins_is_given_tasks_that_only_some_may_have() -> None:
    cluster = VirtualCluster(2, policy="ferroflow", latency_s=L, resources={0: {"GPU": 9}})
    cluster.submit(independent(12, annotations={"resources": {"GPU": 1}}))
    cluster.at(0.25, cluster.join, resources={"GPU": 9})
    finished(cluster)
    assert {e.worker for e in cluster.record.executions} == {0, 2}


def test_a_paused_worker_starts_nothing_until_it_goes_on() -> None:
    cluster = eventful(1, independent(3))
    cluster.at(0.25, cluster.pause, 0)
    cluster.at(2.0, cluster.resume, 0)
    finished(cluster)
    assert [start for _, _, start, _ in cluster.record.timeline()] == [L, 2.0, 2.5]


def test_tasks_leave_a_paused_worker() -> None:
    cluster = eventful(2, pinned(6))
    cluster.at(L, cluster.pause, 0)
    cluster.at(9.0, cluster.resume, 0)
    finished(cluster)
    assert [start for _, worker, start, _ in cluster.record.timeline() if worker == 0] == [L]
    assert cluster.record.makespan_s < 3.0


@pytest.mark.parametrize("seed", range(20))
def test_nothing_waits_for_a_paused_worker(seed: int) -> None:
    rng = random.Random(seed)
    cluster = VirtualCluster(rng.randint(2, 4), nthreads=rng.randint(1, 3), policy="ferroflow", latency_s=L)
    first = {"workers": [0], "allow_other_workers": True}
    graph = {("r", i): VirtualTask(rng.random(), nbytes=100, annotations=first) for i in range(9)}
    for i in rng.sample(range(9), 5):
        graph["s", i] = VirtualTask(rng.random(), (("r", i), ("r", rng.randrange(9))))
    cluster.submit(graph)
    cluster.at(rng.random(), cluster.pause, 0)
    finished(cluster)


@pytest.mark.parametrize("cost", [{}, {"ferroflow_cost": 0.5}], ids=["unknown cost", "known cost"])
@pytest.mark.parametrize(
    ("retries", "n_started", "state"),
    [
        pytest.param(2, 3, "memory", id="a task that fails is tried again"),
        pytest.param(1, 2, "erred", id="until its retries are used up"),
    ],
)
def test_failures(retries: int, n_started: int, state: str, cost: dict[str, float]) -> None:
    failing = VirtualTask(0.5, failures=2, annotations={"retries": retries, **cost})
    cluster = run({"t": failing, "end": VirtualTask(0.5, ("t",))})
    assert cluster.record.n_started["t"] == n_started
    assert cluster.scheduler.tasks["end"].state == state
    assert cluster.time.now >= n_started * 0.5


def test_results_that_nobody_needs_are_forgotten() -> None:
    cluster = run(chain(3))
    assert set(cluster.workers[0].state.data) == {("c", 2)}
    cluster.release([("c", 2)])
    finished(cluster)
    assert not cluster.scheduler.tasks
    assert not cluster.workers[0].state.data


def test_a_release_stops_what_has_not_started() -> None:
    graph = independent(6)
    cluster = eventful(1, graph)
    cluster.at(0.75, cluster.release, list(graph))
    finished(cluster)
    assert cluster.record.n_started == {("t", 0): 1, ("t", 1): 1}


def test_two_clients_share_a_task() -> None:
    cluster = eventful(1, {"shared": VirtualTask(0.5), "a": VirtualTask(0.5, ("shared",))})
    cluster.submit({"shared": VirtualTask(0.5), "b": VirtualTask(0.5, ("shared",))}, client="other")
    finished(cluster)
    assert cluster.record.n_started == {"shared": 1, "a": 1, "b": 1}


def test_resources_bind() -> None:
    graph = independent(4, annotations={"resources": {"GPU": 1}})
    cluster = run(graph, workers=3, nthreads=2, resources={2: {"GPU": 1}})
    assert [(e.worker, e.start) for e in cluster.record.executions] == [(2, L + 0.5 * i) for i in range(4)]


def test_restrictions_bind_and_preferences_do_not() -> None:
    strict = run(independent(6, annotations={"workers": [1]}), workers=2)
    assert {e.worker for e in strict.record.executions} == {1}
    loose = run(pinned(6), workers=2)
    assert {e.worker for e in loose.record.executions} == {0, 1}


def test_a_task_waits_for_the_worker_that_has_its_resource() -> None:
    cluster = eventful(1, independent(1, annotations={"resources": {"GPU": 1}}))
    cluster.at(3.0, cluster.join, resources={"GPU": 1})
    assert finished(cluster).record.makespan_s == 3.5 + 2 * L


def test_an_actor_stays() -> None:
    graph = {"actor": VirtualTask(0.5)} | {("call", i): VirtualTask(0.5, ("actor",)) for i in range(2)}
    cluster = VirtualCluster(2, latency_s=L)
    cluster.submit(graph, keep=graph, actors=["actor"])
    finished(cluster)
    homes = [ws for ws in cluster.scheduler.workers.values() if ws.actors]
    assert [{ts.key for ts in ws.actors} for ws in homes] == [{"actor"}]
    assert {e.worker for e in cluster.record.executions if e.key == "actor"} == {homes[0].name}


@pytest.mark.parametrize("first", [0, 20], ids=["the first task is long", "a later task is long"])
@pytest.mark.parametrize("usual_s", [1e-4, 4e-4, 2e-3], ids=["tasks of 0.1 ms", "0.4 ms", "2 ms"])
def test_no_task_waits_behind_one_that_is_much_longer_than_expected(usual_s: float, first: int) -> None:
    cluster = VirtualCluster(4)
    cluster.submit({("t", i): VirtualTask(100.0 if i == first else usual_s) for i in range(60)})
    finished(cluster)
    assert [done.key for done in cluster.record.completions if done.time > 0.1] == [("t", first)]
