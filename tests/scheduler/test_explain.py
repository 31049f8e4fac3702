"""Why a task is where it is: in Python and on the command line."""

from __future__ import annotations

import re

import pytest
from cluster_tests import runs_on
from command_line import USAGE, answer, assert_one_line, ferroflow
from distributed import Client
from in_charge import stealing_of
from one_loop import Cluster, on_cluster
from waiting import pause

from ferroflow_dask import explain, install
from ferroflow_dask.clients import workers_of
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.scheduler.decisions import DecisionLog

pytestmark = pytest.mark.cluster


def names_of(client: Client) -> set[str]:
    return {str(worker["name"]) for worker in workers_of(client).values()}


def test_a_task_has_its_story_and_a_worker_its_name_in_it_even_after_it_has_left(
    thread_client: Client,
) -> None:
    install(thread_client)
    names, first = names_of(thread_client), min(workers_of(thread_client))
    preference = {"workers": [first], "allow_other_workers": True}
    futures = thread_client.map(pause, range(20), seconds=0.05, pure=False, key="pause", **preference)
    thread_client.gather(futures)
    holders = thread_client.who_has(futures)
    stolen = next(future for future in futures if first not in holders[future.key])
    story = explain(thread_client, stolen.key)
    assert explain(thread_client, stolen) == story
    assert story[0].what == "placed"
    assert "steal confirmed" in [decision.what for decision in story]
    assert all(decision.reason for decision in story)
    assert [decision.time for decision in story] == sorted(decision.time for decision in story)
    decisions = stealing_of(thread_client).decisions.last(1000)
    assert {one.worker for one in decisions} == names
    assert not [one.reason for one in decisions if "://" in one.reason]
    gave_up = {one.reason for one in decisions if one.what == "steal confirmed"}
    assert gave_up <= {f"{name} gave it up" for name in names}
    thread_client.retire_workers(sorted(workers_of(thread_client))[1:])
    assert stealing_of(thread_client).decisions.last(1000)[: len(decisions)] == decisions


def test_the_command_tells_it(thread_client: Client) -> None:
    install(thread_client)
    thread_client.submit(pause, 1, 0.0, key="lonely", workers=list(thread_client.nthreads())).result()
    told = answer("explain", "lonely", "--connect", thread_client.scheduler.address).stdout
    parts = r"finishes in \S+ s \(queue 0, transfer 0, run \S+\), first of \d+; next best (\S+) in \S+ s"
    line = re.fullmatch(rf" *\+0\.000 s · placed · (\S+) · {parts}\n", told)
    assert line is not None
    assert len(set(line.groups()) & names_of(thread_client)) == 2


@runs_on(on_cluster)
async def test_a_declined_steal_tells_both_workers(cluster: Cluster) -> None:
    victim, thief = (worker.address for worker in cluster.workers)
    names = {worker.address: str(worker.name) for worker in cluster.workers}
    name = names[thief]
    first, *_, last = cluster.map(3, 0.2, workers=[victim])
    await cluster.processing(last)
    cluster.stealing.parts.idle_workers.steal_for(thief)
    story = await explain(cluster.client, last.key)
    declined = [decision for decision in story if decision.what == "steal declined"]
    assert {(decision.worker, decision.reason) for decision in declined} == {
        (name, f"from {names[victim]}: no task there may move here, and is long enough")
    }
    assert await first == 0


def test_what_cannot_be_told_is_said(thread_client: Client) -> None:
    with pytest.raises(ClusterError, match="explain needs the plugin"):
        explain(thread_client, "x")
    install(thread_client)
    with pytest.raises(UsageError, match="key must be that of a recent task, got 'x'"):
        explain(thread_client, "x")
    refused = ferroflow("explain", "x", "--connect", thread_client.scheduler.address)
    assert_one_line(refused.exit_code, refused.stderr, USAGE, "key must be that of a recent task, got 'x'")


def test_the_decisions_are_bounded() -> None:
    times = iter([0.0, 1.0, 2.0])
    decisions = DecisionLog(lambda: next(times), kept=2)
    for i in range(3):
        decisions.note(("a", i), "placed", "w0", "of course")
    assert not list(decisions.about(str(("a", 0))))
    assert [decision.time for decision in decisions.about("('a', 2)")] == [2.0]
