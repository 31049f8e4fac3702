"""Outputs that are chosen or declared, and models that take no made-up values, in batches."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import onnx
import pytest
from models import model_of
from onnx import TensorProto
from onnx.helper import make_node as node

from ferroflow_dask import load_onnx
from ferroflow_dask.exceptions import BindError, UnknownNameError, UsageError
from ferroflow_dask.graph.outputs import with_outputs
from ferroflow_dask.lowering import trials

pytestmark = pytest.mark.usefixtures("_no_cluster")
FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
TRY_OUT = trials.try_out


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments with which a model is tried out."""
    seen: list[Any] = []

    def try_out(run: Any, weights: Any, *arrays: Any) -> Any:
        seen.append(arrays)
        return TRY_OUT(run, weights, *arrays)

    monkeypatch.setattr(trials, "try_out", try_out)
    monkeypatch.setattr("ferroflow_dask.lowering.batch_model.try_out", try_out)
    return seen


def looked_up(first: int = 5) -> onnx.ModelProto:
    """Return a model that takes indices from `first` on only, and whose shapes ONNX does not tell."""
    nodes = [
        node("Sub", ["x", "first"], ["i"]),
        node("Gather", ["table", "i"], ["rows"], axis=0),
        node("Compress", ["rows", "which"], ["y"], axis=2),
    ]
    constants = {
        "first": np.int64(100),
        "table": np.arange(20, dtype=np.float32).reshape(10, 2),
        "which": np.array([True, False]),
    }
    return model_of(nodes, {"x": (INT64, ("n", 3))}, ["y"], initializers=constants)


INDICES = np.int64([[100, 101, 102], [103, 104, 105], [106, 107, 108], [109, 100, 101]])
FOUND = (2 * (INDICES - 100)).astype(np.float32)[..., None]


@pytest.mark.parametrize("n", [1, 4])
def test_a_model_that_fails_on_made_up_values_is_tried_on_the_first_rows(tries: list[Any], n: int) -> None:
    y = load_onnx(looked_up()).map_batches(da.from_array(INDICES[:n], chunks=(2, -1)))
    assert y.shape == (n, 3, 1)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), FOUND[:n])
    assert any(np.array_equal(arrays[0], INDICES[:n][:2]) for arrays in tries)


def test_rows_that_depend_on_each_other_are_found_with_real_ones() -> None:
    model = looked_up()
    model.graph.node.append(node("CumSum", ["y", "zero"], ["s"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.int64(0), "zero"))
    model.graph.output[0].name = "s"
    loaded = load_onnx(model)
    x = da.from_array(INDICES, chunks=(2, -1))
    with pytest.raises(BindError, match="depend on each other"):
        loaded.map_batches(x)
    found = loaded.map_batches(x, check_rows=False).compute(scheduler="sync")
    np.testing.assert_array_equal(found[:2], np.cumsum(FOUND[:2], axis=0))


def test_what_is_declared_is_not_tried_out(tries: list[Any]) -> None:
    x = da.from_array(INDICES, chunks=(2, -1))
    outputs = {"y": ("float32", (3, 1))}
    y = load_onnx(looked_up()).map_batches(x, check_rows=False, outputs=outputs)
    assert not tries
    assert (y.dtype, y.shape) == (np.float32, (4, 3, 1))
    np.testing.assert_array_equal(y.compute(scheduler="sync"), FOUND)


def two_heads() -> onnx.ModelProto:
    nodes = [node("Neg", ["x"], ["a"], "left"), node("Exp", ["x"], ["b"], "right")]
    return model_of(nodes, {"x": (FLOAT, ("n", 3))}, ["a", "b"])


X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


def test_outputs_are_chosen_and_others_are_not_computed() -> None:
    loaded = load_onnx(two_heads())
    x = da.from_array(X, chunks=(2, -1))
    right = loaded.map_batches(x, outputs=["b"]).compute(scheduler="sync")
    np.testing.assert_allclose(right, np.exp(X), rtol=1e-5)
    found = loaded.map_batches(x, outputs=["b", "a"])
    assert list(found) == ["b", "a"]
    np.testing.assert_array_equal(found["a"].compute(scheduler="sync"), -X)
    cut = with_outputs(loaded.graph, ["b"])
    assert [op.name for op in cut.live_ops] == ["right"]
    assert with_outputs(loaded.graph, ["b"]) is cut
    assert with_outputs(loaded.graph, ["a", "b"]) is loaded.graph


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ("y", UsageError, r"^outputs must be a list of names, or a dict .*, got 'y'$"),
        ([], UsageError, "got none$"),
        (["c"], UnknownNameError, r"^unknown output 'c'; choose one of: a, b$"),
        ({"a": "float32"}, UsageError, r"got 'float32' for 'a'$"),
        ({"a": ("float99", (3,))}, UsageError, r"got \('float99', \(3,\)\) for 'a'$"),
    ],
)
def test_other_outputs_are_refused(outputs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_onnx(two_heads()).map_batches(X, outputs=outputs)
