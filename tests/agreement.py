"""How closely values must agree with those of `onnx.reference`."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from models import reference

from ferroflow_dask.graph import Graph
from ferroflow_dask.kernels import evaluate


def assert_same(actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Values agree, and types and shapes are equal; sequences item by item."""
    if isinstance(expected, list):
        assert isinstance(actual, list)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, rtol, atol)
        return
    if isinstance(expected, dict):  # of a ZipMap
        assert list(actual) == list(expected)
        assert_same(np.array(list(actual.values())), np.array(list(expected.values())), rtol, atol)
        return
    expected = np.asarray(expected)
    assert isinstance(actual, np.ndarray)
    assert actual.shape == expected.shape
    if expected.dtype.kind in "OU":
        assert actual.tolist() == expected.tolist()
        return
    assert actual.dtype == expected.dtype
    if expected.dtype.kind in "fV":
        wide = actual.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_allclose(*wide, rtol=rtol, atol=atol)
    else:
        np.testing.assert_array_equal(actual, expected)


def assert_equal_to_reference(model: onnx.ModelProto, graph: Graph, **inputs: Any) -> None:
    """The outputs of a graph are those of the model it was imported from, in the same order."""
    actual, expected = evaluate(graph, inputs), reference(model, inputs)
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert_same(actual[name], value)
