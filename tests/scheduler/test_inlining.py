"""Small results come with the tasks that need them; in virtual time, to the message."""

from __future__ import annotations

import pickle
from typing import Any

import dask
import pytest
from in_charge import feature
from virtual_runs import L, chain, run

from ferroflow_dask.scheduler.features import inlined_results as inlining
from ferroflow_dask.scheduler.features.inlined_results_worker import RESULT
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.worker import Result

OFF = {"ferroflow.inline-limit": 0}


def of(cluster: VirtualCluster) -> Any:
    return feature(cluster.stealing, "inlined_results")


def knows(cluster: VirtualCluster, key: Any) -> bool:
    return of(cluster).result_of(key) is not None


def sum_of_two(nbytes: int) -> dict[Any, VirtualTask]:
    """Return a task whose inputs are made at the same time on two workers."""
    places = [{"workers": [i], "allow_other_workers": True} for i in (0, 1)]
    roots = {i: VirtualTask(0.5, nbytes=nbytes, annotations=place) for i, place in enumerate(places)}
    return roots | {"sum": VirtualTask(0.5, (0, 1))}


def test_an_input_comes_with_its_task() -> None:
    cluster = run(sum_of_two(8), workers=2)
    assert cluster.record.transfers == []
    assert of(cluster).counts() == {"received": 3, "sent": 1}  # the sum for the client
    assert cluster.record.makespan_s == 4 * L + 2 * 0.5  # each level is sent and reported
    with dask.config.set(OFF):
        cluster = run(sum_of_two(8), workers=2)
    assert len(cluster.record.transfers) == 1
    assert cluster.record.makespan_s > 4 * L + 2 * 0.5


@pytest.mark.parametrize(("nbytes", "n_fetched"), [(2**14, 0), (2**14 + 1, 1)])
def test_what_is_large_is_fetched(nbytes: int, n_fetched: int) -> None:
    cluster = run(sum_of_two(nbytes), workers=2)
    assert len(cluster.record.transfers) == n_fetched


@pytest.mark.parametrize(("n", "comes_along"), [(32, True), (33, False)])
def test_many_inputs_are_fetched_in_one_go_and_not_told(n: int, comes_along: bool) -> None:
    graph: dict[Any, VirtualTask] = {
        i: VirtualTask(0.5, nbytes=8, annotations={"workers": [i % 2]}) for i in range(n)
    }
    cluster = run(graph | {"sum": VirtualTask(0.5, tuple(graph))}, workers=2)
    assert of(cluster).counts()["received"] == (n if comes_along else 0) + 1  # the sum for the client
    assert bool(of(cluster).counts()["sent"]) is comes_along
    assert bool(cluster.record.transfers) is not comes_along


def test_what_stays_on_its_worker_is_not_told() -> None:
    cluster = VirtualCluster(2)
    cluster.submit(chain(20), keep=[])
    cluster.submit(chain(20))
    cluster.run()
    assert of(cluster).counts()["received"] == 1  # the end, which a client wants


def spread(n: int) -> dict[Any, VirtualTask]:
    """Return a task whose result is read by `n` others, on four workers in turn."""
    readers = {i: VirtualTask(0.5, ("root",), annotations={"workers": [i % 4]}) for i in range(n)}
    return {"root": VirtualTask(0.5, nbytes=8, annotations={"workers": [0]})} | readers


def test_a_result_comes_with_each_task_that_reads_it_and_no_worker_keeps_it() -> None:
    cluster = run(spread(40), workers=4)
    assert of(cluster).counts()["sent"] == 30
    assert cluster.record.transfers == []
    assert not any("root" in worker.state.tasks for worker in cluster.workers[1:])
    assert cluster.record.n_messages == 41 + 1  # reports, and the word that the first worker has dropped it


@pytest.mark.parametrize(("n", "n_sent", "n_fetched"), [(8, 6, 0), (9, 0, 3)])
def test_a_result_that_many_tasks_read_is_fetched_once_by_each_worker(
    n: int, n_sent: int, n_fetched: int
) -> None:
    # As many bytes as the limit allows for one result and each worker.
    limit = 2 * len(pickle.dumps(Result(8), protocol=5))
    with dask.config.set({"ferroflow.inline-limit": limit}):
        cluster = run(spread(n), workers=4)
    assert len(cluster.record.transfers) == n_fetched
    assert of(cluster).counts()["sent"] == n_sent


def test_copies_go_with_the_result() -> None:
    cluster = VirtualCluster(2)
    cluster.submit(sum_of_two(8), keep=["sum"])
    cluster.run()
    cluster.check()
    assert [len(worker.state.data) for worker in cluster.workers] in ([0, 1], [1, 0])
    assert knows(cluster, "sum")
    cluster.release(["sum"])
    cluster.run()
    cluster.check()
    assert not any(worker.state.data for worker in cluster.workers)
    assert not knows(cluster, "sum")
    assert of(cluster)._nbytes == 0


@pytest.mark.parametrize(("nbytes", "is_asked"), [(10**6, False), (10**5, True)])
def test_where_results_are_large_none_is_asked_for(nbytes: int, is_asked: bool) -> None:
    cluster = VirtualCluster(2)
    cluster.submit({("t", i): VirtualTask(0.5, nbytes=nbytes) for i in range(4)})
    cluster.run()
    cluster.submit({("t", 4): VirtualTask(0.5, nbytes=8)})
    cluster.run()
    assert knows(cluster, ("t", 4)) is is_asked


def test_the_oldest_are_forgotten_and_then_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inlining, "_KEPT_NBYTES", 1)
    cluster = run(sum_of_two(8), workers=2)
    assert of(cluster).counts() == {"received": 3, "sent": 0}
    assert len(cluster.record.transfers) == 1
    assert of(cluster)._nbytes == 0


def test_only_the_report_of_the_present_run_brings_a_result() -> None:
    cluster = VirtualCluster(2)
    cluster.submit({"t": VirtualTask(0.5, annotations={"workers": [0]})})
    cluster.run(until=0.25)
    run_id = cluster.scheduler.tasks["t"].run_id
    first, second = (worker.state.address for worker in cluster.workers)
    report = {"stimulus_id": "s", "nbytes": 8, "type": b"", "typename": "", "startstops": ()}
    for key, number, worker in (("t", run_id + 1, second), ("u", run_id, first), ("t", run_id, first)):
        assert of(cluster).counts()["received"] == 0
        told = {"metadata": {RESULT: b"1"}, "key": key, "run_id": number, "worker": worker}
        cluster.scheduler.stream_handlers["task-finished"](**report, **told)
    assert of(cluster).result_of("t") == b"1"
    assert cluster.scheduler.tasks["t"].metadata is None


@pytest.mark.parametrize("is_closed", [True, False], ids=["inlining has ended", "workers do not listen"])
def test_results_are_dropped_and_fetched_if(is_closed: bool) -> None:
    cluster = VirtualCluster(2)
    if not is_closed:
        for worker in cluster.workers:
            of(cluster).remote.left(worker.state.address)
    cluster.submit(sum_of_two(8))
    if is_closed:
        of(cluster)._close()
    cluster.run()
    cluster.check()
    assert of(cluster).counts() == {"received": 0, "sent": 0}
    assert len(cluster.record.transfers) == 1
    assert [ts.metadata for ts in cluster.scheduler.tasks.values()] == [None] * len(cluster.scheduler.tasks)


def test_metadata_that_is_not_ours_stays() -> None:
    cluster = VirtualCluster(1)
    cluster.submit({"t": VirtualTask(0.5)})
    cluster.run()
    ts = cluster.scheduler.tasks["t"]
    told = {RESULT: b"1", "own": 2}
    ts.metadata = dict(told)
    of(cluster).task_reported(ts, told)
    assert ts.metadata == told == {"own": 2}


def test_what_dies_with_its_worker_is_made_anew_and_told_anew() -> None:
    graph = sum_of_two(8)
    graph["long"] = VirtualTask(4.0, annotations={"workers": [2]})
    graph["late"] = VirtualTask(0.5, (0, 1, "long"))
    cluster = VirtualCluster(3)
    cluster.submit(graph)
    cluster.run(until=2.0)
    assert knows(cluster, 0)
    assert knows(cluster, 1)
    cluster.leave(0)
    cluster.leave(1)
    cluster.run(until=2.25)
    assert not knows(cluster, 0)
    assert not knows(cluster, 1)
    cluster.run()
    cluster.check()
    started = [execution.key for execution in cluster.record.executions]
    assert [started.count(i) for i in (0, 1)] == [2, 2]
