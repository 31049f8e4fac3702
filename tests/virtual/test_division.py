"""Bundles in virtual time: they run step by step, and are divided where steps take long or wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from virtual_runs import bundling_cluster

from ferroflow_dask.virtual import VirtualCluster, VirtualTask

#: A running bundle is late by so much, or by four times a step, when an idle thread may have it divided [s]:
#: `policy.stealing`. Passes by the clock come every 20 ms.
LATE_S, PASS_S = 0.05, 0.02


def finished(
    graph: dict[Any, VirtualTask], workers: int = 4, threads: int = 1, **options: Any
) -> VirtualCluster:
    """Run a graph to its end, in which each task has run once."""
    cluster = bundling_cluster(workers, threads)
    cluster.submit(graph, **options)
    cluster.run()
    cluster.check()
    runs = Counter(one.key for one in (*cluster.record.executions, *cluster.record.steps))
    assert {key: runs[key] for key in graph} == dict.fromkeys(graph, 1)
    return cluster


def counts(cluster: VirtualCluster) -> dict[str, int]:
    stealing: Any = cluster.stealing
    return dict(stealing.graphs.bundles.counts)


def stop_of(cluster: VirtualCluster) -> dict[Any, float]:
    """Return when each task ended, alone or as a step [s]."""
    ran = [*cluster.record.executions, *cluster.record.steps]
    return {one.key: one.stop for one in ran}


def mapped(n: int, duration_s: float = 0.002, prefix: str = "t") -> dict[Any, VirtualTask]:
    return {(prefix, i): VirtualTask(duration_s, nbytes=10) for i in range(n)}


def test_a_bundle_takes_as_long_as_its_steps() -> None:
    cluster = finished(mapped(400))
    steps = cluster.record.steps
    assert len(steps) == 400
    for bundle in cluster.record.executions:
        inside = [
            one for one in steps if one.worker == bundle.worker and bundle.start <= one.start < bundle.stop
        ]
        assert sum(one.stop - one.start for one in inside) == pytest.approx(bundle.stop - bundle.start)
    assert cluster.record.messages["ferroflow-delivered"] >= 16  # at least one from each bundle


@pytest.mark.parametrize(
    ("at", "is_summed"),
    [
        *(pytest.param(at, False, id=f"wanted, step {at}") for at in (0, 1, 5, 24)),
        *(pytest.param(at, True, id=f"summed, step {at}") for at in (2, 3, 5, 24)),
    ],
)
def test_what_is_behind_a_long_step_runs_on_idle_threads(at: int, is_summed: bool) -> None:
    graph = mapped(120)
    graph["t", at] = VirtualTask(5.0, nbytes=10)
    if is_summed:
        graph["sum"] = VirtualTask(0.002, tuple(graph), nbytes=10)
    cluster = finished(graph, learned_s={"t": 0.002})
    assert counts(cluster)["divided"] >= 1
    stops_s = stop_of(cluster)
    others_s = max(stops_s[key] for key in graph if key not in (("t", at), "sum"))
    undisturbed_s = finished(mapped(120)).record.makespan_s
    assert (
        others_s < undisturbed_s + LATE_S + PASS_S + 0.03
    )  # the last one: messages and the steps themselves
    assert cluster.record.makespan_s < 5.0 + undisturbed_s + 0.02


def test_a_reader_of_a_delivered_value_does_not_wait_for_the_end_of_the_bundle() -> None:
    cluster = bundling_cluster(4)
    graph = mapped(120)
    graph["t", 3] = VirtualTask(5.0, nbytes=10)
    cluster.submit(graph, learned_s={"t": 0.002})
    reader = {"reader": VirtualTask(0.002, (("t", 0), ("t", 1)), nbytes=10)}
    cluster.at(1.0, cluster.submit, reader)
    cluster.run()
    cluster.check()
    assert stop_of(cluster)["reader"] < 1.05


@pytest.mark.parametrize("waiting", [0, 30, 59])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_task_that_waits_for_its_siblings_frees_them(waiting: int, threads: int) -> None:
    graph = mapped(60)
    others = tuple(key for key in graph if key != ("t", waiting))
    graph["t", waiting] = VirtualTask(0.002, awaits=others)
    cluster = finished(graph, 4 // threads, threads)
    undisturbed_s = finished(mapped(60), 4 // threads, threads).record.makespan_s
    assert cluster.record.makespan_s < undisturbed_s + LATE_S + 2 * PASS_S + 0.03


def test_tasks_that_wait_for_their_neighbours_on_all_threads_end() -> None:
    graph = mapped(60)
    for i in range(0, 60, 2):
        graph["t", i] = VirtualTask(0.002, awaits=(("t", i + 1),))
    assert finished(graph).record.makespan_s < 12  # the first look for it comes after 2 s


def test_a_paused_worker_gives_its_steps_away() -> None:
    cluster = bundling_cluster(2)
    cluster.submit(mapped(2_000, 0.001))
    cluster.at(0.8, cluster.pause, 0)
    cluster.run(until=5)
    on_paused = [one.start for one in cluster.record.steps if one.worker == 0]
    assert 0.79 < max(on_paused) < 0.8 + 0.03
    cluster.resume(0)  # a bundle that it has not started may wait there
    cluster.run()
    cluster.check()


def test_a_worker_that_dies_with_a_divided_bundle_costs_the_unfinished_steps_only() -> None:
    cluster = bundling_cluster(4)
    graph = mapped(120)
    graph["t", 3] = VirtualTask(5.0, nbytes=10)
    graph["sum"] = VirtualTask(0.002, tuple(graph), nbytes=10)
    cluster.submit(graph, learned_s={"t": 0.002})
    cluster.run(until=2.0)
    (long,) = [
        worker.name
        for worker in cluster.workers
        if any(key[0].startswith("bundle") for key in worker._executing)
    ]
    cluster.leave(long)
    cluster.run()
    cluster.check()
    assert "sum" in stop_of(cluster)


def test_unneeded_steps_do_not_run() -> None:
    cluster = bundling_cluster(4)
    graph = mapped(2_000, 0.01)
    cluster.submit(graph)
    cluster.at(0.5, cluster.release, list(graph)[20:])
    cluster.run()
    cluster.check()
    assert len(cluster.record.steps) < 400


def test_a_run_with_divisions_repeats() -> None:
    def timeline() -> list[tuple[Any, int, float, float]]:
        graph = mapped(200) | {("u", i): VirtualTask(0.001, (("t", i), ("t", i + 1))) for i in range(199)}
        for i in range(0, 200, 40):
            graph["t", i] = VirtualTask(0.4)
        cluster = finished(graph, learned_s={"t": 0.002})
        assert counts(cluster)["divided"]
        return cluster.record.timeline()

    assert timeline() == timeline()
