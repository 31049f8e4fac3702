"""Prefetch of tasks before their inputs exist: when they are, what it saves, and what may come between."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from virtual_runs import L, chain, finished

from ferroflow_dask.policy import ClusterView, StealingPolicy
from ferroflow_dask.policy.events import Event, TaskFinished
from ferroflow_dask.policy.instructions import Instruction
from ferroflow_dask.virtual import VirtualCluster, VirtualTask


def cluster_of(graph: dict[Any, VirtualTask], workers: int = 1, **options: Any) -> VirtualCluster:
    cluster = VirtualCluster(workers, **{"latency_s": L, "bandwidth": math.inf, **options})
    cluster.submit(graph)
    return cluster


def outcomes(cluster: VirtualCluster) -> dict[str, int]:
    """Return what became of the tasks that were sent ahead, as far as there were any."""
    stealing: Any = cluster.stealing
    counts = [one.counts() for one in stealing.features if one.name == "prefetch"]
    return {outcome: n for one in counts for outcome, n in one.items() if n}


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
    cluster.submit({("t", i): VirtualTask(0.1) for i in range(300)})
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
    graph = {"a": VirtualTask(0.5, failures=1), "b": VirtualTask(0.5, ("a",)), "c": VirtualTask(0.5, ("b",))}
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
    stealing: Any = cluster.stealing
    assert [decision.what for decision in stealing.decisions.about("b")] == ["withdrawn", "placed"]


def test_a_task_that_was_sent_ahead_fails_as_any_other() -> None:
    graph = {"a": VirtualTask(0.5), "b": VirtualTask(0.5, ("a",), failures=1), "c": VirtualTask(0.5, ("b",))}
    cluster = finished(cluster_of(graph))
    states = {key: ts.state for key, ts in cluster.scheduler.tasks.items()}
    assert states == {"a": "released", "b": "erred", "c": "erred"}
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
    with dask.config.set({"ferroflow.inline-limit": 0}):
        cluster = cluster_of({}, workers=2, latency_s=0.005)
    here, there = (worker.state.address for worker in cluster.workers)
    first = {"m": VirtualTask(0.01, annotations={"workers": [1]})}
    first["u"] = VirtualTask(0.01, ("m",), annotations={"workers": [0]})
    cluster.submit(first, keep=["m", "u"])
    cluster.run()
    copies = cluster.scheduler.tasks["m"].who_has
    assert {ws.address for ws in copies or ()} == {here, there}
    second = {"c": VirtualTask(0.05, ("u",), annotations={"workers": [0]})}
    second["b"] = VirtualTask(0.05, ("m", "c"))
    cluster.submit(second, keep=["b"])

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
            bad = worker.state.tasks.get("bad")
            if worker.is_alive and bad is not None and bad.state == "executing":
                die_of_it(worker)
        if cluster.scheduler.tasks["bad"].state != "erred":
            cluster.at(cluster.time.now + 0.0005, look)

    look()
    finished(cluster)
    erred = {key for key, ts in cluster.scheduler.tasks.items() if ts.state == "erred"}
    assert erred == {"bad"}
    assert deaths <= cluster.scheduler.allowed_failures + 2  # one more than without
    assert max(ts.suspicious for ts in cluster.scheduler.tasks.values() if ts.key != "bad") <= 1


def test_a_task_is_restricted_after_it_was_sent_ahead() -> None:
    cluster = cluster_of({"a": VirtualTask(0.5), "b": VirtualTask(0.5, ("a",))}, workers=2)
    (first,) = [ws for ws in cluster.scheduler.workers.values() if ws.processing]
    (other,) = [ws for ws in cluster.scheduler.workers.values() if ws is not first]
    # As a shuffle does: it decides where tasks run while the one before them runs.
    cluster.at(0.25, cluster.scheduler.set_restrictions, {"b": {other.address}})
    finished(cluster)
    assert outcomes(cluster) == {"withdrawn": 1}
    (ts,) = other.has_what
    assert ts.key == "b"


class FailingAtTheEndOfATask(StealingPolicy):
    """Raises when the n-th task has finished."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        if isinstance(event, TaskFinished):
            self.n -= 1
            if self.n == 0:
                raise ZeroDivisionError("the policy is broken")
        yield from super().handle(event, view, now)


@pytest.mark.parametrize("duration_s", [0.0008, 0.001, 0.5])
@pytest.mark.parametrize("n", [1, 3])
def test_after_a_failure_prefetched_tasks_run_by_dask_to_their_end(n: int, duration_s: float) -> None:
    with dask.config.set({"ferroflow.inline-limit": 0}):
        cluster = VirtualCluster(2, policy=FailingAtTheEndOfATask(n), latency_s=0.002)
        cluster.submit(chain(8, duration_s))
        cluster.run(until=20.0)
    stealing: Any = cluster.stealing
    assert isinstance(stealing.error, ZeroDivisionError)
    assert outcomes(cluster)["withdrawn"] > 0
    assert cluster.scheduler.tasks["c", 7].state == "memory"
    assert max(cluster.record.n_started.values()) <= 3
