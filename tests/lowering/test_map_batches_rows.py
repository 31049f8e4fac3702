"""Functions before and after a model, bags, delayed values, and batches inside of chunks."""

from __future__ import annotations

import functools
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import onnx
import pandas as pd
import pytest
from batches import expected, rows
from distributed import Client
from models import mlp, model_of
from onnx import TensorProto
from onnx.helper import make_node as node

from ferroflow_dask import load_onnx
from ferroflow_dask.exceptions import BindError, KernelError

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
