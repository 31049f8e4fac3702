"""What tests of searches share."""

from __future__ import annotations

import itertools

import numpy as np

from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.graph import Builder, Graph
from ferroflow_dask.search import Simulation
from ferroflow_dask.simulation import Machine
from ferroflow_dask.topology import Route


def machine(n: int = 4) -> Machine:
    """Return fast links, and little overhead: small graphs are worth splitting."""
    return Machine(
        (1,) * n, (1.0,) * n, (1e10,) * n, lambda _, to: Route((to,), 1e-7, 1e10), round_trip_s=1e-7
    )


#: Slow enough that small operators are worth splitting.
SLOW = AnalyticCost(flop_rate=1e8, memory_bandwidth=1e9)


def assert_equal(found: Simulation, full: Simulation) -> None:
    assert found.makespan_s == full.makespan_s
    assert found.starts_s == full.starts_s
    assert found.stops_s == full.stops_s
    assert found.nbytes_moved == full.nbytes_moved
    assert found.n_events == full.n_events
    assert found.at == full.at


def dense(*sizes: int, rows: int = 64) -> Graph:
    """Return dense layers without biases."""
    builder = Builder("dense")
    x = builder.input("x", np.float32, (rows, sizes[0]))
    for n_in, n_out in itertools.pairwise(sizes):
        x = builder.op("MatMul", x, builder.constant(np.zeros((n_in, n_out), np.float32)))
    builder.output(y=x)
    return builder.to_graph()
