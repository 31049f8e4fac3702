"""The predicted duration of each graph is compared with the real one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from distributed import Client, Event, LocalCluster, wait

from ferroflow_dask.bundling.repeats import Repeats
from ferroflow_dask.bundling.rewrite import rewrite
from ferroflow_dask.scheduler import install
from ferroflow_dask.scheduler.extension import FerroflowStealing, extension_on
from ferroflow_dask.scheduler.graphs import arrivals
from ferroflow_dask.scheduler.learned import Learned

N, EACH_S = 100, 0.05


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        install(client)
        # A sample runs first: nothing is known of the function.
        client.gather(client.map(time.sleep, [EACH_S] * N, pure=False))
        yield client


def extension(client: Client) -> FerroflowStealing:
    cluster: Any = client.cluster
    found = extension_on(cluster.scheduler)
    assert found is not None
    return found


def counted(client: Client) -> dict[str, int]:
    (feature,) = (one for one in extension(client).features if one.name == "predictions")
    assert not feature.pending()
    return dict(feature.counts())


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: n - before[name] for name, n in after.items() if n > before[name]}


def test_a_graph_of_known_durations_takes_as_long_as_predicted(client: Client) -> None:
    before = counted(client)
    futures = client.map(time.sleep, [EACH_S] * N, pure=False)
    wait(futures)
    assert difference(before, counted(client)) == {"0.7_to_1.4": 1}
    notes = [
        one
        for future in futures
        for one in extension(client).decisions.about(str(future.key))
        if one.what == "predicted"
    ]
    assert len(notes) == 1
    assert "its graph took" in str(notes[0])


def test_predictions_are_corrected_by_the_durations_of_earlier_graphs(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    learned = extension(client).core.learned
    before, learned.excess = counted(client), 3.0
    try:
        with caplog.at_level(logging.WARNING, logger="ferroflow_dask"):
            for n in (1, 2):
                wait(client.map(time.sleep, [EACH_S] * N, pure=False))
                assert difference(before, counted(client)) == {"above_2": n}
        assert 2.0 < learned.excess < 3.0 * 0.9
        # Dask may warn of a busy event loop meanwhile.
        assert [one.getMessage() for one in caplog.records if one.name == "ferroflow_dask"] == [
            f"ferroflow: graphs take {3.0 * 0.5**0.1:.1f} times as long as predicted; "
            "the last one has tasks of sleep"
        ]
    finally:
        learned.excess = 1.0


def test_the_mean_excess_follows_many_graphs_and_no_single_one() -> None:
    learned = Learned()
    learned.record_excess(1e6)
    assert 1.0 < learned.excess < 1.1
    for _ in range(60):
        learned.record_excess(1.5 / learned.excess)
    assert learned.excess == pytest.approx(1.5, rel=0.01)
    for _ in range(200):
        learned.record_excess(1e-6)
    assert learned.excess == 0.25


def no_repeats(client: Client) -> Repeats:
    """Return the durations by cut, after all are forgotten."""
    repeats = extension(client).core.learned.repeats
    repeats._by_shape.clear()
    return repeats


def test_a_repeated_graph_is_measured_by_its_cut(client: Client) -> None:
    repeats = no_repeats(client)
    for n in range(1, 4):
        wait(client.map(time.sleep, [EACH_S] * N, pure=False))
        (measured,) = repeats.known().values()
        assert sum(one.n for one in measured.values()) == n
        assert all(0.5 * N * EACH_S / 2 < one.mean_s < 10 * N * EACH_S for one in measured.values())


def test_graphs_whose_results_are_delivered_are_measured(client: Client) -> None:
    (feature,) = (one for one in extension(client).features if one.name == "predictions")
    repeats = no_repeats(client)
    for _ in range(3):
        futures = client.map(time.sleep, [0.002] * 400, pure=False)
        wait(futures)
    bundles = extension(client).graphs.bundles
    assert any(len(bundles.get(key).tasks) > 1 for key in bundles.keys())  # noqa: SIM118 -- no mapping
    deadline = time.monotonic() + 20
    while feature.pending() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not feature.pending()
    assert sum(one.n for by_cut in repeats.known().values() for one in by_cut.values()) >= 3
    del futures


def test_graphs_with_a_priority_try_no_cut(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def noted(graph: Any, *arguments: Any) -> Any:
        seen.append(graph.is_urgent)
        return rewrite(graph, *arguments)

    monkeypatch.setattr(arrivals, "rewrite", noted)
    calls = [dask.delayed(time.sleep)(1e-3 * i) for i in range(12)]
    wait(client.compute(calls, priority=5))
    wait(client.map(time.sleep, [1e-3] * 12, pure=False, priority=5))
    with dask.annotate(priority=5):
        annotated = [dask.delayed(time.sleep)(1e-3 * i) for i in range(12, 24)]
    wait(client.compute(annotated))
    assert len(seen) >= 3
    assert all(seen)
    seen.clear()
    wait(client.map(time.sleep, [1e-3] * 12, pure=False))
    assert seen
    assert not any(seen)


def test_the_measured_durations_choose_the_cut(client: Client) -> None:
    repeats = no_repeats(client)
    wait(client.map(time.sleep, [EACH_S] * N, pure=False))
    (shape,) = repeats.known()
    for _ in range(20):
        repeats.record(shape, "single tasks", 0.2)
    futures = client.map(time.sleep, [EACH_S] * N, pure=False)
    wait(futures)
    notes = [str(one) for future in futures for one in extension(client).decisions.about(str(future.key))]
    assert any("single tasks" in note for note in notes)


def test_graphs_that_share_the_cluster_do_not_count(client: Client) -> None:
    before = counted(client)
    wait([client.map(time.sleep, [EACH_S] * N, pure=False) for _ in range(2)])
    assert difference(before, counted(client)) == {}


def test_graphs_that_fail_or_are_cancelled_do_not_count(client: Client) -> None:
    before = counted(client)
    futures = client.map(lambda i: time.sleep(EACH_S) if i < N - 1 else 1 / 0, range(N), pure=False)
    wait(futures)
    assert futures[-1].status == "error"
    del futures
    gate = Event("gate", client=client)
    held = client.map(lambda _: Event("gate").wait(), range(N), pure=False)
    client.cancel(held)
    gate.set()
    deadline = time.monotonic() + 20
    (feature,) = (one for one in extension(client).features if one.name == "predictions")
    while feature.pending() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert difference(before, counted(client)) == {}
