"""Graphs with bound inputs are Dask collections like others, and placed constants stay on all workers."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client
from waiting import soon

from ferroflow_dask import GraphBuilder, Model, install, uninstall
from ferroflow_dask.exceptions import BindError

X = np.float32([1, 2])


def sums() -> Model:
    builder = GraphBuilder("sums")
    x = builder.input("x", "float32", (2,))
    seven = builder.constant(np.float32([7]), "seven")
    builder.output(twice=builder.op("Add", x, x), more=builder.op("Add", x, seven))
    return builder.build()


def test_collections_of_some_outputs_are_not_one() -> None:
    bound = sums().bind(x=X)
    parts = [bound.only("twice"), bound.only("more")]
    for found in (dask.compute(*parts, scheduler="sync"), [one.compute() for one in dask.persist(*parts)]):
        np.testing.assert_equal(list(found), [{"twice": [2, 4]}, {"more": [8, 9]}])


def test_annotations_of_the_context_are_those_of_all_tasks() -> None:
    with dask.annotate(retries=3, ferroflow_cost=7.0):
        bound = sums().bind(x=X)
    sources, ops = bound.__dask_graph__().layers.values()
    assert sources.annotations["retries"] == ops.annotations["retries"] == 3
    assert callable(ops.annotations["ferroflow_cost"])  # what is known of each op says more


@pytest.mark.cluster
def test_placed_constants_live_as_long_as_what_reads_them(thread_client: Client) -> None:
    first = dask.delayed(lambda outputs: outputs["more"])(sums().scatter(thread_client).bind(x=X))
    gc.collect()
    np.testing.assert_equal(thread_client.compute(first).result(), [8, 9])


@pytest.mark.parametrize("is_enabled", [True, False], ids=["at work", "at rest"])
@pytest.mark.parametrize("inputs", [{"x": X}, {}], ids=["bound", "refused"])
def test_the_collector_of_garbage_is_left_as_it_was(is_enabled: bool, inputs: dict[str, Any]) -> None:
    refusal = nullcontext() if inputs else pytest.raises(BindError)
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with refusal:
            sums().bind(inputs)
        found = gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert found == is_enabled


# Placed constants


def n_copies(client: Client, key: str) -> int:
    """Let the active memory manager look for copies that nobody needs, and return how many there are."""

    def look(dask_scheduler: Any) -> int:
        dask_scheduler.extensions["amm"].run_once()
        ts = dask_scheduler.tasks.get(key)
        return 0 if ts is None else len(ts.who_has)

    return int(client.run_on_scheduler(look))


def test_placed_values_stay_on_all_workers_until_the_plugin_goes(process_client: Client) -> None:
    install(process_client)
    model = sums().scatter(process_client)
    (key,) = (source.value.key for source in model.graph.sources if source.is_scattered)
    other = process_client.scatter(1, broadcast=True)  # of others' values one copy stays, as ever
    assert soon(lambda: n_copies(process_client, other.key) == 1, 30)
    assert n_copies(process_client, key) == 2
    np.testing.assert_equal(process_client.compute(model.bind(x=X)).result()["more"], [8, 9])
    uninstall(process_client)
    assert soon(lambda: n_copies(process_client, key) == 1, 30)
    del model
    assert soon(lambda: n_copies(process_client, key) == 0, 30)


# Query planning


SCRIPT = """
import dask
import dask.array as da
import numpy as np
from distributed import Client

import ferroflow_dask
from ferroflow_dask import GraphBuilder
from ferroflow_dask.exceptions import BindError

assert da.array_expr_enabled()
x = np.arange(32, dtype=np.float32).reshape(8, 4)
lazy = (da.from_array(x, chunks=(2, 4)) + 1).astype(np.float32)
builder = GraphBuilder("negated")
builder.output(y=builder.op("Neg", builder.input("x", "float32", (8, 4))))
graph = builder.build()

with Client(n_workers=1, processes=False, dashboard_address=":0") as client:
    ferroflow_dask.install(client)
    for given in (lazy, lazy.rechunk(-1)):
        (found,) = client.compute(graph.bind(x=given)).result().values()
        np.testing.assert_array_equal(found, -(x + 1))
    with dask.annotate(priority=5):
        bound = graph.bind(x=lazy)
    annotated = [layer.annotations for layer in bound.__dask_graph__().layers.values()]
    assert annotated[0] is None
    assert annotated[-1]["priority"] == 5
    for given in (lazy, x):
        try:
            graph.map_batches(given)
        except BindError as error:
            print(error)
"""


def test_one_array_can_be_given_and_batches_are_told_to_do_without() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "DASK_ARRAY__QUERY_PLANNING": "true"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = (
        "map_batches does not work with Dask's query planning of arrays; set array.query-planning to "
        "false in Dask's configuration, before dask.array is imported"
    )
    assert done.stdout.splitlines() == [told, told]
