"""`simulate`: jobs of graphs and collections, on topologies, by both engines."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import dask
import dask.array as da
import pytest
from distributed import Client

from ferroflow_dask import generate
from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.replay import Job, JobGraph, job_of_collection, job_of_graph, simulate, simulate_job
from ferroflow_dask.topology import Host, Link, Runtime, Topology, Worker, load_topology
from ferroflow_dask.virtual import VirtualTask

LINK = Link(0.0, 1e9)
FREE = Topology([Host("a", 64, (Worker(),) * 4, link=LINK, inside=LINK)], runtime=Runtime.without_costs())


def delayed_tree(n: int = 8) -> Any:
    leaves = [dask.delayed(abs, pure=False)(i, dask_key_name=("leaf", i)) for i in range(n)]
    return dask.delayed(sum)(leaves, dask_key_name="total")


def job(durations_s: list[float], **more: Any) -> Job:
    tasks = {("t", i): VirtualTask(seconds, core_share=0.0) for i, seconds in enumerate(durations_s)}
    return Job((JobGraph(tasks, tuple(tasks)),), **more)


@pytest.mark.parametrize("engine", ["exact", "light"])
@pytest.mark.parametrize("policy", ["dask", "ferroflow"])
def test_a_collection_takes_as_long_as_its_tasks(engine: str, policy: str) -> None:
    [found] = simulate(delayed_tree(), FREE, policy, durations_s={"leaf": 1.0, "total": 0.5}, engine=engine)
    assert found.makespan_s == pytest.approx(2.5)
    assert (found.workers, found.threads, found.bound_s) == (4, 4, pytest.approx(2.125))
    assert found.efficiency == pytest.approx(0.85)


def test_each_policy_has_each_number_of_workers() -> None:
    found = simulate(job([1.0] * 16), FREE, ["dask", "ferroflow"], workers=[1, 4, 16])
    assert [(one.policy, one.workers) for one in found] == [
        (policy, n) for policy in ("dask", "ferroflow") for n in (1, 4, 16)
    ]
    for one in found:
        assert one.makespan_s == pytest.approx(16 / one.workers)
        assert one.efficiency == pytest.approx(1.0)


def test_any_collection_can_be_simulated() -> None:
    x = da.ones((100, 100), chunks=(25, 25))
    found = job_of_collection((x @ x.T).sum(), durations_s=0.1, nbytes=5000)
    assert len(found.tasks) > 50
    [outcome] = simulate(found, FREE, "dask")
    assert outcome.executions == len(found.tasks)
    assert outcome.nbytes_moved > 0
    assert outcome.bound_s <= outcome.makespan_s


def test_durations_are_given_by_key_prefix_or_function() -> None:
    by_key = job_of_collection(delayed_tree(2), durations_s={("leaf", 1): 5.0, "leaf": 1.0, "total": 2.0})
    found = {key: task.duration_s for key, task in by_key.tasks.items()}
    assert found == {("leaf", 0): 1.0, ("leaf", 1): 5.0, "total": 2.0}
    assert list(found)[-1] == "total"  # in an order in which they can run
    by_function = job_of_collection(delayed_tree(2), durations_s=lambda key: 3.0 if key == "total" else 1.0)
    assert by_function.work_s == 5.0


def test_durations_are_learned_from_a_cluster(thread_client: Client) -> None:
    thread_client.compute(delayed_tree()).result()
    found = job_of_collection(delayed_tree(20), client=thread_client)
    assert len(found.tasks) == 21
    assert 0 < found.work_s < 60


def test_ops_have_estimated_durations_and_sleeping_ones_take_no_core() -> None:
    model = generate("imbalanced", n_heavy=2, heavy_ms=500.0, n_fast=10, fast_ms=1.0)
    found = job_of_graph(model.graph)
    assert found.work_s == pytest.approx(1.01, rel=0.01)
    slow = [task for task in found.tasks.values() if task.duration_s > 0]
    assert not any(task.core_share for task in slow)
    for policy in ("dask", "ferroflow"):
        [outcome] = simulate(model, "this-machine", policy)
        assert 0.5 <= outcome.makespan_s < 0.6  # short ops are not bundled with long ones


def test_graphs_that_wait_for_earlier_ones_are_sent_after_them() -> None:
    first = {"a": VirtualTask(1.0)}
    second = {"b": VirtualTask(1.0, ("a",))}
    third = {"c": VirtualTask(0.25)}
    graphs = (
        JobGraph(first, ("a",), delay_s=0.0),
        JobGraph(second, ("b",), waits=True, delay_s=0.5),
        JobGraph(third, ("c",), delay_s=0.125),
    )
    outcome = simulate_job(Job(graphs), FREE, "dask")
    spans = {one.key: (one.start_s, one.stop_s) for one in outcome.timeline}
    assert spans == {"a": (0.0, 1.0), "b": (1.5, 2.5), "c": (1.625, 1.875)}


def test_a_later_graph_reads_what_a_bundle_yields() -> None:
    many = {("t", i): VirtualTask(0.001) for i in range(200)}
    last = {"sum": VirtualTask(0.001, tuple(many))}
    graphs = (JobGraph(many, tuple(many), delay_s=0.0), JobGraph(last, ("sum",), waits=True, delay_s=0.0))
    [outcome] = simulate(Job(graphs), "this-machine", "ferroflow")
    assert outcome.executions < 50


def test_noise_gives_an_interval_and_a_seed_repeats_it() -> None:
    uneven = job([0.1 + 0.01 * i for i in range(30)])
    [one] = simulate(uneven, "this-machine", "dask", repeat=5, noise=0.2, seed=1)
    assert one.low_s < one.makespan_s < one.high_s
    assert [one] == simulate(uneven, "this-machine", "dask", repeat=5, noise=0.2, seed=1)
    assert [one] != simulate(uneven, "this-machine", "dask", repeat=5, noise=0.2, seed=2)


def test_the_noise_of_a_topology_is_the_default() -> None:
    base = load_topology("this-machine")
    for noise in (0.0, 0.3):
        topology = replace(base, runtime=replace(base.runtime, noise=noise))
        [one] = simulate(job([0.1] * 20), topology, "dask", repeat=3)
        assert [one] == simulate(job([0.1] * 20), base, "dask", repeat=3, noise=noise)
        assert (one.low_s < one.high_s) == (noise > 0)


PROGRAM = """
import logging; logging.disable()
import dask.array as da
from ferroflow_dask.replay import simulate
x = da.ones((600, 600), chunks=(100, 100))
y = (x @ x.T).sum()
for one in simulate(y, "narval", ["dask", "ferroflow"], workers=[2, 5], durations_s=0.003, repeat=2):
    print(one, one.timeline)
"""


def test_a_fresh_process_gives_the_same_to_the_bit() -> None:
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1
    assert "ferroflow" in found.pop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"policy": "dusk"}, "unknown policy of the exact engine 'dusk'", id="policy"),
        pytest.param({"policy": "ring", "engine": "light"}, "policy of the light engine", id="light policy"),
        pytest.param({"engine": "heavy"}, "unknown engine 'heavy'", id="engine"),
        pytest.param({"topology": "mars"}, "unknown topology 'mars'", id="topology"),
        pytest.param({"workers": 0}, "workers must be a whole number from 1", id="no workers"),
        pytest.param({"repeat": 0}, "repeat must be a whole number, at least 1", id="no repetition"),
        pytest.param({"noise": 2.0}, "noise must be a number from 0 to 1, got 2.0", id="noise"),
    ],
)
def test_wrong_arguments_get_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((UnknownNameError, UsageError), match=message):
        simulate(job([1.0]), **{"topology": FREE, **arguments})


@pytest.mark.parametrize(
    ("program", "message"),
    [
        pytest.param(3, "needs a Dask collection, a graph or a record, got int", id="a number"),
        pytest.param(delayed_tree(), "the duration of '(leaf|total)' must be known", id="no durations"),
    ],
)
def test_a_wrong_program_gets_one_line(program: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate(program, FREE)


def test_a_cycle_or_an_empty_job_gets_one_line() -> None:
    tasks = {"a": VirtualTask(1.0, ("b",)), "b": VirtualTask(1.0, ("a",))}
    with pytest.raises(UsageError, match="must not depend on each other in a cycle"):
        Job((JobGraph(tasks, ("a",)),)).bound_s(1)
    with pytest.raises(UsageError, match="a job must have a task"):
        Job(())
