"""Virtual clusters on topologies: shared cores, shared links, the costs of Dask, and bundles."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.simulation import Machine, TaskGraph, run_listed
from ferroflow_dask.topology import Host, Link, Runtime, Topology, Worker, load_topology
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.clock import VirtualTime
from ferroflow_dask.virtual.hosts import Cores, Process
from ferroflow_dask.virtual.network import SharedNetwork

NO_COSTS = Runtime.without_costs()


def run_all(time: VirtualTime) -> None:
    time.run(math.inf, 0.0, 100_000)


# Cores and processes


@pytest.mark.parametrize(
    ("n_cores", "starts", "ends"),
    [
        pytest.param(math.inf, [(0, 2), (0, 2), (0, 2)], [2, 2, 2], id="unlimited"),
        pytest.param(1, [(0, 1), (0, 1)], [2, 2], id="two share one core"),
        pytest.param(2, [(0, 1), (0, 1), (0, 1)], [1.5] * 3, id="three share two cores"),
        pytest.param(1, [(0, 2), (1, 0.5)], [2.5, 2], id="a short one comes later"),
        pytest.param(2, [(0, 2), (1, 0.5)], [2, 1.5], id="each has its core"),
        pytest.param(1, [(0, 1), (5, 1)], [1, 6], id="one after the other"),
    ],
)
def test_what_runs_on_a_host_shares_its_cores(
    n_cores: float, starts: list[tuple[float, float]], ends: list[float]
) -> None:
    time = VirtualTime()
    cores = Cores(time, n_cores)
    found: dict[int, float] = {}
    for at, (start, work_s) in enumerate(starts):
        time.at(start, cores.run, work_s, lambda at=at: found.setdefault(at, time.now))
    run_all(time)
    assert [found[at] for at in range(len(starts))] == ends


def test_a_process_does_one_thing_after_the_other_and_knows_its_load() -> None:
    time = VirtualTime()
    process = Process(time, Cores(time, 1))
    ended: list[float] = []
    for _ in range(3):
        process.run(0.5, lambda: ended.append(time.now))
    run_all(time)
    assert ended == [0.5, 1.0, 1.5]
    assert process.worked_s == 1.5
    assert process.load(time.now, window_s=2.0) == 0.0  # the window is not over
    time.now = 3.0
    assert process.load(3.0, window_s=2.0) == 0.5


# Links


def star(n: int, bandwidth: float = 100.0) -> Topology:
    """Return hosts with one worker each, connected to one switch."""
    hosts = [Host(f"h{at}", workers=(Worker(),), link=Link(0.0, bandwidth)) for at in range(n)]
    return Topology(hosts, runtime=NO_COSTS)


@pytest.mark.parametrize(
    ("transfers", "ends"),
    [
        pytest.param([(0, 1, 100, 0.0)], [1.0], id="alone"),
        pytest.param([(0, 1, 100, 0.0), (1, 0, 100, 0.0)], [1.0, 1.0], id="two directions"),
        pytest.param([(0, 1, 100, 0.0), (0, 2, 100, 0.0)], [2.0, 2.0], id="one source"),
        pytest.param([(0, 2, 100, 0.0), (1, 2, 50, 0.0)], [1.5, 1.0], id="one destination, then alone"),
        # The first two share the way out of 0: 50 each. The third has what is left of the way into 2.
        pytest.param(
            [(0, 1, 100, 0.0), (0, 2, 100, 0.0), (3, 2, 100, 0.0)], [2.0, 2.0, 2.0], id="a chain of links"
        ),
        pytest.param([(0, 1, 100, 0.0), (0, 2, 100, 0.5)], [1.5, 2.0], id="a second one comes later"),
    ],
)
def test_transfers_share_links(transfers: list[tuple[int, int, int, float]], ends: list[float]) -> None:
    time = VirtualTime()
    network = SharedNetwork(time, star(4))
    found: dict[int, float] = {}
    for at, (source, destination, nbytes, start) in enumerate(transfers):
        arrived = lambda at=at: found.setdefault(at, time.now)  # noqa: E731 -- as short as its use
        time.at(start, network.send, source, destination, nbytes, arrived)
    run_all(time)
    assert [found[at] for at in range(len(transfers))] == pytest.approx(ends)


def test_the_changes_of_an_instant_are_shared_once() -> None:
    time = VirtualTime()
    network = SharedNetwork(time, star(4))
    shared: list[float] = []
    fair_rates = network._fair_rates
    network._fair_rates = lambda ways: shared.append(time.now) or fair_rates(ways)  # type: ignore[method-assign, func-returns-value]
    ended: list[float] = []
    for _ in range(10):
        for source in (0, 1, 2):
            network.send(source, 3, 10, lambda: ended.append(time.now))
    run_all(time)
    assert ended == pytest.approx([3.0] * 30)
    assert shared == pytest.approx([0.0, 3.0])


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_shares_are_max_min_fair_and_no_byte_is_lost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = load_topology("two-sites")
    time, n = VirtualTime(), len(topology.workers)
    network = SharedNetwork(time, topology)
    arrived: list[int] = []
    for at in range(12):
        source, destination = (int(one) for one in rng.choice(n, 2, replace=False))
        nbytes = int(rng.integers(1, 10**9))
        time.at(0.0, network.send, source, destination, nbytes, lambda at=at: arrived.append(at))
    time.run(0.02, 0.0, 10_000)
    used = [sum(way.rate * len(way.ends) for way in ways) for ways in network._on]
    for way in {way for ways in network._on for way in ways}:
        assert all(used[link] <= topology.bandwidths[link] * (1 + 1e-9) for link in way.links)
        # It could only grow at the cost of one that is not faster.
        assert any(
            used[link] >= topology.bandwidths[link] * (1 - 1e-9)
            and way.rate >= max(other.rate for other in network._on[link]) * (1 - 1e-9)
            for link in way.links
        )
    run_all(time)
    assert sorted(arrived) == list(range(12))
    assert not any(network._on)


# Clusters


def wide(n: int, duration_s: float = 0.5, **more: Any) -> dict[Any, VirtualTask]:
    return {("t", i): VirtualTask(duration_s, **more) for i in range(n)}


def one_host(workers: int, cores: float, runtime: Runtime = NO_COSTS) -> Topology:
    host = Host("here", cores, (Worker(),) * workers, inside=Link(0.0, 1e9))
    return Topology([host], runtime=runtime)


def makespan_s(topology: Topology, graph: dict[Any, VirtualTask], **options: Any) -> float:
    cluster = VirtualCluster.on(topology, **options)
    cluster.submit(graph)
    cluster.run()
    cluster.check()
    return cluster.record.makespan_s


@pytest.mark.parametrize("policy", ["dask", "ferroflow"])
def test_tasks_that_compute_share_cores_and_tasks_that_sleep_do_not(policy: str) -> None:
    topology = one_host(4, 2)
    computing = makespan_s(topology, wide(8), policy=policy, without=["bundles"])
    sleeping = makespan_s(topology, wide(8, core_share=0.0), policy=policy, without=["bundles"])
    assert (computing, sleeping) == (pytest.approx(2.0), pytest.approx(1.0))


@pytest.mark.parametrize(
    ("costs", "least_s"),
    [
        pytest.param({"submit_s": 3.0}, 3.0, id="submission"),
        pytest.param({"client_task_s": 0.25}, 25.0, id="client"),
        pytest.param({"graph_task_s": 0.25}, 25.0, id="graph"),
        pytest.param({"message_s": {"task-finished": 0.25}}, 25.0, id="messages"),
        pytest.param({"worker_task_s": 2.0}, 50.0, id="workers"),
    ],
)
def test_each_cost_of_dask_takes_its_time(costs: dict[str, Any], least_s: float) -> None:
    topology = one_host(4, 100, replace(NO_COSTS, **costs))
    found = makespan_s(topology, wide(100, 0.001, core_share=0.0), policy="dask")
    assert least_s <= found <= 1.1 * least_s + 1


def test_a_fetch_costs_its_time() -> None:
    graph = {"a": VirtualTask(1.0, annotations={"workers": [0]}, nbytes=1)}
    graph["b"] = VirtualTask(1.0, ("a",), annotations={"workers": [1]})
    topology = one_host(2, 2, replace(NO_COSTS, fetch_s=0.5))
    assert makespan_s(topology, graph, policy="dask") == pytest.approx(2.5)


def test_short_tasks_are_bundled_for_our_policies_only() -> None:
    def n_executions(graph: dict[Any, VirtualTask], policy: str, **options: Any) -> int:
        cluster = VirtualCluster.on(load_topology("this-machine"), policy=policy, **options)
        cluster.submit(graph)
        cluster.run()
        cluster.check()
        worked_s = sum(one.stop - one.start for one in cluster.record.executions)
        assert worked_s >= 0.4 * (1 - 1e-9)
        return len(cluster.record.executions)

    wanted = wide(400, 0.001)
    summed = wanted | {"sum": VirtualTask(0.001, tuple(wanted))}
    assert n_executions(summed, "dask") == n_executions(summed, "ferroflow", without=["bundles"]) == 401
    assert n_executions(summed, "ferroflow") < 60
    assert n_executions(wanted, "ferroflow") < 60  # a client wants each result


def test_a_topology_says_which_workers_there_are() -> None:
    cluster = VirtualCluster.on(load_topology("edge"))
    assert [worker.speed for worker in cluster.workers] == [10.0, 4.0, 4.0] + [1.0] * 6
    assert [ws.nthreads for ws in cluster.scheduler.workers.values()] == [4, 2, 2] + [1] * 6
    with pytest.raises(UsageError, match="build the cluster on a larger topology"):
        cluster.join()


@pytest.mark.parametrize("n_workers", [1, 3, 8])
def test_both_engines_agree_where_their_models_do(n_workers: int) -> None:
    topology = one_host(n_workers, math.inf)
    durations_s = [1.0] * 24
    light = run_listed(TaskGraph(durations_s, [{}] * 24), Machine.of_topology(topology))
    exact = makespan_s(topology, wide(24, 1.0), without=["bundles"])
    assert exact == pytest.approx(light.makespan_s)
