"""Declared sizes of chunks reach the scheduler, and count where learned sizes are of smaller chunks."""

from __future__ import annotations

import pickle
from math import nan
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Alias, DataNode, GraphNode
from dask.base import collections_to_expr

from ferroflow_dask.bundling.declared import Chunks, declared_nbytes
from ferroflow_dask.scheduler._distributed_graphs import declared_chunks, materialized


@pytest.mark.parametrize(
    ("indices", "nbytes"),
    [
        pytest.param((0, 1), 8 * 3 * 5, id="a chunk"),
        pytest.param((1, 0), None, id="a chunk of unknown length"),
        pytest.param((0, 2), None, id="no such chunk"),
        pytest.param((0,), None, id="another number of axes"),
        pytest.param((0, "x"), None, id="no number"),
    ],
)
def test_the_size_of_a_chunk_follows_from_its_lengths(indices: Any, nbytes: float | None) -> None:
    assert Chunks(((3, nan), (4, 5)), 8).nbytes(indices) == nbytes


def test_the_target_of_an_alias_has_its_size() -> None:
    tasks: dict[Any, GraphNode] = {
        "fused": DataNode("fused", 0),
        ("x", 0): Alias(("x", 0), "fused"),
        ("y", 0): DataNode(("y", 0), 0),
    }
    assert declared_nbytes(tasks, {"x": Chunks(((3,),), 8)}) == {("x", 0): 24, "fused": 24}
    assert declared_nbytes(tasks, {}) == {}


def test_the_sizes_of_arrays_are_seen_in_the_expression_that_a_client_sends() -> None:
    array = da.ones((64, 64), chunks=16)
    total = (array[1:, 1:] + array[:-1, :-1]).rechunk(32)
    expr = pickle.loads(pickle.dumps(collections_to_expr([total]).finalize_compute().optimize()))
    tasks = materialized(expr, expr.__dask_keys__())
    found = declared_nbytes(tasks, declared_chunks(expr))
    sizes = {key: value.nbytes for key, value in _values(tasks).items() if isinstance(value, np.ndarray)}
    assert found
    assert found == {key: sizes[key] for key in found}


def _values(tasks: dict[Any, GraphNode]) -> dict[Any, Any]:
    return dict(zip(tasks, dask.get(tasks, list(tasks)), strict=True))


@pytest.mark.parametrize("expr", [object(), None], ids=["another class", "none"])
def test_other_expressions_declare_nothing(expr: Any) -> None:
    assert declared_chunks(expr) == {}
