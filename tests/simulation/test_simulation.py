"""The light engine: equal to a slow simulator, and what must hold on any timeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_simulator import slow_timeline

from ferroflow_dask import ClusterProfile
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.simulation import Machine, TaskGraph, Timeline, run_listed, run_placed
from ferroflow_dask.topology import Group, Host, Link, Runtime, Topology, Worker, load_topology


def random_graph(rng: np.random.Generator, most: int = 25) -> TaskGraph:
    """Return a graph with many ties: durations and sizes are of few values."""
    n = int(rng.integers(1, most))
    durations_s = rng.choice([0.0, 0.5, 1.0, 1.5, rng.random()], n).tolist()
    inputs = []
    for task in range(n):
        needed = rng.choice(task, size=min(task, int(rng.integers(0, 4))), replace=False) if task else []
        inputs.append({int(j): int(rng.choice([0, 100, 1000])) for j in needed})
    sizes: dict[int, int] = {}
    for needed in inputs:
        needed.update({j: sizes.setdefault(j, nbytes) for j, nbytes in needed.items()})
    return TaskGraph(durations_s, inputs)


def random_topology(rng: np.random.Generator) -> Topology:
    def link() -> Link:
        return Link(float(rng.choice([0.0, 0.125])), float(rng.choice([500.0, 1000.0])))

    def workers() -> tuple[Worker, ...]:
        each = int(rng.integers(1, 4))
        return tuple(
            Worker(int(rng.integers(1, 3)), speed=float(rng.choice([1.0, 2.0]))) for _ in range(each)
        )

    n_racks = int(rng.integers(1, 4))
    hosts = [
        Host(f"h{at}", workers=workers(), rack=f"r{at % n_racks}", link=link(), inside=link())
        for at in range(int(rng.integers(n_racks, 6)))
    ]
    racks = [Group(f"r{at}", "s" if rng.random() < 0.5 else "", link()) for at in range(n_racks)]
    return Topology(hosts, racks, [Group("s", link=link())], runtime=Runtime.without_costs())


@pytest.mark.parametrize("seed", range(10))
def test_the_timelines_of_100_random_graphs_are_those_of_the_slow_simulator(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_transfers = 0
    for _ in range(100):
        graph, topology = random_graph(rng), random_topology(rng)
        n_workers = len(topology.workers)
        placement = rng.integers(0, n_workers, len(graph.durations_s)).tolist()
        timeline = run_placed(graph, Machine.of_topology(topology), placement)
        tasks, transfers = slow_timeline(graph.durations_s, graph.inputs, topology, placement)
        spans = zip(timeline.starts_s, timeline.stops_s, strict=True)
        assert dict(enumerate(spans)) == tasks
        assert {(t.task, t.destination): (t.start_s, t.stop_s) for t in timeline.transfers} == transfers
        n_transfers += len(transfers)
    assert n_transfers > 500


def check(graph: TaskGraph, topology: Topology, timeline: Timeline) -> None:
    """Assert what holds on any timeline."""
    workers, hosts = topology.workers, topology.host_of
    arrived = {(t.task, t.destination): t for t in timeline.transfers}
    assert len(arrived) == len(timeline.transfers)  # a worker fetches a result once
    for task, needed in enumerate(graph.inputs):
        here = timeline.workers[task]
        for earlier in needed:
            if timeline.workers[earlier] == here:
                assert timeline.stops_s[earlier] <= timeline.starts_s[task]
            else:
                transfer = arrived[earlier, here]
                assert timeline.stops_s[earlier] <= transfer.start_s
                assert transfer.stop_s <= timeline.starts_s[task]
    for worker, spec in enumerate(workers):
        own = [task for task, place in enumerate(timeline.workers) if place == worker]
        edges = [(timeline.starts_s[task], 1) for task in own] + [
            (timeline.stops_s[task], -1) for task in own
        ]
        running = 0
        for _, change in sorted(edges):
            running += change
            assert running <= spec.threads
    for link, bandwidth in enumerate(topology.bandwidths):
        used = [
            (t.start_s, t.start_s + t.nbytes / bandwidth)
            for t in timeline.transfers
            if t.nbytes and link in topology.route(hosts[t.source], hosts[t.destination]).links
        ]
        assert all(stop <= start for (_, stop), (start, _) in pairwise(sorted(used)))
    needed_nbytes = {
        (earlier, timeline.workers[task]): nbytes
        for task, needed in enumerate(graph.inputs)
        for earlier, nbytes in needed.items()
        if timeline.workers[earlier] != timeline.workers[task]
    }
    assert timeline.nbytes_moved == sum(needed_nbytes.values())
    fastest = max(worker.speed for worker in workers)
    n_threads = sum(worker.threads for worker in workers)
    assert timeline.makespan_s >= graph.bound_s(n_threads, fastest) * (1 - 1e-12)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), has_costs=st.booleans())
def test_no_timeline_breaks_a_rule(seed: int, has_costs: bool) -> None:
    rng = np.random.default_rng(seed)
    graph, topology = random_graph(rng), random_topology(rng)
    if has_costs:
        topology = replace(topology, runtime=Runtime())
    machine = Machine.of_topology(topology)
    placement = rng.integers(0, len(topology.workers), len(graph.durations_s)).tolist()
    for timeline in (run_placed(graph, machine, placement), run_listed(graph, machine)):
        check(graph, topology, timeline)


def test_a_list_schedule_uses_fast_workers_and_keeps_large_inputs_where_they_are() -> None:
    edge = Machine.of_topology(load_topology("edge"))
    wide = run_listed(TaskGraph([1.0] * 40, [{}] * 40), edge)
    assert wide.workers.count(0) > 20  # the server is as fast as all others together
    chain = run_listed(TaskGraph([1.0, 1.0, 1.0], [{}, {0: 10**9}, {1: 10**9}]), edge)
    assert len(set(chain.workers)) == 1


def test_the_scheduler_limits_short_tasks() -> None:
    machine = Machine.of_profile(ClusterProfile((1,) * 8, task_s=0.5, submit_s=1.0))
    timeline = run_listed(TaskGraph([0.01] * 100, [{}] * 100), machine)
    assert timeline.makespan_s == pytest.approx(1.0 + 100 * 0.5 + 0.01)
    assert timeline.scheduler_s == 50.0


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        pytest.param([0], "a worker for each of 2 tasks, got 1", id="too short"),
        pytest.param([0, 9], "the worker of task 1 must be one of 0 to 1, got 9", id="unknown worker"),
    ],
)
def test_a_wrong_placement_gets_one_line(placement: list[int], message: str) -> None:
    machine = Machine.of_profile(ClusterProfile((1, 1)))
    with pytest.raises(UsageError, match=message):
        run_placed(TaskGraph([1.0, 1.0], [{}, {}]), machine, placement)
