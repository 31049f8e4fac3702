"""Dask's own pages, metrics and dumps of a cluster show what the plugin has stolen."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgpack
import pytest
from distributed import Client
from distributed.cluster_dump import DumpArtefact
from distributed.dashboard.components.scheduler import StealingEvents
from in_charge import cluster_of, feature, pinned, scheduler_of, stealing_of
from waiting import until

Function = Callable[[Any], Any]

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def watched() -> Iterator[Client]:
    """A client on whose cluster work has been stolen."""
    with cluster_of({}, {}, {}) as client:
        assert client.gather(pinned(client, 40)) == list(range(40))
        until(lambda: not stealing_of(client).in_flight)
        assert stealing_of(client).steals["confirmed"] > 0
        yield client


def page(client: Client, path: str) -> tuple[int, str]:
    with urlopen(f"http://127.0.0.1:{scheduler_of(client).http_server.port}{path}") as answer:
        return answer.status, answer.read().decode()


def test_the_stealing_page_shows_our_steals(watched: Client) -> None:
    def shown(dask_scheduler: Any) -> int:
        component = StealingEvents(dask_scheduler)
        before = sum(component.source.data["count"])
        component.update()
        return int(sum(component.source.data["count"]) - before)

    assert watched.run_on_scheduler(shown) == stealing_of(watched).steals["asked"]


def test_what_was_learned_is_among_the_metrics(watched: Client) -> None:
    pytest.importorskip("prometheus_client")

    def ours() -> dict[str, float]:
        lines = (line.rsplit(" ", 1) for line in page(watched, "/metrics")[1].splitlines())
        return {name: float(value) for name, value in lines if name.startswith("dask_scheduler_ferroflow_")}

    shown = ours()
    stock = re.findall(r"^dask_stealing_request_count_total{.* (\S+)$", page(watched, "/metrics")[1], re.M)
    steals = stealing_of(watched).steals
    assert sum(map(float, stock)) == steals["asked"]
    for outcome in ("asked", "confirmed", "refused", "aborted"):
        assert shown[f'dask_scheduler_ferroflow_steals_total{{outcome="{outcome}"}}'] == steals[outcome]
    for name in ("prefetch", "inlined_results"):
        for what, n in feature(stealing_of(watched), name).counts().items():
            assert shown[f'dask_scheduler_ferroflow_{name}_total{{what="{what}"}}'] == n
    assert shown["dask_scheduler_ferroflow_round_trip_seconds"] > 0
    stealing = stealing_of(watched)
    assert shown["dask_scheduler_ferroflow_slots_per_thread"] == stealing.scheduler.WORKER_SATURATION
    n_slow = sum(worker.speed < 1 for worker in stealing.view.workers.values())
    assert shown["dask_scheduler_ferroflow_slow_workers"] == n_slow
    assert "dask_scheduler_ferroflow_steal_threshold" not in shown  # the policy `ring` has one


def unpacked(path: str) -> dict[str, Any]:
    # `DumpArtefact` cannot read MessagePack once anything was stolen, with or without the plugin:
    # the counts by level have integers as keys, which its reader refuses.
    with gzip.open(path) as file:
        return msgpack.unpack(file, strict_map_key=False)


@pytest.mark.parametrize(("form", "read"), [("msgpack", unpacked), ("yaml", DumpArtefact.from_url)])
def test_cluster_dumps_hold_our_steals(form: str, read: Function, watched: Client, tmp_path: Path) -> None:
    watched.dump_cluster_state(str(tmp_path / "dump"), format=form)
    (written,) = tmp_path.iterdir()
    dump = read(str(written))
    assert len(dump["workers"]) == 3
    stealing = dump["scheduler"]["extensions"]["stealing"]
    assert stealing["steals"] == stealing_of(watched).steals
    assert sum(stealing["metrics"]["request_count_total"].values()) == stealing["steals"]["asked"]
