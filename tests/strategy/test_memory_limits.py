"""Strategies for workers whose memory holds only a part of the weights."""

from __future__ import annotations

import os

import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster

from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.exceptions import StrategyError
from ferroflow_dask.graph import Builder, Graph
from ferroflow_dask.model import Model
from ferroflow_dask.search import Problem, search
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy.report import describe
from ferroflow_dask.topology import Topology
from ferroflow_dask.topology.parts import Host, Worker

MIB = 2**20
#: A worker process without weights [B].
_PROCESS = 200 * MIB


def layers(n: int, size: int) -> Graph:
    """Return dense layers."""
    rng = np.random.default_rng(0)
    b = Builder("layers")
    x = b.input("x", np.float32, (2, size))
    for _ in range(n):
        weight = rng.standard_normal((size, size), dtype=np.float32) / np.float32(np.sqrt(size))
        x = b.op("Relu", b.op("MatMul", x, b.constant(weight)))
    b.output(y=x)
    return b.to_graph()


def limited(n: int, nbytes: int) -> Topology:
    """Return workers with a memory limit."""
    return Topology([Host("machine", 4, (Worker(memory_nbytes=nbytes),) * n)])


def test_a_search_keeps_the_weights_within_the_limits() -> None:
    graph = layers(4, 256)  # 1 MiB
    free = Problem(graph, Machine.of_topology(limited(2, 0)), AnalyticCost())
    assert len({w for one in search(free, steps=200).best.choices for w in one.workers}) == 1
    tight = Problem(graph, Machine.of_topology(limited(2, 2 * MIB)), AnalyticCost())
    found = search(tight, steps=200)
    assert found.best.excess_nbytes == 0
    assert found.baselines["one device"].excess_nbytes == 4 * 256 * 256 * 4 - int(0.3 * 2 * MIB)
    held = describe(graph, tight.strategy(found.best.choices)).weight_nbytes
    assert max(held.values()) <= 0.6 * MIB
    small = Problem(graph, Machine.of_topology(limited(2, MIB)), AnalyticCost())
    with pytest.raises(
        StrategyError, match=r"no strategy was found whose weights fit: .* use more workers, or"
    ):
        search(small, steps=200)


@pytest.mark.cluster
@pytest.mark.slow  # a gigabyte
def test_weights_that_exceed_the_limit_of_a_worker_run_in_parts() -> None:
    limit, n_workers = 1000 * MIB, 5
    graph = layers(64, 2048)
    weights = sum(spec.nbytes or 0 for spec in map(graph.spec, graph.constants))
    assert weights > limit
    problem = Problem(graph, Machine.of_topology(limited(n_workers, limit - _PROCESS)), AnalyticCost())
    strategy = problem.strategy(search(problem, steps=300).best.choices)
    held = describe(graph, strategy).weight_nbytes
    assert max(held.values()) <= 0.3 * (limit - _PROCESS)
    x = np.random.default_rng(1).standard_normal((2, 2048), dtype=np.float32)
    expected = Model(graph).evaluate(x=x)["y"]
    with (
        LocalCluster(
            n_workers=n_workers, threads_per_worker=1, memory_limit=limit, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        before = client.run(os.getpid)
        model = Model(graph).scatter(client, strategy)
        for _ in range(2):
            found = client.compute(model.bind(x=x)).result()["y"]
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
        assert client.run(os.getpid) == before  # none was restarted for its memory
        used = client.run(lambda: psutil.Process().memory_info().rss)
        print(
            {address: f"{nbytes / MIB:.0f} MiB" for address, nbytes in used.items()},
            f"limit {limit / MIB:.0f}",
        )
