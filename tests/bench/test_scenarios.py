"""Scenarios of stealing: who is slow, what is heavy, when workers come, and the bounds of it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import checked_client
from distributed import Client
from distributed.utils import key_split
from measured import THREADS, Cluster, build

from ferroflow_dask.annotations import COST_ANNOTATION
from ferroflow_dask.bench.workloads import WORKLOADS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with checked_client(THREADS, processes=False, set_as_default=False) as client:
        yield Cluster(client)


def test_scale_up_starts_with_one_worker_and_gives_all_back(cluster: Cluster) -> None:
    cluster.scaled.clear()
    run = cluster.run(build(WORKLOADS["scale_up"], salt="scaled"))
    run.instance.check(run.results)
    assert cluster.scaled == [1, THREADS, THREADS]


@pytest.mark.parametrize(
    ("name", "n_threads", "speed"),
    [
        pytest.param("straggler", 8, 7 + 1 / 10, id="seven fast workers and one at a tenth"),
        pytest.param("straggler", 1, 1 / 10, id="a straggler alone"),
        pytest.param("two_speeds", 8, 4 + 4 / 10, id="half of the workers at a tenth"),
        pytest.param("two_speeds", 3, 1 + 2 / 10, id="half rounded up at a tenth"),
    ],
)
def test_the_bound_is_work_over_the_sum_of_speeds(name: str, n_threads: int, speed: float) -> None:
    sizes = {"n": 400, "task_ms": 20.0, "slowdown": 10.0}
    instance = build(WORKLOADS[name], n_threads=n_threads, arguments=sizes)
    assert instance.bound_s == pytest.approx(400 * 0.02 / speed)
    assert instance.t1_s is None


def test_no_schedule_beats_one_task() -> None:
    instance = build(WORKLOADS["straggler"], n_threads=64, arguments={"n": 2, "task_ms": 20.0})
    assert instance.bound_s == 0.02


@pytest.mark.parametrize("name", ["straggler", "two_speeds"])
def test_slow_workers_are_the_first_by_name(
    name: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    instance = build(WORKLOADS[name], salt="slow")
    instance.prepare(cluster)
    monkeypatch.setattr(Client, "map", lambda *_, slow, **__: given.append(slow) or [])
    instance.submit(cluster.client)
    workers = sorted(cluster.client.cluster.workers.items())
    assert given == [[worker.address for _, worker in workers[:1]]]


def durations_of(name: str, cluster: Cluster, **request: Any) -> dict[str, float]:
    run = cluster.run(build(WORKLOADS[name], costs="known", **request))
    return run.submitted.annotations[COST_ANNOTATION]


def test_a_heavy_tail_is_one_name_and_as_many_heavy_tasks_as_said(cluster: Cluster) -> None:
    sizes = {"n": 40, "task_ms": 0.5, "heavy_fraction": 0.1, "heavy_factor": 20.0}
    costs = durations_of("heavy_tail", cluster, arguments=sizes, salt="tail")
    assert {key_split(key) for key in costs} == {"load", "heavy_tail"}
    assert Counter(costs.values()) == {0.0005: 40 + 36, 0.01: 4}


def test_lognormal_durations_come_in_the_order_in_which_they_were_drawn(cluster: Cluster) -> None:
    costs = durations_of("lognormal", cluster, seed=3, salt="drawn")
    in_order = [costs[key] for key in sorted(costs, key=lambda key: int(key.rsplit("-", 1)[1]))]
    drawn = np.random.default_rng(3).lognormal(1, 1.3, 50)
    assert in_order == pytest.approx(np.minimum(drawn, 60) / 2000)
    assert {key_split(key) for key in costs} == {"lognormal"}
