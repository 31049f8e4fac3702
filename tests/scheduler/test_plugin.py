"""The plugin on real schedulers: it takes over, it moves work, it leaves, and it fails safely."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import dask
import numpy as np
import pytest
from conftest import checked_client
from distributed import Client, Event, wait
from distributed.stealing import WorkStealing
from in_charge import assert_stock, pinned, scheduler_of, stealing_of
from waiting import pause

from ferroflow_dask import install, uninstall
from ferroflow_dask.deploy import local_client
from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.policy import StealingPolicy
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.scheduler.features import metrics

pytestmark = pytest.mark.cluster

#: The periodic balancing of both extensions is out of play: what happens, events have caused.
NEVER = {"distributed.scheduler.work-stealing-interval": "5m"}


@pytest.fixture
def patient_client() -> Iterator[Client]:
    """Three workers whose stealing extension never acts by the clock."""
    with dask.config.set(NEVER), checked_client(3, processes=False, set_as_default=True) as client:
        yield client


def held(i: int, event: Event) -> int:
    """Last until an event is set."""
    event.wait()
    return pause(i, 0.02)


def validate(dask_scheduler: Any) -> None:
    dask_scheduler.validate_state()


# In and out


@pytest.mark.parametrize("takes", ["client", "cluster"])
def test_install_replaces_the_extension_and_uninstall_puts_it_back(takes: str, thread_client: Client) -> None:
    target = thread_client if takes == "client" else thread_client.cluster
    uninstall(target)  # nothing is there
    assert_stock(thread_client)
    install(target, "static")
    assert type(stealing_of(thread_client)) is FerroflowStealing
    install(target)  # which replaces the first one
    assert isinstance(stealing_of(thread_client).placement.policy, StealingPolicy)
    plugins = scheduler_of(thread_client).plugins
    assert "ferroflow" in plugins
    assert sum(isinstance(plugin, WorkStealing) for plugin in plugins.values()) == 1
    uninstall(target)
    assert_stock(thread_client)


@pytest.fixture
def _no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' clusters of this process, which may live on, show nothing."""
    monkeypatch.setattr(metrics._COLLECTOR, "cores", WeakKeyDictionary())


@pytest.mark.usefixtures("_no_other_cluster")
def test_our_metrics_come_and_go_with_us(thread_client: Client) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")

    def n_ours() -> int:
        return prometheus_client.generate_latest().count(b"# HELP dask_scheduler_ferroflow_")

    assert n_ours() == 0
    install(thread_client, "ring")
    assert n_ours() == 15  # nothing is prefetched
    install(thread_client, "static")
    assert n_ours() == 13  # it has no threshold
    uninstall(thread_client)
    assert n_ours() == 0


@pytest.mark.usefixtures("_no_other_cluster")
def test_of_two_clusters_the_one_that_stays_goes_on_showing(thread_client: Client) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    install(thread_client, "ring")
    with local_client(1, 1, processes=False) as other:
        install(other, "static")
        uninstall(other)
        assert b"scheduler_ferroflow_steal_threshold" in prometheus_client.generate_latest()
    uninstall(thread_client)
    assert b"scheduler_ferroflow" not in prometheus_client.generate_latest()


def test_wrong_names_and_options_are_told_at_once(thread_client: Client) -> None:
    with pytest.raises(UnknownNameError, match="unknown policy 'greedy'"):
        install(thread_client, "greedy")
    with pytest.raises(UsageError, match="options of policy 'static' must be among: none"):
        install(thread_client, "static", threshold=2)
    with pytest.raises(UsageError, match=r"inline_limit is a setting, .* call dask\.config\.set"):
        install(thread_client, inline_limit=0)
    assert_stock(thread_client)


# Work


def test_idle_workers_steal_without_waiting_for_a_timer(patient_client: Client) -> None:
    install(patient_client)
    futures = pinned(patient_client, 30, seconds=0.02)
    assert patient_client.gather(futures) == list(range(30))
    assert all(patient_client.has_what().values())
    steals = stealing_of(patient_client).steals
    assert steals["confirmed"] >= 10
    assert steals["asked"] >= steals["confirmed"] + steals["refused"]
    patient_client.run_on_scheduler(validate)
    # Steals are events, which the dashboard reads.
    events = [message for _, message in patient_client.get_events("stealing")]
    requests = [request for kind, *rest in events if kind == "request" for request in rest[0]]
    assert len(requests) == steals["asked"]
    assert sum(event[0] == "confirm" for event in events) == steals["confirmed"]
    time_, level, _key, cost, victim, victim_occupancy, thief, thief_occupancy = requests[0][:8]
    assert stealing_of(patient_client).cost_multipliers[level]
    assert {victim, thief} <= set(scheduler_of(patient_client).workers)
    assert min(time_, cost, victim_occupancy, thief_occupancy) >= 0


def test_stock_stealing_would_not_have_moved_anything(patient_client: Client) -> None:
    # What makes the test above one that can fail.
    futures = pinned(patient_client, 30, seconds=0.02)
    patient_client.gather(futures)
    assert sorted(len(keys) for keys in patient_client.has_what().values()) == [0, 0, 30]


def test_declared_costs_order_the_tasks_of_a_graph(patient_client: Client) -> None:
    install(patient_client, without=["bundles"])  # a sample of the fast ones would run before all others
    are_done = Event("fast done")
    with dask.annotate(ferroflow_cost=0.8):
        heavy = [dask.delayed(held)(i, are_done, dask_key_name=f"heavy-{i}") for i in range(2)]
    with dask.annotate(ferroflow_cost=0.001):
        fast = [dask.delayed(pause)(i, 0.001, dask_key_name=f"fast-{i}") for i in range(60)]
    futures = patient_client.compute([*fast, *heavy], optimize_graph=False)
    try:
        wait(futures[: len(fast)], timeout=60)
    finally:  # those behind a heavy one would wait for ever
        are_done.set()
    patient_client.gather(futures)
    run_on = {key: workers[0] for key, workers in patient_client.who_has(futures).items()}
    heavy_on = {run_on[f"heavy-{i}"] for i in range(2)}
    assert len(heavy_on) == 2
    assert heavy_on.isdisjoint(run_on[f"fast-{i}"] for i in range(60))


@pytest.mark.parametrize(
    ("costs", "told"),
    [
        (["much", "long"], "'(much|long)', whose type"),
        ([-1.0, float("nan"), 10**400], "(-1.0|nan|1000.*), whose duration"),
        ([{"gup": 1}, {"cpu": 1, "gup": 1}], ".*'gup': 1}, whose kind of worker"),
        ([{"gpu": -1}], "{'gpu': -1}, whose duration"),
        ([None, 3, np.float32(0.5), {"cpu": 1}, {"gpu": 1}, {"cpu": 1, "gpu": None}], None),
    ],
    ids=["no numbers", "no durations", "no kinds of workers", "no duration on GPUs", "right ones"],
)
def test_an_annotation_that_is_no_duration_is_ignored_and_told_once(
    ferroflow_client: Client, costs: list[object], told: str | None
) -> None:
    messages = []
    ferroflow_client.subscribe_topic("warn", lambda event: messages.append(pickle.loads(event[1]["message"])))
    tasks = []
    for cost in costs:
        with dask.annotate(ferroflow_cost=cost):
            tasks += [dask.delayed(pause)(i, 0.0) for i in range(5)]
    futures = ferroflow_client.compute(tasks, optimize_graph=False)
    assert ferroflow_client.gather(futures) == [*range(5)] * len(costs)
    assert stealing_of(ferroflow_client).error is None
    # What is said of a task is on its way before its result is.
    assert len(messages) == (told is not None)
    if told is not None:
        must = "must be seconds from 0 to 1e+09, or a dict of them for 'cpu' and 'gpu'"
        assert re.search(
            rf"^ferroflow: ferroflow_cost of task 'pause-.*' {re.escape(must)}; got {told} is ignored$",
            messages[0],
        )


def test_a_misspelt_annotation_is_told_once(ferroflow_client: Client) -> None:
    messages = []
    ferroflow_client.subscribe_topic("warn", lambda event: messages.append(pickle.loads(event[1]["message"])))
    for _ in range(2):
        with dask.annotate(ferroflow_costs=0.1, cost=1):
            future = ferroflow_client.compute(dask.delayed(pause)(1, 0.0, pure=False))
        assert future.result() == 1
    assert messages == ["ferroflow: there is no annotation 'ferroflow_costs'; did you mean 'ferroflow_cost'?"]
