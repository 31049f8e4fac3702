"""Siblings: queued tasks whose results are read together go to one worker, and nothing else is different."""

from __future__ import annotations

import random
from operator import neg
from statistics import fmean
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import convert_legacy_graph
from distributed import Client, Scheduler
from in_charge import feature, in_charge, scheduler_of, stealing_of
from virtual_runs import L, finished, independent

from ferroflow_dask import install, uninstall
from ferroflow_dask.scheduler import _distributed_transitions as transitions
from ferroflow_dask.scheduler.features.siblings import Siblings
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.memory import MemorySpec

MB = 10**6


def graph_of(collection: Any) -> dict[Any, VirtualTask]:
    """Return the graph of a collection, with long tasks whose durations differ, and results of one size."""
    rng = random.Random(0)
    (optimized,) = dask.optimize(collection)
    tasks = convert_legacy_graph(dict(optimized.__dask_graph__()))
    return {
        key: VirtualTask(rng.uniform(0.4, 0.6), tuple(task.dependencies), nbytes=MB)
        for key, task in tasks.items()
    }


def array(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Any:
    return da.random.default_rng(1).random(shape, chunks=chunks)


def tree() -> dict[Any, VirtualTask]:
    return graph_of(array((1000, 1000), (50, 50)).sum())


def cluster_of(*, with_siblings: bool = True, **options: Any) -> VirtualCluster:
    without = () if with_siblings else ("siblings",)
    usual = {"latency_s": L, "bandwidth": 100 * MB, "without": without, "nthreads": 2}
    return VirtualCluster(4, **{**usual, **options})


def moved_nbytes(cluster: VirtualCluster) -> int:
    return sum(transfer.nbytes for transfer in cluster.record.transfers)


def measured(graph: dict[Any, VirtualTask], *, with_siblings: bool) -> tuple[int, int, float]:
    """Return the bytes that move, the most that a worker holds [B], and the makespan [s]."""
    cluster, held = cluster_of(with_siblings=with_siblings), [0]
    follow = cluster.record.transition

    def transition(*args: Any, **more: Any) -> None:
        follow(*args, **more)
        held.append(max(ws.nbytes for ws in cluster.scheduler.workers.values()))

    cluster.record.transition = transition  # type: ignore[method-assign]
    cluster.submit(graph)
    finished(cluster)
    return moved_nbytes(cluster), max(held), cluster.record.makespan_s


def n_reserved(cluster: VirtualCluster) -> int:
    return len(feature(cluster.stealing, "siblings").pending())


@pytest.mark.parametrize(
    ("collection", "most"),
    [
        (array((1000, 1000), (50, 50)).sum(), 0.4),
        (array((2000, 500), (20, 50)).sum(axis=0), 0.4),
        ((array((1000, 1000), (50, 50)) + array((1000, 1000), (50, 50))).mean(), 0.6),
    ],
    ids=["total", "along an axis", "after an operation"],
)
def test_fewer_bytes_move_and_no_worker_holds_more(collection: Any, most: float) -> None:
    graph = graph_of(collection)
    nbytes_before, held_before, before_s = measured(graph, with_siblings=False)
    nbytes, held, taken_s = measured(graph, with_siblings=True)
    assert nbytes <= most * nbytes_before
    assert held <= held_before
    assert taken_s <= 1.005 * before_s


@pytest.mark.parametrize(
    "graph",
    [
        independent(80),
        graph_of(array((300, 300), (50, 50)) @ array((300, 300), (50, 50))),
        {("r", i): VirtualTask(0.5, nbytes=MB) for i in range(60)}
        | {"end": VirtualTask(0.5, tuple(("r", i) for i in range(60)))},
    ],
    ids=["no reader", "a matrix product", "a reader of many"],
)
def test_other_graphs_run_as_without(graph: dict[Any, VirtualTask]) -> None:
    found = []
    for with_siblings in (False, True):
        cluster = cluster_of(with_siblings=with_siblings)
        cluster.submit(graph)
        finished(cluster)
        found.append(list(cluster.record.timeline()))
    assert found[0] == found[1]


def test_a_graph_of_higher_priority_comes_before_what_is_reserved() -> None:
    cluster = cluster_of()
    urgent = {("u", i): VirtualTask(0.5, annotations={"priority": 1}) for i in range(40)}
    cluster.submit(tree())
    cluster.at(2.0, cluster.submit, urgent)
    finished(cluster)
    roots = [start for key, _, start, _ in cluster.record.timeline() if "random_sample" in str(key)]
    last_urgent_s = max(start for key, _, start, _ in cluster.record.timeline() if key[0] == "u")
    assert not [start for start in roots if 2.6 < start < last_urgent_s]  # tasks on their way run first


def test_what_is_reserved_for_a_paused_worker_is_left_to_others_after_a_while() -> None:
    cluster, reserved = cluster_of(), list[Any]()

    def pause() -> None:
        own = feature(cluster.stealing, "siblings")._own
        most = max(own, key=lambda ws: len(own[ws]))
        reserved.extend(own[most])
        cluster.pause([worker.state.address for worker in cluster.workers].index(most.address))

    cluster.submit(tree())
    cluster.at(3.0, pause)
    finished(cluster)
    roots = [(start, key) for key, _, start, _ in cluster.record.timeline() if "random" in str(key)]
    order = [key for _, key in sorted(roots)]
    assert reserved
    assert max(map(order.index, reserved)) < 200 < len(order)


@pytest.mark.parametrize("seed", range(30))
def test_any_events_leave_nothing_reserved(seed: int) -> None:
    rng = random.Random(seed)
    cluster = cluster_of(nthreads=rng.randint(1, 3), seed=seed)
    graph = tree()
    cluster.submit(graph)
    cluster.at(rng.uniform(0, 9), cluster.pause, 1)
    if seed % 2:
        cluster.at(rng.uniform(9, 20), cluster.resume, 1)
    if seed % 3 == 0:
        cluster.at(rng.uniform(0, 9), cluster.leave, 2)
    if seed % 5 == 0:
        cluster.at(rng.uniform(0, 9), cluster.join)
    if seed % 7 == 0:
        cluster.at(rng.uniform(0, 9), cluster.release, list(graph))
    finished(cluster)
    assert not n_reserved(cluster)


@pytest.mark.cluster
def test_a_real_cluster_has_the_values_of_stock(thread_client: Client) -> None:
    values = np.arange(1600.0).reshape(40, 40)
    with in_charge(thread_client), dask.annotate(ferroflow_bundle=False):
        total = thread_client.compute(da.from_array(values, chunks=2).map_blocks(np.sqrt).sum(axis=0))
        np.testing.assert_allclose(total.result(), np.sqrt(values).sum(axis=0))
        siblings = feature(stealing_of(thread_client), "siblings")
        assert siblings.counts()["together"] > 0
        del total


def sums() -> list[Any]:
    """Return sums of eight tasks each, which stay separate."""
    with dask.annotate(ferroflow_bundle=False):
        roots = [dask.delayed(neg)(i * j, pure=False) for i in range(8) for j in range(1, 9)]
        return [dask.delayed(sum)(roots[i : i + 8], pure=False) for i in range(0, 64, 8)]


@pytest.mark.cluster
def test_a_failure_ends_the_plugin_and_no_task_is_lost(
    thread_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("siblings are broken")

    monkeypatch.setattr(Siblings, "_unreserved", fail)
    install(thread_client)
    scheduler: Scheduler = scheduler_of(thread_client)
    assert thread_client.gather(thread_client.compute(sums())) == [-36 * i for i in range(8)]
    assert "stimulus_queue_slots_maybe_opened" not in vars(scheduler)


@pytest.mark.cluster
def test_after_the_plugin_another_plugin_may_call_what_it_has_replaced(thread_client: Client) -> None:
    install(thread_client)
    scheduler = scheduler_of(thread_client)
    ours = scheduler.stimulus_queue_slots_maybe_opened

    def wrapped(*, stimulus_id: str) -> None:
        ours(stimulus_id=stimulus_id)

    scheduler.stimulus_queue_slots_maybe_opened = wrapped
    uninstall(thread_client)
    assert thread_client.gather(thread_client.compute(sums())) == [-36 * i for i in range(8)]
    del scheduler.stimulus_queue_slots_maybe_opened


def test_an_unknown_function_of_the_queue_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "SchedulerState.stimulus_queue_slots_maybe_opened"
    monkeypatch.setitem(transitions._OF_QUEUE, name, frozenset({"another"}))
    cluster = cluster_of()
    cluster.submit(tree())
    finished(cluster)
    assert feature(cluster.stealing, "siblings").counts() == {"together": 0}


def renamed(key: Any) -> Any:
    return (f"urgent-{key[0]}", *key[1:]) if isinstance(key, tuple) else f"urgent-{key}"


def first_of_chain(graph: dict[Any, VirtualTask], key: Any) -> Any:
    while len(graph[key].dependencies) == 1:
        (key,) = graph[key].dependencies
    return key


def test_siblings_of_a_graph_that_comes_later_with_a_higher_priority() -> None:
    cluster = cluster_of()
    urgent = {
        renamed(key): VirtualTask(
            task.duration_s, tuple(map(renamed, task.dependencies)), MB, annotations={"priority": 1}
        )
        for key, task in tree().items()
    }
    cluster.submit(tree())
    cluster.at(1.3, cluster.submit, urgent)
    finished(cluster)
    ran_on = {key: worker for key, worker, _, _ in cluster.record.timeline()}
    of_roots = []
    for task in urgent.values():
        firsts = [first_of_chain(urgent, one) for one in task.dependencies]
        if len(firsts) > 1 and not any(urgent[one].dependencies for one in firsts):
            of_roots.append(firsts)
    n_workers = [len({ran_on[one] for one in inputs}) for inputs in of_roots]
    assert fmean(n_workers) < 2


def test_siblings_that_would_fill_a_worker_stay_in_the_order_of_dask() -> None:
    rows = graph_of(array((800, 800), (50, 50)).rechunk((10, -1)).max(axis=1).sum())
    found: dict[tuple[int, bool], tuple[float, int]] = {}
    for n_blocks in (200, 24):  # that a worker has memory for; each reader has 16 inputs
        for with_siblings in (True, False):
            memory = MemorySpec(n_blocks * MB, disk_bandwidth=100 * MB)
            cluster = cluster_of(with_siblings=with_siblings, memory=memory, nthreads=1, validate=False)
            cluster.submit(rows)
            cluster.run()
            written = sum(cluster.record.memory.written.values())
            found[n_blocks, with_siblings] = cluster.record.makespan_s, written
            n_together = feature(cluster.stealing, "siblings").counts()["together"] if with_siblings else 0
            assert (n_together > 0) is (with_siblings and n_blocks == 200)
    assert found[24, True] == found[24, False]
