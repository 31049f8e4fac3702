"""Dask's task stream: an entry for each task of a bundle, on its thread, and none for the bundle."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from bundled import Bundling, Gate, chain, fail, leaves, on_bundling_cluster, take_all_for_short, task
from cluster_tests import runs_on
from distributed import wait
from distributed.diagnostics.eventstream import EventStream
from distributed.diagnostics.task_stream import TaskStreamPlugin, rectangles
from waiting import comes

from ferroflow_dask import FerroflowPlugin, uninstall
from ferroflow_dask.bundling import sequence
from ferroflow_dask.policy import stealing

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_for_short(monkeypatch)
    monkeypatch.setattr(sequence, "_given_up", {})
    monkeypatch.setattr(stealing, "_BUNDLES_LOOKED_AT", 0)  # only the tests ask for divisions


def hidden(_: Gate) -> tuple[list[Any], int]:
    return [task("total-0", *leaves("leaf"))], 31


def wanted(_: Gate) -> tuple[list[Any], int]:
    return leaves("leaf"), 30


def chains(_: Gate) -> tuple[list[Any], int]:
    return [chain(f"line-{i}", i, 4)[-1] for i in range(6)], 24


def some_fail(_: Gate) -> tuple[list[Any], int]:
    return leaves("leaf", 30, at_3=fail, at_20=fail), 30


def divided(gate: Gate) -> tuple[list[Any], int]:
    first = task("first-0", 1)
    return [
        task("total-0", gate.task("next-0", first), *[task(f"next-{i}", first) for i in range(1, 12)])
    ], 14


async def _record(cluster: Bundling, program: Callable[[Gate], tuple[list[Any], int]], gate: Gate) -> int:
    outputs, n = program(gate)
    futures = cluster.client.compute(outputs)
    if program is divided:
        await comes(gate.reached.is_set)
        (name,) = [key for key in list(cluster.bundles.keys()) if "bundle" in str(key)]
        assert cluster.stealing.graphs.dividing.ask(name, "all", "a test")
        await comes(lambda: cluster.counts["divided"])
    gate.open()
    await wait(futures)
    # A bundle that runs delivers results early; the entries of its other steps come when it ends.
    bundles = [ts for key, ts in cluster.scheduler.tasks.items() if "bundle" in str(key)]
    await comes(lambda: all(ts.state != "processing" for ts in bundles))
    assert cluster.counts["created"]
    return n


@runs_on(on_bundling_cluster)
@pytest.mark.parametrize("program", [hidden, wanted, chains, some_fail, divided])
async def test_each_task_has_an_entry(
    cluster: Bundling, program: Callable[[Gate], tuple[list[Any], int]], gate: Gate
) -> None:
    scheduler = cluster.scheduler
    stream, events = TaskStreamPlugin(scheduler), EventStream(scheduler)
    scheduler.add_plugin(stream)
    n = await _record(cluster, program, gate)
    seen = Counter(str(entry["key"]) for entry in stream.buffer)
    assert not [key for key in seen if key.startswith(("bundle", "('bundle"))]
    assert (len(seen), seen.total()) == (n, n)
    assert [entry["key"] for entry in events.buffer] == [entry["key"] for entry in stream.buffer]
    assert len(rectangles(stream.buffer)["start"]) >= n
    spans: defaultdict[Any, list[Any]] = defaultdict(list)
    for entry in stream.buffer:
        (span,) = [one for one in entry["startstops"] if one["action"] == "compute"]
        spans[entry["worker"], entry["thread"]].append((span["start"], span["stop"]))
    for on_thread in spans.values():
        ordered = sorted(on_thread)
        assert all(stop <= start + 1e-6 for (_, stop), (start, _) in pairwise(ordered))
    assert not [ts for ts in scheduler.tasks.values() if ts.metadata]


@runs_on(on_bundling_cluster)
async def test_a_record_from_before_and_the_uninstalled_plugin(cluster: Bundling, gate: Gate) -> None:
    scheduler = cluster.scheduler
    await uninstall(cluster.client)
    stream = TaskStreamPlugin(scheduler)
    scheduler.add_plugin(stream)
    await cluster.client.register_plugin(FerroflowPlugin())
    n = await _record(cluster, hidden, gate)
    assert stream.index == n
    await uninstall(cluster.client)
    assert "transition" not in vars(stream)
