"""Strategies for workers whose memory holds only a part of the weights."""

from __future__ import annotations

import numpy as np
import pytest

from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.exceptions import StrategyError
from ferroflow_dask.graph import Builder, Graph
from ferroflow_dask.search import Problem, search
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy.report import describe
from ferroflow_dask.topology import Topology
from ferroflow_dask.topology.parts import Host, Worker

MIB = 2**20


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
    tight = Problem(graph, Machine.of_topology(limited(2, MIB)), AnalyticCost())
    found = search(tight, steps=200)
    assert found.best.excess_nbytes == 0
    assert found.baselines["one device"].excess_nbytes == 4 * 256 * 256 * 4 - int(0.6 * MIB)
    held = describe(graph, tight.strategy(found.best.choices)).weight_nbytes
    assert max(held.values()) <= 0.6 * MIB
    small = Problem(graph, Machine.of_topology(limited(2, MIB // 2)), AnalyticCost())
    with pytest.raises(
        StrategyError, match=r"no strategy was found whose weights fit: .* use more workers, or"
    ):
        search(small, steps=200)
