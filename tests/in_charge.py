"""Clusters on which the policy is in charge, and proof that it was."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import pytest
from distributed import Client, Event, LocalCluster, Scheduler, SpecCluster, Worker
from distributed.stealing import WorkStealing
from waiting import pause, until

from ferroflow_dask import install, uninstall
from ferroflow_dask.policy import ClusterView, StealingPolicy
from ferroflow_dask.policy import events as happened
from ferroflow_dask.policy.instructions import Instruction
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.scheduler.graphs.worker_runs import DELIVERED


def scheduler_of(client: Client) -> Any:
    return client.cluster.scheduler


def stealing_of(client: Client) -> Any:
    return scheduler_of(client).extensions["stealing"]


def feature(stealing: Any, name: str) -> Any:
    """Return an installed feature, by its name."""
    (found,) = [one for one in stealing.features if one.name == name]
    return found


def workers_of(client: Client) -> list[Any]:
    """Return the worker objects, in the order of their names."""
    return [worker for _, worker in sorted(client.cluster.workers.items())]


def pinned(client: Client, n: int, **options: Any) -> list[Any]:
    """Submit tasks that prefer the first worker, so that only stealing can spread them."""
    first = workers_of(client)[0].address
    return client.map(pause, range(n), workers=[first], allow_other_workers=True, pure=False, **options)


def run_stolen(client: Client, n: int) -> None:
    """Run a root and tasks that read it; they prefer its worker and are stolen."""

    def load(is_all_known: Event) -> int:
        is_all_known.wait()
        return 1

    def work(_: int, i: int) -> int:
        time.sleep(0.2 if i % 4 == 0 else 0.02)
        return i

    # Or the root could end before the others come: then they would be a graph of their own.
    is_all_known = Event(client=client)
    first = [next(iter(client.nthreads()))]
    root = client.submit(load, is_all_known, pure=False, workers=first)
    futures = client.map(work, [root] * n, range(n), pure=False, workers=first, allow_other_workers=True)
    until(lambda: all(future.key in client.cluster.scheduler.tasks for future in futures))
    is_all_known.set()
    assert client.gather(futures) == list(range(n))


@contextmanager
def served(n_workers: int, *, set_as_default: bool = False, **options: Any) -> Iterator[Client]:
    """Start workers with one thread, in this process by default; the scheduler has pages."""
    usual: dict[str, Any] = {"threads_per_worker": 1, "processes": False, "silence_logs": logging.ERROR}
    usual["dashboard_address"] = "127.0.0.1:0"
    with (
        LocalCluster(n_workers=n_workers, **{**usual, **options}) as cluster,
        Client(cluster, set_as_default=set_as_default) as client,
    ):
        yield client


@contextmanager
def in_charge(client: Client) -> Iterator[list[happened.Event]]:
    """Let the policy schedule a cluster; assert that it did, and that all accounts are at zero after."""
    events: list[happened.Event] = []
    handle = StealingPolicy.handle

    def listening(
        self: StealingPolicy, event: happened.Event, view: ClusterView, now: float
    ) -> Iterator[Instruction]:
        events.append(event)
        return handle(self, event, view, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StealingPolicy, "handle", listening)
        patch.setattr(StealingPolicy, "ignores", frozenset())
        install(client)
        yield events
        scheduler, stealing = scheduler_of(client), stealing_of(client)
        assert type(stealing) is FerroflowStealing
        assert stealing.error is None
        # A client that has a delivered result may release it, and so its bundle, before that ends.
        is_delivered = any(transition.stimulus_id == DELIVERED for transition in scheduler.transition_log)
        assert is_delivered or any(isinstance(event, happened.TaskFinished) for event in events)
        until(lambda: not any(ws.processing for ws in scheduler.workers.values()))
        until(lambda: not stealing.in_flight)
        client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.validate_state())
        until(lambda: not any(stealing.parts.kept().values()))  # the client may still release results
        assert {amount for ws in scheduler.workers.values() for amount in ws.used_resources.values()} <= {0}
        occupancies = [ws.occupancy for ws in scheduler.workers.values()]
        assert occupancies == pytest.approx([0] * len(occupancies))
        uninstall(client)


@contextmanager
def cluster_of(*workers: dict[str, Any], config: dict[str, Any] | None = None) -> Iterator[Client]:
    """Start workers with these options in this process, with the policy in charge of them."""
    checked = {"distributed.scheduler.validate": True, "distributed.worker.validate": True}
    usual = {"nthreads": 1, "dashboard": False, "memory_limit": 0}
    specs = {i: {"cls": Worker, "options": {**usual, **options}} for i, options in enumerate(workers)}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": ":0"}}
    with (
        dask.config.set({**checked, **(config or {})}),
        SpecCluster(workers=specs, scheduler=scheduler, silence_logs=logging.ERROR) as cluster,
        Client(cluster) as client,
        in_charge(client),
    ):
        yield client


def assert_stock(client: Client) -> None:
    scheduler = scheduler_of(client)
    assert type(stealing_of(client)) is WorkStealing
    assert scheduler.stream_handlers["steal-response"].__self__ is stealing_of(client)
    assert "stealing" in scheduler.periodic_callbacks
    assert "is_rootish" not in vars(scheduler)
    assert "decide_worker_non_rootish" not in vars(scheduler)
    assert "ferroflow" not in scheduler.plugins
    assert sum(isinstance(plugin, WorkStealing) for plugin in scheduler.plugins.values()) == 1
