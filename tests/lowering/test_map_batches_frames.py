"""Rows of data frames through models: columns in, columns out, the numbers of onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import onnx
import pandas as pd
import pytest
from batches import expected
from models import model_of
from onnx import TensorProto, helper
from onnx.helper import make_node as node

from ferroflow_dask import load_onnx
from ferroflow_dask.exceptions import BindError, UsageError

pytestmark = pytest.mark.usefixtures("_no_cluster")
FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
ML = {"domain": "ai.onnx.ml"}


def matrix() -> onnx.ModelProto:
    """Return a model of three numbers, with an output of two numbers and one of one."""
    weights = {"w": np.float32([[1, 2], [3, 4], [5, 6]]), "axis": np.int64([1])}
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("ReduceSum", ["y", "axis"], ["total"], keepdims=0)]
    return model_of(nodes, {"x": (FLOAT, ("n", 3))}, ["y", "total"], initializers=weights)


def table() -> onnx.ModelProto:
    """Return a model as skl2onnx writes them: a column an input, a label and a map of probabilities."""
    nodes = [
        node("OneHotEncoder", ["city"], ["cities"], cats_strings=["Bern", "Rome"], zeros=1, **ML),
        node("Squeeze", ["cities", "axis"], ["flat"]),
        node("Concat", ["flat", "age"], ["features"], axis=1),
        node(
            "LinearClassifier",
            ["features"],
            ["label", "scores"],
            coefficients=[1.0, -1.0, 0.01, -1.0, 1.0, -0.01],
            intercepts=[0.0, 0.5],
            classlabels_strings=["no", "yes"],
            multi_class=0,
            post_transform="SOFTMAX",
            **ML,
        ),
        node("ZipMap", ["scores"], ["probabilities"], classlabels_strings=["no", "yes"], **ML),
    ]
    inputs = {"city": (STRING, ("n", 1)), "age": (FLOAT, ("n", 1))}
    model = model_of(
        nodes,
        inputs,
        ["label", "probabilities"],
        initializers={"axis": np.int64([1])},
        domains={"ai.onnx.ml": 1},
    )
    number = helper.make_tensor_type_proto(FLOAT, None)
    rows = helper.make_sequence_type_proto(helper.make_map_type_proto(STRING, number))
    text = helper.make_tensor_type_proto(STRING, ["n"])
    for output, proto in zip(model.graph.output, (text, rows), strict=True):
        output.type.CopyFrom(proto)
    return model


NUMBERS = pd.DataFrame(
    {"a": [1.5, 2, 3, 4, 5], "b": range(5), "c": pd.array([0, 1, 0, 1, 1], "Int64")},
    index=pd.Index([3, 4, 5, 9, 11], name="row"),
)
PEOPLE = pd.DataFrame(
    {"age": [10, 20, 30, 40], "city": ["Rome", "Bern", "Oslo", "Rome"], "name": list("abcd")},
    index=list("wzyx"),
)


def check_meta(frame: Any) -> pd.DataFrame:
    """Compute a frame, each of whose chunks must be as its metadata say; return it."""
    found: pd.DataFrame = frame.compute()
    pd.testing.assert_frame_equal(frame._meta, found[:0], check_index_type=False)
    return found


@pytest.mark.parametrize("given", ["pandas", "dask"])
def test_columns_are_one_input_and_outputs_become_columns(given: str) -> None:
    frame = NUMBERS if given == "pandas" else dd.from_pandas(NUMBERS, npartitions=2)
    result = load_onnx(matrix()).map_batches(frame, **({"batch": 2} if given == "pandas" else {}))
    assert isinstance(result, dd.DataFrame)
    assert result.known_divisions
    assert result.divisions[0] == 3
    assert result.npartitions > 1
    found = check_meta(result)
    y, total = expected(matrix(), x=NUMBERS.to_numpy("float32"))
    np.testing.assert_allclose(np.stack(found["y"]), y)
    np.testing.assert_allclose(found["total"], total)
    pd.testing.assert_frame_equal(found[["a", "b", "c"]], NUMBERS)


@pytest.mark.parametrize("dtype", ["str", "object", "category"])
def test_texts_and_categories_are_inputs_by_name_and_maps_are_dicts(dtype: str) -> None:
    frame = PEOPLE.astype({"city": dtype})
    result = load_onnx(table()).map_batches(frame, batch=3)
    found = check_meta(result)
    city = PEOPLE["city"].to_numpy(object)[:, None]
    label, maps = expected(table(), city=city, age=PEOPLE[["age"]].to_numpy("float32"))
    assert found["label"].tolist() == label.tolist()
    assert [dict.fromkeys(row) for row in found["probabilities"]] == [dict.fromkeys(row) for row in maps]
    for row, of_onnxruntime in zip(found["probabilities"], maps, strict=True):
        assert row == pytest.approx(of_onnxruntime)
    pd.testing.assert_frame_equal(found[list(PEOPLE)], frame)  # in the order of the rows, not of the index


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of Dask's reader, with pandas 3.1
def test_a_table_goes_from_parquet_to_parquet(tmp_path: Path) -> None:
    NUMBERS.to_parquet(tmp_path / "in.parquet")
    frame = dd.read_parquet(tmp_path / "in.parquet")
    load_onnx(matrix()).map_batches(frame).to_parquet(tmp_path / "out", schema=None)
    found = pd.read_parquet(tmp_path / "out")
    np.testing.assert_allclose(
        np.stack(found["y"]), expected(matrix(), x=NUMBERS.to_numpy("float32"))[0], rtol=1e-6
    )


def test_a_result_can_be_kept_and_goes_on() -> None:
    result = load_onnx(matrix()).map_batches(NUMBERS, batch=2)
    kept = result.persist()
    pd.testing.assert_frame_equal(kept.compute(), result.compute())
    wanted = 2 * expected(matrix(), x=NUMBERS.to_numpy("float32"))[1]
    np.testing.assert_allclose((kept[["total"]] * 2)["total"].compute(), wanted, rtol=1e-6)
    assert len(dask.optimize(result)[0].compute()) == len(NUMBERS)


def test_columns_can_be_chosen() -> None:
    model = load_onnx(matrix())
    frame = NUMBERS.assign(d="text")
    for columns in (["c", "b", "a"], {"x": ["c", "b", "a"]}):
        found = model.map_batches(frame, columns=columns, outputs=["total"]).compute()
        (_, total) = expected(matrix(), x=NUMBERS[["c", "b", "a"]].to_numpy("float32"))
        np.testing.assert_allclose(found["total"], total)
    renamed = PEOPLE.rename(columns={"city": "town"})
    assert load_onnx(table()).map_batches(renamed, columns={"city": "town"}).compute()["label"].tolist()


def test_columns_may_be_arrays_and_missing_numbers_are_nan() -> None:
    x = NUMBERS.to_numpy("float32")
    found = load_onnx(matrix()).map_batches(pd.DataFrame({"x": list(x), "k": range(5)})).compute()
    np.testing.assert_allclose(np.stack(found["y"]), expected(matrix(), x=x)[0])
    frame = NUMBERS.astype({"b": "Int64"})
    frame.loc[4, "b"] = pd.NA
    found = load_onnx(matrix()).map_batches(frame).compute()
    assert np.isnan(found["total"]).tolist() == [False, True, False, False, False]


def looked_up() -> onnx.ModelProto:
    """Return a model that fails on an index of 5 or more; its outputs are an integer and a text."""
    nodes = [
        node("Gather", ["codes", "i"], ["code"]),
        node("Gather", ["names", "i"], ["name"]),
        node("Gather", ["rows", "i"], ["row"]),
    ]
    constants = {
        "codes": np.int64([2, 3, 5, 7, 11]),
        "names": np.array(list("vwxyz"), object),
        "rows": np.ones((5, 2), np.float32),
    }
    return model_of(nodes, {"i": (INT64, ("n",))}, ["code", "name", "row"], initializers=constants)


def test_rows_that_fail_become_null_and_are_counted() -> None:
    frame = pd.DataFrame({"i": [0, 1, 99, 3, -50]})
    model = load_onnx(looked_up())
    with pytest.warns(UserWarning, match=r"^2 of 5 rows of a chunk failed in model 'test'.*null: .*99"):
        found = check_meta(model.map_batches(frame, on_error="null"))
    assert found["code"].dtype == "Int64"
    assert found["code"].to_numpy("float64", na_value=-1).tolist() == [2, 3, -1, 7, -1]
    assert found["name"].fillna("none").tolist() == ["v", "w", "none", "y", "none"]
    assert [None if row is None else row.tolist() for row in found["row"]][1:3] == [[1, 1], None]
    with pytest.warns(UserWarning, match="1 of 1 rows"):
        none = check_meta(model.map_batches(frame[2:3], on_error="null"))
    assert none[["code", "name", "row"]].isna().all().all()
    assert check_meta(model.map_batches(frame[:0], on_error="null")).empty


def clash() -> Any:
    return NUMBERS.rename(columns={"c": "total"})


@pytest.mark.parametrize(
    ("model", "frame", "options", "error", "message"),
    [
        (matrix, NUMBERS[["a", "b"]], {}, BindError, r"input 'x' takes 3 columns, got 2: \['a', 'b'\]"),
        (
            matrix,
            NUMBERS.rename(columns={"a": "width"}),
            {"columns": ["wdth", "b", "c"]},
            BindError,
            r"columns must be of \['width', 'b', 'c'\], got 'wdth'; did you mean 'width'",
        ),
        (
            matrix,
            "t.parquet",
            {},
            UsageError,
            "data must be a table or arrays, got the path 't.parquet'; read it",
        ),
        (matrix, NUMBERS, {"columns": "a"}, UsageError, "columns must be a dict .* got 'a'"),
        (matrix, NUMBERS, {"columns": {"y": "a"}}, BindError, "columns names 'y'; the model takes x: float"),
        (matrix, NUMBERS.assign(a="1"), {}, BindError, "'a' has dtype .*the model takes float32"),
        (matrix, clash(), {}, BindError, "output 'total' of the model is a column of the frame already"),
        (
            table,
            PEOPLE[["city"]],
            {},
            BindError,
            r"must have the names of the inputs.*, got .'city'.; rename one to 'age', or give columns=",
        ),
        (table, PEOPLE.assign(city=3), {}, BindError, r"'city' has dtype int64.*pass astype\(str\)"),
        (looked_up, pd.DataFrame({"i": [0.5]}), {}, BindError, r"'i' has dtype float64.*astype\('int64'\)"),
        (matrix, NUMBERS["a"], {}, BindError, r"data is a Series; pass data.to_frame\(\)"),
        (
            matrix,
            NUMBERS,
            {"on_error": "skip"},
            UsageError,
            'on_error must be "raise" or "null", got \'skip\'',
        ),
        (matrix, NUMBERS, {"batch_size": 0}, UsageError, "batch_size must be a number of rows, .* got 0"),
        (matrix, NUMBERS, {"preprocess": 3}, UsageError, "preprocess must be a function or a class, got 3"),
        (
            matrix,
            dd.from_pandas(NUMBERS, npartitions=1),
            {"batch": 2},
            UsageError,
            "batch cuts arrays and pandas frames.*pass batch_size=2",
        ),
        (matrix, np.zeros((2, 3), np.float32), {"columns": ["a"]}, UsageError, "columns are of data frames"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    model: Any, frame: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        load_onnx(model()).map_batches(frame, **options)
    assert "\n" not in str(caught.value)


def test_a_missing_text_names_its_column() -> None:
    frame = PEOPLE.copy()
    frame.loc["z", "city"] = None
    with pytest.raises(BindError, match=r"'city' has the value .*, the model takes texts; .*fillna\(''\)"):
        load_onnx(table()).map_batches(frame).compute()


def texts() -> onnx.ModelProto:
    """Return a model of the lengths of two words."""
    return model_of([node("Neg", ["n"], ["y"])], {"n": (INT64, ("n", 2))}, ["y"])


@pytest.mark.parametrize(
    ("least", "n_empty", "expected_reads"),
    [(0, 0, []), (2, 0, [0]), (2, 1, [0, 0, 1, 2, 3])],
    ids=["made-up texts are enough", "the first rows are needed", "the first partition is empty"],
)
def test_few_partitions_are_read_to_try_functions_out(
    least: int, n_empty: int, expected_reads: list[int]
) -> None:
    reads: list[int] = []

    def read(i: int) -> pd.DataFrame:
        reads.append(i)
        rows = [] if i < n_empty else [f"{'a' * (i + 1)} bcd"] * 3
        return pd.DataFrame({"t": pd.Series(rows, dtype="string")})

    def lengths(frame: pd.DataFrame) -> Any:
        words = [text.split() for text in frame["t"]]
        assert all(len(found) >= least for found in words)
        return np.int64([[len(found[0]), len(found[-1])] for found in words]).reshape(-1, 2)

    frame = dd.from_map(read, range(4), meta=read(4).iloc[:0])
    reads.clear()
    result = load_onnx(texts()).map_batches(frame, preprocess=lengths)
    assert sorted(reads) == expected_reads
    found = result.compute()
    assert [row.tolist() for row in found["y"][::3]] == [[-1 - i, -3] for i in range(n_empty, 4)]
    assert sorted(reads[len(expected_reads) :]) == [0, 1, 2, 3]
