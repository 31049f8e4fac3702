"""Models whose rows are along another axis than the first, in batches."""

from __future__ import annotations

import re
from typing import Any

import dask.array as da
import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
from models import model_of
from onnx import TensorProto, helper
from onnx.helper import make_node as node
from onnx.helper import make_tensor_value_info as info

from ferroflow_dask import load_onnx
from ferroflow_dask.exceptions import BindError, UsageError

FLOAT = TensorProto.FLOAT
STEPS, FEATURES, HIDDEN = 5, 3, 4


def recurrent(n: Any = "n") -> onnx.ModelProto:
    """Return a GRU, whose rows are along the second axis, or the third of its first output."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((1, 3 * HIDDEN, FEATURES)).astype(np.float32),
        "r": rng.standard_normal((1, 3 * HIDDEN, HIDDEN)).astype(np.float32),
    }
    return model_of(
        [node("GRU", ["x", "w", "r", "", "", "h"], ["y", "last"], hidden_size=HIDDEN)],
        {"x": (FLOAT, (STEPS, n, FEATURES)), "h": (FLOAT, (1, n, HIDDEN))},
        ["y", "last"],
        initializers=weights,
    )


@pytest.mark.parametrize("n", ["n", 2], ids=["any number of rows", "a fixed number of rows"])
def test_rows_are_first_in_data_and_result(n: Any) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((STEPS, 7, FEATURES)).astype(np.float32)
    h = rng.standard_normal((1, 7, HIDDEN)).astype(np.float32)
    y, last = onnxruntime.InferenceSession(recurrent().SerializeToString()).run(None, {"x": x, "h": h})
    data = {
        name: da.from_array(np.moveaxis(value, 1, 0), chunks=(3, -1, -1))
        for name, value in (("x", x), ("h", h))
    }
    found = load_onnx(recurrent(n)).map_batches(data, batch_axis={"x": 1, "h": 1, "y": -2, "last": 1})
    assert found["y"].shape == (7, STEPS, 1, HIDDEN)
    assert found["last"].shape == (7, 1, HIDDEN)
    for array, value in ((found["y"], np.moveaxis(y, 2, 0)), (found["last"], np.moveaxis(last, 1, 0))):
        np.testing.assert_allclose(array.compute(scheduler="sync"), value, rtol=1e-5, atol=1e-6)


def doubled() -> onnx.ModelProto:
    """Return a model with a branch that reads the input by name."""
    inner = helper.make_graph([node("Add", ["x", "x"], ["z"])], "body", [], [info("z", FLOAT, [2, "n"])])
    other = helper.make_graph([node("Identity", ["x"], ["w"])], "body", [], [info("w", FLOAT, [2, "n"])])
    return model_of(
        [
            node("ReduceMax", ["x"], ["most"], keepdims=0),
            node("IsNaN", ["most"], ["odd"]),
            node("Not", ["odd"], ["even"]),
            node("If", ["even"], ["y"], then_branch=inner, else_branch=other),
        ],
        {"x": (FLOAT, (2, "n"))},
        ["y"],
    )


def test_one_number_is_the_axis_of_all_and_branches_read_the_moved_input() -> None:
    frame = pd.DataFrame({"a": np.float32([1, 2, 3]), "b": np.float32([4, 5, 6])}, index=[7, 8, 9])
    model = load_onnx(doubled())
    found = model.map_batches(frame, batch_axis=1, outputs={"y": ("float32", (2,))})
    result = found.compute(scheduler="sync")
    assert result.index.tolist() == [7, 8, 9]
    np.testing.assert_array_equal(np.stack(result["y"]), 2 * frame.to_numpy())


def test_a_session_stays_open_from_call_to_call() -> None:
    model, x = load_onnx(recurrent()), da.zeros((4, STEPS, FEATURES), dtype=np.float32)
    data = {"x": x, "h": da.zeros((4, 1, HIDDEN), dtype=np.float32)}
    graphs = [
        next(
            task.value
            for task in dict(model.map_batches(data, batch_axis=1, outputs=["last"]).dask).values()
            if hasattr(getattr(task, "value", None), "run")
        ).run.sealed.token
        for _ in range(2)
    ]
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize(
    ("batch_axis", "error", "message"),
    [
        ({"z": 1}, UsageError, "batch_axis names 'z'; the model has last: float32[1, n, 4]"),
        ({"h": 3}, BindError, "batch_axis is 3 for 'h', which has 3 axes: float32[1, n, 4]"),
        ({"h": "1"}, UsageError, "batch_axis must be an axis, or a dict like {'state': 1}, got '1' for 'h'"),
        (True, UsageError, "batch_axis must be an axis, or a dict like {'state': 1}, got True"),
    ],
    ids=["another name", "no such axis", "no number", "a truth value"],
)
def test_other_axes_are_refused(batch_axis: Any, error: type[Exception], message: str) -> None:
    data = {
        "x": da.zeros((4, STEPS, FEATURES), dtype=np.float32),
        "h": da.zeros((4, 1, HIDDEN), dtype=np.float32),
    }
    with pytest.raises(error, match=re.escape(message)):
        load_onnx(recurrent()).map_batches(data, batch_axis=batch_axis, outputs=["last"])


def test_an_unknown_number_of_axes_is_refused() -> None:
    model = model_of([node("Neg", ["x"], ["y"])], {"x": (FLOAT, None)}, ["y"])
    with pytest.raises(BindError, match=r"batch_axis is 1 for 'y', whose number of axes is unknown"):
        load_onnx(model).map_batches(np.zeros((4, 2), np.float32), batch_axis={"y": 1})
