"""Graphs with bound inputs are Dask collections like others: merged, annotated and kept as one expects."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from ferroflow_dask import GraphBuilder, Model
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
