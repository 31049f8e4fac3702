"""Rows in batches: functions before and after a model, bags, delayed values, rows along another axis."""

from __future__ import annotations

import functools
import re
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
from batches import expected, rows
from distributed import Client
from models import mlp, model_of
from onnx import TensorProto, helper
from onnx.helper import make_node as node
from onnx.helper import make_tensor_value_info as info

from ferroflow_dask import load_onnx
from ferroflow_dask.exceptions import BindError, KernelError, UsageError

pytestmark = pytest.mark.usefixtures("_no_cluster")
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def lengths() -> onnx.ModelProto:
    """Return a model of padded tokens, whose second dimension is that of the longest text of a batch."""
    nodes = [
        node("Cast", ["tokens"], ["numbers"], to=FLOAT),
        node("ReduceSum", ["numbers", "axis"], ["total"], keepdims=0),
        node("Shape", ["tokens"], ["shape"]),
        node("Gather", ["shape", "one"], ["width"]),
        node("Cast", ["width"], ["padded"], to=FLOAT),
        node("Mul", ["total", "zero"], ["zeros"]),
        node("Add", ["zeros", "padded"], ["longest"]),
    ]
    constants = {"axis": np.int64([1]), "one": np.int64(1), "zero": np.float32(0)}
    return model_of(nodes, {"tokens": (INT64, ("n", "m"))}, ["total", "longest"], initializers=constants)


def tokens(frame: pd.DataFrame) -> np.ndarray[Any, Any]:
    """Return the codes of letters, padded to the longest text."""
    width = max(map(len, frame["text"]))
    return np.int64([[ord(letter) for letter in text.ljust(width, "\0")] for text in frame["text"]])


TEXTS = pd.DataFrame({"text": ["a", "abc", "ab", "abcdefg", "c"]})
TOTALS = [sum(map(ord, text)) for text in TEXTS["text"]]


def test_preprocess_gets_batches_of_the_chosen_size() -> None:
    frame = dd.from_pandas(TEXTS, npartitions=1)
    options: dict[str, Any] = {"preprocess": tokens, "check_rows": False}
    found = load_onnx(lengths()).map_batches(frame, **options).compute()
    assert found["total"].tolist() == TOTALS
    assert found["longest"].tolist() == [7] * 5
    found = load_onnx(lengths()).map_batches(frame, batch_size=2, **options).compute()
    assert found["total"].tolist() == TOTALS
    assert found["longest"].tolist() == [3, 3, 7, 7, 1]


def test_functions_may_change_rows_and_columns() -> None:
    def words(frame: pd.DataFrame) -> pd.DataFrame:
        found = frame[frame["text"].str.len() < 4]
        return found.assign(tokens=list(tokens(found)))

    def shouted(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["total"] > 97].assign(text=frame["text"].str.upper())[["text", "total"]]

    frame = dd.from_pandas(TEXTS, npartitions=2)
    model = load_onnx(lengths())
    result = model.map_batches(frame, preprocess=words, postprocess=shouted, check_rows=False)
    found = result.compute()
    pd.testing.assert_frame_equal(result._meta, found[:0], check_index_type=False)
    assert found["text"].tolist() == ["ABC", "AB", "C"]
    assert found["total"].tolist() == [sum(map(ord, "abc")), sum(map(ord, "ab")), ord("c")]


@pytest.mark.parametrize("batch_size", [None, 2])
def test_arrays_with_functions(batch_size: int | None) -> None:
    x = rows(7, 784)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "preprocess": lambda part: part.astype("float32") / 2,
    }
    y = load_onnx(mlp()).map_batches(
        da.from_array(2.0 * x, chunks=(3, 784)), postprocess=lambda part: part.argmax(axis=1), **options
    )
    (wanted,) = expected(mlp(), x=x)
    assert y.dtype == np.int64
    assert y.ndim == 1
    np.testing.assert_array_equal(y.compute(), wanted.argmax(axis=1))
    kept = load_onnx(mlp()).map_batches(da.from_array(x, chunks=(3, 784)), preprocess=lambda part: part[::2])
    np.testing.assert_allclose(kept.compute(), wanted[[0, 2, 3, 5, 6]], rtol=1e-4, atol=1e-6)


def test_a_batch_size_is_apart_from_chunks() -> None:
    nodes = [node("Shape", ["x"], ["s"], end=1), node("Expand", ["s", "s"], ["n"])]
    x = da.zeros((7, 2), chunks=(5, 2), dtype=np.float32)
    model = load_onnx(model_of(nodes, {"x": (FLOAT, ("n", 2))}, ["n"]))
    y = model.map_batches(x, batch_size=3, check_rows=False)
    assert y.chunks == ((5, 2),)
    assert y.compute().tolist() == [3, 3, 3, 2, 2, 2, 2]


def test_integers_of_arrays_become_nan_if_rows_fail() -> None:
    model = model_of(
        [node("Gather", ["table", "i"], ["y"])],
        {"i": (INT64, ("n",))},
        ["y"],
        initializers={"table": np.int64([5, 6, 7])},
    )
    i = da.from_array(np.int64([0, 9, 2, 1]), chunks=2)
    y = load_onnx(model).map_batches(i, on_error="null")
    assert y.dtype == np.float64
    with pytest.warns(UserWarning, match="1 of 2 rows of a chunk failed"):
        np.testing.assert_array_equal(y.compute(), [5, np.nan, 7, 6])
    with pytest.raises(KernelError, match="failed on"):
        load_onnx(model).map_batches(i).compute()


def test_bags_of_rows_and_of_dicts() -> None:
    x = rows(5, 784)
    (wanted,) = expected(mlp(), x=x)
    bag = db.from_sequence(list(x), npartitions=2)
    found = load_onnx(mlp()).map_batches(bag)
    assert isinstance(found, db.Bag)
    assert found.npartitions == bag.npartitions
    np.testing.assert_allclose(np.stack(found.compute()), wanted, rtol=1e-4, atol=1e-6)
    dicts = bag.map(lambda row: {"x": row, "first": row[0]})
    found = load_onnx(mlp()).map_batches(dicts, batch_size=2).compute()
    np.testing.assert_allclose([item["first"] for item in found], x[:, 0])
    np.testing.assert_allclose(np.stack([item["y"] for item in found]), wanted, rtol=1e-4, atol=1e-6)


def test_items_that_fail_are_none() -> None:
    bag = db.from_sequence([[1] * 784, ["a"] * 784, [3] * 784], npartitions=1)
    with pytest.warns(UserWarning, match="1 of 3 rows of a chunk failed"):
        found = load_onnx(mlp()).map_batches(bag, on_error="null").compute()
    assert [row is None for row in found] == [False, True, False]


def test_delayed_values_are_chunks_of_any_form() -> None:
    x = rows(3, 784)
    (wanted,) = expected(mlp(), x=x)
    model = load_onnx(mlp())
    one = model.map_batches(dask.delayed(x))
    np.testing.assert_allclose(one.compute(), wanted, rtol=1e-4, atol=1e-6)
    forms = [x, {"x": x}, list(x), pd.DataFrame(x)]
    array, by_name, items, frame = dask.compute(*model.map_batches([dask.delayed(form) for form in forms]))
    for found in (array, by_name, np.stack(items), np.stack(frame["y"])):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    with pytest.raises(BindError, match=r"data must be an array, a dict of arrays, .* got a int"):
        model.map_batches(dask.delayed(3)).compute()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preprocess": lambda frame: tokens(frame)[:1]}, "preprocess returned 1 rows for 2"),
        ({"preprocess": lambda frame: frame["txt"]}, "the first rows cannot be read as inputs: 'txt'"),
        ({"preprocess": lambda frame: 3}, "the result of preprocess must be an array, .* got a int"),
        ({"preprocess": tokens, "postprocess": lambda frame: frame["tot"]}, "give an empty result as meta="),
    ],
)
def test_functions_that_do_not_fit_are_named(options: Any, message: str) -> None:
    model = load_onnx(lengths())
    with pytest.raises((BindError, KernelError), match=message):
        model.map_batches(dd.from_pandas(TEXTS[:2], npartitions=1), **options).compute()


@pytest.mark.cluster
def test_a_class_is_built_once_in_each_process(process_client: Client) -> None:
    class Tokens:
        def __init__(self, add: int = 0) -> None:
            import os
            import uuid

            self.add, self.built = add, f"{os.getpid()} {uuid.uuid4()}"

        def __call__(self, frame: Any) -> Any:
            width = max(map(len, frame["text"]))
            codes = [[ord(letter) + self.add for letter in text.ljust(width, "\0")] for text in frame["text"]]
            return frame.assign(tokens=list(np.int64(codes)), built=self.built)

    frame = dd.from_pandas(pd.concat([TEXTS[:1]] * 8), npartitions=8, sort=False)
    for cls, total in ((Tokens, 97), (functools.partial(Tokens, 1), 98)):
        with process_client.as_current():
            result = load_onnx(lengths()).map_batches(frame, preprocess=cls, check_rows=False)
        found = process_client.compute(result).result()
        assert set(found["total"]) == {total}
        built = set(found["built"])
        assert len({name.split()[0] for name in built}) == len(built)  # one for each process


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
