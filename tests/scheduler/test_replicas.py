"""Dask's active memory manager leaves placed weights on all workers while the plugin is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed import Client
from waiting import soon

from ferroflow_dask import Model, install, uninstall
from ferroflow_dask.graph import Builder, Graph
from ferroflow_dask.lowering import scatter

pytestmark = pytest.mark.cluster


def layer() -> Graph:
    builder = Builder("layer")
    weights = builder.constant(np.arange(4096.0).reshape(64, 64), name="weights")
    builder.output(y=builder.op("MatMul", builder.input("x", "float64", (1, 64)), weights))
    return builder.to_graph()


def n_copies(client: Client, key: str) -> int:
    """Let the active memory manager look for copies that nobody needs, and return how many there are."""

    def look(dask_scheduler: Any) -> int:
        dask_scheduler.extensions["amm"].run_once()
        ts = dask_scheduler.tasks.get(key)
        return 0 if ts is None else len(ts.who_has)

    return int(client.run_on_scheduler(look))


def test_placed_values_stay_on_all_workers_until_the_plugin_goes(process_client: Client) -> None:
    install(process_client)
    graph = scatter(layer(), process_client)
    (key,) = (source.value.key for source in graph.sources if source.is_scattered)
    other = process_client.scatter(1, broadcast=True)  # of others' values one copy stays, as ever
    assert soon(lambda: n_copies(process_client, other.key) == 1, 30)
    assert n_copies(process_client, key) == 2
    result = process_client.compute(Model(graph).bind(x=np.ones((1, 64)))).result()["y"]
    np.testing.assert_array_equal(result, layer().constants["weights"].sum(axis=0, keepdims=True))
    uninstall(process_client)
    assert soon(lambda: n_copies(process_client, key) == 1, 30)
    del graph
    assert soon(lambda: n_copies(process_client, key) == 0, 30)
