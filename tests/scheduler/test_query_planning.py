"""Arrays as Dask makes them with `array.query-planning`, which counts when `dask.array` is imported."""

from __future__ import annotations

import os
import subprocess
import sys

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
