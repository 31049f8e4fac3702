"""Plans of arriving graphs in virtual time: samples, values of other graphs, and messages that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from virtual_runs import finished

from ferroflow_dask.scheduler.graphs import samples
from ferroflow_dask.scheduler.graphs.samples import RunningSample
from ferroflow_dask.topology import Host, Link, Runtime, Topology, Worker
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

#: Time of the scheduler for a task that ends; there are no other costs, and sums of it are exact [s].
U = 1 / 1024
#: Duration of a task [U].
TASK = 8
#: Wait for the others of a sample once the first one has ended: `samples._LEAST_S` [U].
WAIT = 0.05 / U

Row = tuple[Any, int, float, float]


def cluster_of(workers: int, without: Collection[str] = ()) -> VirtualCluster:
    host = Host("here", 100.0, (Worker(),) * workers, inside=Link(0.0, 1e9))
    costs = replace(Runtime.without_costs(), message_s={"task-finished": U})
    return VirtualCluster.on(Topology([host], runtime=costs), without=without, validate=True)


def tasks(prefix: str, n: int, reads: str = "") -> dict[Any, VirtualTask]:
    """Return tasks that each read another one, if `reads` has the prefix of that."""
    return {
        f"{prefix}-{i}": VirtualTask(U * TASK, (f"{reads}-{i}",) if reads else (), nbytes=8) for i in range(n)
    }


def total(name: str, graph: dict[Any, VirtualTask]) -> dict[Any, VirtualTask]:
    """Return a task that reads all others."""
    return {name: VirtualTask(U * TASK, tuple(graph))}


def timeline(cluster: VirtualCluster) -> list[Row]:
    """Return key, worker, start and stop [U] of each execution; of a bundle the name."""
    rows = cluster.record.timeline()
    return [
        (key[0] if isinstance(key, tuple) else key, worker, start / U, stop / U)
        for key, worker, start, stop in rows
    ]


def n_runs(cluster: VirtualCluster) -> Counter[Any]:
    """Return how often each task ran; values of other tasks take no time."""
    ran = [*cluster.record.executions, *cluster.record.steps]
    return Counter(one.key for one in ran if one.stop > one.start)


def counts(cluster: VirtualCluster) -> dict[str, int]:
    stealing: Any = cluster.stealing
    return dict(stealing.graphs.bundles.counts)


# Samples

LEAVES = tasks("t", 24)
SUM = LEAVES | total("sum", LEAVES)
#: Two tasks of the prefix for each thread.
SAMPLE: list[Row] = [("t-3", 0, 0, 8), ("t-2", 1, 0, 8), ("t-1", 0, 8, 16), ("t-0", 1, 8, 16)]


#: Worker, start and stop of the bundles of the others, which have two or three tasks [U].
BUNDLES = [
    (0, 18, 42),
    (1, 18, 34),
    (1, 34, 58),
    (0, 42, 58),
    (0, 58, 82),
    (1, 58, 82),
    (0, 82, 98),
    (1, 82, 98),
]


def test_the_rest_of_a_graph_is_planned_when_its_sample_has_ended() -> None:
    cluster = cluster_of(2)
    cluster.submit(SUM, knows_prefixes=False)
    # Both workers end a task at 16 U, and the scheduler takes 1 U for each message.
    assert timeline(finished(cluster)) == [
        *SAMPLE,
        *(("bundle-t-1", *row) for row in BUNDLES),
        ("sum", 0, 100, 108),
    ]
    assert cluster.record.makespan_s / U == 109
    runs = n_runs(cluster)
    assert {key: runs[key] for key in SUM} == dict.fromkeys(SUM, 1)


def test_a_long_task_of_a_sample_delays_the_rest_for_a_short_time() -> None:
    graph = SUM | {"t-1": VirtualTask(4.0, nbytes=8)}
    cluster = cluster_of(2)
    cluster.submit(graph, knows_prefixes=False)
    rows = timeline(finished(cluster))
    assert rows[:4] == [*SAMPLE[:2], ("t-1", 0, 8, 8 + 4 / U), SAMPLE[3]]
    starts = [start for name, _, start, _ in rows if name == "bundle-t-1"]
    assert starts[0] == TASK + 1 + WAIT  # one message after the end of the first task
    assert rows[-1] == ("sum", 0, 8 + 4 / U + 1, 8 + 4 / U + 1 + TASK)


def test_a_sample_that_occupies_all_threads_is_looked_at_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[float] = []
    is_over = RunningSample.is_over

    def noted(self: RunningSample) -> bool:
        looks.append(cluster.time.now)
        return is_over(self)

    monkeypatch.setattr(RunningSample, "is_over", noted)
    cluster = cluster_of(8)
    cluster.submit(
        {f"t-{i}": VirtualTask(20.0 if i % 2 else 0.5, nbytes=8) for i in range(80)}, knows_prefixes=False
    )
    finished(cluster)
    n_sampled = 16
    assert max(looks) == pytest.approx(samples._BUSY_S)
    assert len(looks) <= n_sampled + samples._BUSY_S / samples._LEAST_S


@pytest.mark.parametrize("options", [{"knows_prefixes": True}, {"knows_prefixes": False}])
def test_without_samples_a_graph_is_planned_once(options: dict[str, bool]) -> None:
    cluster = cluster_of(2, ["samples"])
    cluster.submit(SUM, **options)
    starts = [start for _, _, start, _ in timeline(finished(cluster))]
    assert starts[:2] == [0, 0]
    assert bool(counts(cluster)["created"]) == options["knows_prefixes"]


def test_a_cluster_learns_from_a_run() -> None:
    cluster = cluster_of(2)
    cluster.submit(SUM, knows_prefixes=False)
    again = {("t", i): VirtualTask(U * TASK) for i in range(60)}
    cluster.at(1.0, cluster.submit, again, knows_prefixes=False)
    later = [name for name, _, start, _ in timeline(finished(cluster)) if start >= 1 / U]
    assert later[0].startswith("bundle-t-")


def test_later_messages_of_a_client_wait_for_the_rest() -> None:
    cluster = cluster_of(2)
    cluster.submit(SUM, knows_prefixes=False)
    cluster.submit({"reader": VirtualTask(U, ("sum",))})
    cluster.at(5 * U, cluster.release, ["sum"])
    rows = timeline(finished(cluster))
    assert rows[-1] == ("reader", 0, 108, 109)
    assert [key for key, ts in cluster.scheduler.tasks.items() if ts.state == "memory"] == ["reader"]


# Values of other graphs

LOADS = tasks("load", 16)


def shared(without: Collection[str] = ()) -> VirtualCluster:
    """Run two graphs on one thread that have hidden tasks in common, while a task of 64 U keeps it busy."""
    cluster = cluster_of(1, without)
    cluster.submit({"before": VirtualTask(64 * U)})
    for client in ("clean", "other"):
        own = tasks(client, 16, "load")
        cluster.submit(LOADS | own | total(f"{client}sum", own), client)
    return finished(cluster)


def test_two_live_graphs_share_their_hidden_tasks() -> None:
    cluster = shared()
    counted = counts(cluster)
    # The thread has the first bundle of the first graph already, so its task runs again.
    assert (counted["shared"], counted["again"]) == (15, 1)
    runs = n_runs(cluster)
    assert sorted(runs[key] for key in LOADS) == [1] * 15 + [2]
    assert cluster.record.makespan_s / U == 64 + TASK * (16 + 1 + 16 + 16 + 2) + 2
    first = timeline(cluster)[:5]
    assert first == [
        ("before", 0, 0, 64),
        ("bundle-load-1", 0, 64, 80),
        ("bundle-load-2", 0, 80, 96),
        ("bundle-load-1", 0, 96, 112),
        ("bundle-load-1", 0, 112, 128),
    ]


def test_without_sharing_they_run_twice() -> None:
    cluster = shared(["sharing"])
    assert (counts(cluster)["shared"], counts(cluster)["again"]) == (0, 16)
    runs = n_runs(cluster)
    assert [runs[key] for key in LOADS] == [2] * 16
    assert cluster.record.makespan_s / U == 64 + TASK * (2 * 16 + 2 * 16 + 2) + 1


def test_a_graph_reads_what_another_one_has_run() -> None:
    cluster = cluster_of(1)
    own = tasks("clean", 16, "load")
    cluster.submit(LOADS | own, keep=LOADS)
    cluster.at(1.0, cluster.submit, LOADS | own)
    finished(cluster)
    runs = n_runs(cluster)
    assert [runs[key] for key in (*LOADS, *own)] == [1] * 32
