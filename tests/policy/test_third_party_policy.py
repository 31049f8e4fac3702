"""A package of somebody else brings a policy along, by an entry point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import dask
import pytest
from click.testing import CliRunner
from cluster_tests import runs_on
from distributed import Client
from in_charge import stealing_of, workers_of
from one_loop import Cluster, on_cluster

from ferroflow_dask import explain, install, uninstall
from ferroflow_dask.annotations import RANK_ANNOTATION
from ferroflow_dask.cli import main
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.policy import ClusterView, Policy, make_policy, policy_names
from ferroflow_dask.policy.events import Event, GraphArrived, TaskReady, WorkerIdle
from ferroflow_dask.policy.instructions import AssignTask, Instruction, StealTask
from ferroflow_dask.scheduler import installed
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.scheduler.steal_exchange import exchange

MODULE = '''
from ferroflow_dask.policy import Policy
from ferroflow_dask.policy.events import TaskReady
from ferroflow_dask.policy.instructions import AssignTask


class LastWorkerPolicy(Policy):
    """Give all tasks to the worker that joined last."""

    places_queued = True

    def __init__(self, label="none"):
        self.label = label

    def handle(self, event, view, now):
        if isinstance(event, TaskReady):
            workers = [worker for worker in view.running if event.task.may_run_on(worker.key)]
            if workers:
                yield AssignTask(event.task.key, workers[-1].key, f"the last; {self.label}")


class Lookalike:
    """Has the method of a policy, and is none."""

    def handle(self, event, view, now):
        return iter(())


def make():
    return LastWorkerPolicy()
'''


class Careless(Policy):
    """A policy that does not ask where tasks may run."""

    places_queued = True

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        match event:
            case GraphArrived(tasks):
                for task in tasks:
                    yield AssignTask(task.key, view.running[-1].key, "at its arrival")
            case TaskReady(task):
                yield AssignTask(task.key, view.running[-1].key, "as it was ready")
            case WorkerIdle(thief):
                for victim in view.crowded_from_most_loaded():
                    yield StealTask(victim.last_waiting.key, victim.key, thief, "as it waits")


class Hasty(Policy):
    """A policy that places all tasks on the worker that joined last, and steals as soon as one is ready."""

    places_queued = True

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        if isinstance(event, TaskReady):
            yield AssignTask(event.task.key, view.running[-1].key, "it joined last")
            waiting = list(view.running[-1].waiting_from_last())
            for task in waiting[1:2]:  # the last one is the task that is placed now
                yield StealTask(task.key, view.running[-1].key, view.running[0].key, "as it waits")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package, as pip would have installed it."""
    (tmp_path / "somebodys_policies.py").write_text(MODULE)
    metadata = tmp_path / "somebodys_policies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-policies\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[ferroflow_dask.policies]\n"
        "last = somebodys_policies:LastWorkerPolicy\n"
        "missing = somebodys_other_policies:Policy\n"
        "lookalike = somebodys_policies:Lookalike\n"
        "function = somebodys_policies:make\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return pytest.importorskip("somebodys_policies")


def test_it_is_listed_and_made_if_it_is_a_subclass_of_policy(package: ModuleType) -> None:
    assert {"last", "missing"} <= set(policy_names())
    policy = make_policy("last", label="mine")
    assert isinstance(policy, package.LastWorkerPolicy)
    with pytest.raises(UsageError, match="options of policy 'last' must be among: label; got 'seed'"):
        make_policy("last", seed=1)
    with pytest.raises(UsageError, match="imported from somebodys_other_policies:Policy: No module"):
        make_policy("missing")
    for name, got in (("lookalike", "<class .*Lookalike'>"), ("function", "<function make at .*>")):
        told = rf"^policy '{name}' must be a subclass of ferroflow_dask\.policy\.Policy, got {got}$"
        with pytest.raises(UsageError, match=told):
            make_policy(name)


@pytest.mark.cluster
@pytest.mark.parametrize("more", [{}, {"ferroflow_cost": 0.02, RANK_ANNOTATION: 1.0}], ids=["", "ranked"])
@runs_on(on_cluster, plugin=False)
async def test_none_can_break_restrictions(cluster: Cluster, more: dict[str, Any]) -> None:
    await exchange(cluster.scheduler, lambda scheduler: FerroflowStealing(scheduler, Careless()))
    # Of those that are there before it, the view has them by address.
    theirs, other = sorted(cluster.workers, key=lambda worker: worker.address)
    first, name = theirs.address, str(theirs.name)
    with dask.annotate(**more):
        futures = cluster.map(10, workers=[first])
    await cluster.client.gather(futures)
    decisions = cluster.stealing.decisions
    assert {future.key for future in futures} <= set(theirs.data)
    assert not set(other.data)
    for future in futures:
        told = [(one.what, one.worker) for one in decisions.about(future.key) if one.what == "placed"]
        assert told == [("placed", name)]
    declined = {decision.what for decision in decisions.last(1000) if decision.worker != name}
    assert declined == {"placement declined", "steal declined"}
    assert cluster.stealing.steals["asked"] == 0
    assert cluster.stealing.error is None


@pytest.mark.cluster
@runs_on(on_cluster, plugin=False)
async def test_steals_in_answer_to_a_ready_task_are_events_too(cluster: Cluster) -> None:
    await exchange(cluster.scheduler, lambda scheduler: FerroflowStealing(scheduler, Hasty()))
    await cluster.client.gather(cluster.map(10))
    events = [message for _, message in cluster.scheduler.get_events("stealing")]
    requests = [request for kind, *rest in events if kind == "request" for request in rest[0]]
    assert len(requests) == cluster.stealing.steals["asked"] > 0


@pytest.mark.cluster
def test_it_schedules_a_cluster(package: ModuleType, thread_client: Client) -> None:
    install(thread_client, "last", label="ours")
    assert installed(thread_client).policy == "last"
    assert thread_client.gather(thread_client.map(lambda i: i + 1, range(30))) == list(range(1, 31))
    (future,) = thread_client.map(str, ["told"])
    assert future.result() == "told"
    placed = explain(thread_client, future.key)
    assert [(decision.what, decision.reason) for decision in placed] == [("placed", "the last; ours")]
    assert stealing_of(thread_client).error is None
    last = workers_of(thread_client)[-1]
    assert list(thread_client.who_has([future])[future.key]) == [last.address]
    assert placed[0].worker == str(last.name)
    uninstall(thread_client)


@pytest.mark.cluster
def test_the_command_line_takes_it(package: ModuleType) -> None:
    shown = CliRunner().invoke(
        main, ["run", "--dag", "wide", "--policy", "last", "--workers", "2", "--no-processes"]
    )
    assert shown.exit_code == 0, shown.output
    assert "last" in shown.output
