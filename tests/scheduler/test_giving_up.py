"""Bundles that give up: they take much longer than expected, or they would pass an iterator."""

from __future__ import annotations

from time import sleep
from typing import Any

import pytest
from bundled import CALLS, Bundling, add, apart, chain, fork, on_bundling_cluster, take_all_for_short, task
from cluster_tests import runs_on
from waiting import comes

from ferroflow_dask.bundling import sequence

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _all_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_for_short(monkeypatch)
    monkeypatch.setattr(sequence, "_given_up", {})
    monkeypatch.setattr(sequence, "_too_short_s", {})


@runs_on(on_bundling_cluster)
async def test_a_late_bundle_is_split_once(cluster: Bundling, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 100_000_000, 100))
    monkeypatch.setattr(sequence, "perf_counter", lambda: float(next(now)))
    assert await cluster.values(*fork()[1]) == [13, 14, 15]
    assert cluster.counts["split"] == 1
    assert CALLS["inc-0"] == 2
    assert CALLS["inc-11"] == 1
    await cluster.is_empty()
    assert await cluster.values(*fork()[1]) == [13, 14, 15]
    assert cluster.counts["created"] == 2
    assert cluster.counts["split"] == 1  # the second time it runs on


@runs_on(on_bundling_cluster)
async def test_a_late_bundle_does_not_make_the_prefix_of_its_output_separate(
    cluster: Bundling, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 100_000_000, 100))
    monkeypatch.setattr(sequence, "perf_counter", lambda: float(next(now)))
    assert await cluster.values(task("out-0", chain("inc", 0)[-1])) == [13]
    assert cluster.counts["split"] == 1
    assert not cluster.stealing.graphs._learned.separate


@runs_on(on_bundling_cluster, resources=(None,))
async def test_another_bundle_as_wrong_as_a_late_one_does_not_start(
    cluster: Bundling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "_LATE_S", 0.0)
    assert await cluster.values(slow_chain(0)) == [12]
    assert cluster.counts["split"] == 1
    assert (CALLS["inc-0"], CALLS["inc-1"]) == (2, 1)
    assert await cluster.values(slow_chain(100)) == [12]
    assert cluster.counts["split"] == 2
    assert CALLS["inc-100"] == 1


def slow_chain(first: int) -> Any:
    last = task(f"inc-{first}", 0, function=slow)
    for i in range(first + 1, first + 12):
        last = task(f"inc-{i}", last)
    return last


def slow(key: str, *values: int) -> int:
    sleep(0.1)
    return add(key, *values)


def iterate(key: str, *values: int) -> Any:
    CALLS[key] += 1
    return iter([*values])


def drain(key: str, values: Any) -> int:
    return add(key, *values)


@runs_on(on_bundling_cluster, resources=(None,))
async def test_a_bundle_that_would_read_an_iterator_is_split_and_its_reader_stays_separate(
    cluster: Bundling,
) -> None:
    def made() -> Any:
        lazy = apart("lazy-0", 1, 2, function=iterate)
        return chain("inc", task("drained-0", lazy, function=drain))[-1]

    assert await cluster.values(made()) == [16]
    assert cluster.counts["split"] == 1
    assert CALLS["drained-0"] == 1
    await comes(lambda: "drained" in cluster.stealing.graphs._learned.separate)
    await cluster.is_empty()
    cluster.forget_seen()
    assert await cluster.values(made()) == [16]
    assert cluster.keys == {"lazy-0", "drained-0", "inc-11"}
    assert cluster.counts["split"] == 1


@runs_on(on_bundling_cluster, resources=(None,))
async def test_a_bundle_that_would_return_an_iterator_is_split_and_its_maker_stays_separate(
    cluster: Bundling,
) -> None:
    def made() -> Any:
        lazy = task("lazy-0", chain("inc", 0)[-1], function=iterate)
        return apart("drained-0", lazy, function=drain)

    assert await cluster.values(made()) == [13]
    assert cluster.counts["split"] == 1
    await comes(lambda: "lazy" in cluster.stealing.graphs._learned.separate)
    await cluster.is_empty()
    cluster.forget_seen()
    assert await cluster.values(made()) == [13]
    assert cluster.keys == {cluster.bundle_of("inc"), "lazy-0", "drained-0"}
    assert cluster.counts["split"] == 1
