"""Batch jobs over files: what they write, what they do again, and which line they give for bad input."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
from command_line import answer, assert_one_line, ferroflow
from distributed import Client
from models import model_of
from onnx import TensorProto, helper
from PIL import Image

from ferroflow_dask import load_onnx
from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph import TensorSpec, graph_from_onnx
from ferroflow_dask.jobs import job_of, run_job
from ferroflow_dask.jobs.images import imagenet
from ferroflow_dask.jobs.outputs import Output
from ferroflow_dask.lowering import scatter

LOCAL = ("--workers", "1", "--no-processes")
NODE = helper.make_node
N = 1000
W = np.random.default_rng(1).standard_normal((4, 3)).astype("float32")


def product(*outputs: str) -> onnx.ModelProto:
    """Return a model with the outputs y = x @ W and s, the sums of its rows."""
    nodes = [NODE("MatMul", ["x", "w"], ["y"]), NODE("ReduceSum", ["y", "i"], ["s"], keepdims=0)]
    inputs = {"x": (TensorProto.FLOAT, ("n", 4))}
    return model_of(nodes[: len(outputs)], inputs, outputs, initializers={"w": W, "i": np.int64([1])})


def columns() -> onnx.ModelProto:
    """Return a model that takes numbers of two columns and texts of a third."""
    nodes = [
        NODE("Add", ["a", "b"], ["sum"]),
        NODE("StringConcat", ["name", "name"], ["twice"]),
    ]
    inputs = {
        "a": (TensorProto.FLOAT, ("n", 1)),
        "b": (TensorProto.FLOAT, ("n", 1)),
        "name": (TensorProto.STRING, ("n",)),
    }
    return model_of(nodes, inputs, ["sum", "twice"], opset=20)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has models and a table in each format."""
    monkeypatch.chdir(tmp_path)
    for name, model in {"two": product("y", "s"), "one": product("y"), "columns": columns()}.items():
        onnx.save(model, tmp_path / f"{name}.onnx")
    table = pd.DataFrame(np.random.default_rng(0).standard_normal((N, 4)), columns=list("abcd"))
    table["name"] = [f"row, {i}" for i in range(N)]
    table.index += 7
    table.to_parquet("t.parquet", row_group_size=300)
    table.to_csv("t.csv", index=False)
    np.save("x.npy", table[list("abcd")].to_numpy("float32"))
    return tmp_path


def job(model: str, source: str, output: str, *options: str) -> dict[str, Any]:
    run = ("run", "--model", model, "--input", source, "--output", output, "--json", *LOCAL, *options)
    found: dict[str, Any] = json.loads(answer(*run).output)
    assert not Path(f"{output}.parts").exists()
    return found


def test_a_table_gets_the_outputs_as_columns(folder: Path) -> None:
    told = job("two.onnx", "t.parquet", "o.parquet", "--columns", "a,b,c,d", "--batch", "10")
    assert (told["rows"], told["partitions"], told["computed_partitions"]) == (N, 13, 13)
    given, found = pd.read_parquet("t.parquet"), pd.read_parquet("o.parquet")
    pd.testing.assert_frame_equal(found[given.columns], given)  # the index, too
    y = np.load("x.npy") @ W
    np.testing.assert_allclose(np.stack(found["y"]), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["s"], y.sum(1), rtol=1e-4, atol=1e-5)


def test_texts_become_columns_of_numbers(folder: Path) -> None:
    job("two.onnx", "t.csv", "o.csv", "--columns", "a,b,c,d")
    given, found = pd.read_csv("t.csv"), pd.read_csv("o.csv")
    pd.testing.assert_frame_equal(found[given.columns], given)
    np.testing.assert_allclose(found[["y_0", "y_1", "y_2"]], np.load("x.npy") @ W, rtol=1e-4, atol=1e-5)


def test_columns_go_to_inputs_of_their_names(folder: Path) -> None:
    job("columns.onnx", "t.csv", "o.parquet")
    found = pd.read_parquet("o.parquet")
    np.testing.assert_allclose(found["sum"], found["a"] + found["b"], rtol=1e-5, atol=1e-6)
    assert found["twice"][999] == "row, 999row, 999"


def test_a_folder_of_tables_is_one_table(folder: Path) -> None:
    Path("many").mkdir()
    for i in range(3):
        pd.read_parquet("t.parquet").iloc[i * 300 :][:300].to_parquet(f"many/{i}.parquet")
    assert job("two.onnx", "many", "o.parquet", "--columns", "a,b,c,d")["rows"] == 900
    assert pd.read_parquet("o.parquet")["name"].tolist() == [f"row, {i}" for i in range(900)]


def test_a_table_that_was_replaced_is_read_again(folder: Path) -> None:
    for factor in (1, 2):
        table = pd.read_parquet("t.parquet")
        table["a"] *= factor
        table.to_parquet("t.parquet")
        job("one.onnx", "t.parquet", "o.parquet", "--columns", "a,b,c,d")
        x = table[list("abcd")].to_numpy("float32")
        np.testing.assert_allclose(np.stack(pd.read_parquet("o.parquet")["y"]), x @ W, rtol=1e-4, atol=1e-5)


def test_arrays_are_read_and_written(folder: Path) -> None:
    job("one.onnx", "x.npy", "o.npy")
    np.testing.assert_allclose(np.load("o.npy"), np.load("x.npy") @ W, rtol=1e-4, atol=1e-5)
    job("two.onnx", "x.npy", "o.parquet")
    assert list(pd.read_parquet("o.parquet").columns) == ["y", "s"]


def mean_of_channels() -> onnx.ModelProto:
    nodes = [NODE("ReduceMean", ["x"], ["mean"], axes=[2, 3], keepdims=0)]
    return model_of(nodes, {"x": (TensorProto.FLOAT, ("n", 3, 64, 64))}, ["mean"], opset=13)


def test_images_are_prepared_as_for_imagenet(folder: Path) -> None:
    Path("images").mkdir()
    onnx.save(mean_of_channels(), "mean.onnx")
    colours = {"a.png": (255, 0, 0), "b.jpg": (0, 255, 0), "c.png": (124, 116, 104)}
    for name, colour in colours.items():
        Image.new("RGB", (100, 80), colour).save(f"images/{name}")
    Path("images/readme.txt").write_text("no image")
    assert job("mean.onnx", "images", "o.parquet", "--preprocess", "imagenet")["rows"] == 3
    found = pd.read_parquet("o.parquet")
    assert found["file"].tolist() == list(colours)
    expected = (np.array(list(colours.values())) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(np.stack(found["mean"]), expected, atol=0.02)  # JPEG is not exact
    assert imagenet(Path("images/a.png"), TensorSpec.of("uint8", (1, 32, 48, 3))).shape == (32, 48, 3)


def test_finished_partitions_are_not_done_again(
    folder: Path, thread_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_from_onnx("two.onnx")
    made = job_of(graph, "t.parquet", "o.parquet", batch=10, columns=list("abcd"))
    placed = scatter(graph, thread_client)
    updates: list[tuple[float, float | None]] = []
    with monkeypatch.context() as patched:
        patched.setattr(Output, "end", lambda *_: None)  # as if it had been ended just before
        run_job(made, placed, thread_client, lambda *facts: updates.append(facts))
    assert updates[-1] == (N, N)
    assert len(updates) == 13
    changed = {at: made.output.part(at).stat().st_mtime_ns for at in range(13)}
    for at in (3, 12):
        made.output.part(at).unlink()
    (made.output.folder / ".half-000003.parquet").write_bytes(b"what a worker that died was writing")
    again = job_of(graph_from_onnx("two.onnx"), "t.parquet", "o.parquet", batch=10, columns=list("abcd"))
    assert again.manifest == made.manifest
    with monkeypatch.context() as patched:
        patched.setattr(Output, "end", lambda *_: None)
        facts = run_job(again, placed, thread_client, lambda *_: None)
    assert facts == {"rows": N, "partitions": 13, "computed_rows": 80 + 40, "computed_partitions": 2}
    same = {at for at in range(13) if made.output.part(at).stat().st_mtime_ns == changed[at]}
    assert same == set(range(13)) - {3, 12}
    assert run_job(again, placed, thread_client, lambda *_: None)["computed_partitions"] == 0
    assert pd.read_parquet("o.parquet")["name"].tolist() == [f"row, {i}" for i in range(N)]
    assert not made.output.folder.exists()


@pytest.mark.parametrize("changed", ["model", "input", "options"])
def test_parts_of_another_job_are_refused(changed: str, folder: Path, thread_client: Client) -> None:
    graph = graph_from_onnx("one.onnx")
    made = job_of(graph, "x.npy", "o.npy", batch=10)
    made.output.begin(made.manifest)
    if changed == "model":
        other = product("y")
        other.graph.initializer[0].raw_data = (2 * W).tobytes()
        graph = graph_from_onnx(other)
    if changed == "input":
        np.save("x.npy", np.load("x.npy")[:-1])
    again = job_of(graph, "x.npy", "o.npy", batch=20 if changed == "options" else 10)
    with pytest.raises(
        UsageError, match=f"^'o.npy.parts' has parts of another job .different: {changed}.; remove"
    ):
        again.output.begin(again.manifest)
    made.output.begin(made.manifest)  # the first job can go on


def test_a_partition_that_fails_is_told_and_the_others_are_kept(folder: Path) -> None:
    Path("images").mkdir()
    onnx.save(mean_of_channels(), "mean.onnx")
    for i in range(40):
        Image.new("RGB", (64, 64)).save(f"images/{i:02}.png")
    Path("images/39.png").write_bytes(b"no image")
    run = ["run", "--model", "mean.onnx", "--input", "images", "--preprocess", "imagenet"]
    found = ferroflow(*run, "--output", "o.parquet", "--batch", "1", *LOCAL)
    assert found.exit_code == 1
    kept, error = found.stderr.strip().splitlines()[-2:]
    assert kept == "finished partitions are kept: the same command goes on from there"
    assert "'images/39.png' cannot be read as an image" in error
    assert os.path.exists("o.parquet.parts/manifest.json")
    assert not os.path.exists("o.parquet")


#: By the input, the output and options.
BAD = {
    "t.parquet o.npz": "--output must end in .parquet, .csv or .npy for --input 't.parquet', got 'o.npz'",
    "t.parquet o.npy": "--output must end in .parquet or .csv for 2 outputs, got 'o.npy'",
    "t.parquet none/o.csv": "there is no folder 'none'",
    "t.parquet o.csv": "input 'x' takes 4 columns, got 5: ['a', 'b', 'c', 'd', 'name']; choose them",
    "t.parquet o.csv --columns a,z": "columns must be of ['a', 'b', 'c', 'd', 'name'], got 'z'",
    "t.parquet o.csv --columns a,b,c,name": "'name' has dtype object, the model takes float32",
    "t.parquet o.csv --repeat 2": "--repeat does nothing for a batch job; leave it out",
    "t.parquet o.csv --input x.npy": "a batch job needs one --input and one --output, got 2 times",
    "t.parquet o.csv --policy sequential": "--policy must be of a cluster for a batch job",
    "t.parquet o.csv --preprocess imagenet": "--preprocess is for folders of images, got",
    "x=t.csv o.csv": "a table has names of its own; give --input 't.csv' without 'x='",
    "none.csv o.csv": "--input must be a file or a folder, got 'none.csv'",
    "bad.parquet o.csv": "--input 'bad.parquet' cannot be read",
    "x.npy o.csv --columns a": "--columns is for tables, got 'x.npy'",
    "empty o.csv": "--input 'empty' must contain .parquet files or images, got none",
    "x.npy o.npz --columns a": "--columns needs a table or a folder of images as --input",
}


@pytest.mark.parametrize(("arguments", "message"), BAD.items())
def test_bad_input_gets_one_line(arguments: str, message: str, folder: Path) -> None:
    Path("empty").mkdir()
    Path("bad.parquet").write_bytes(b"bad")
    source, output, *options = arguments.split()
    found = ferroflow("run", "--model", "two.onnx", "--input", source, "--output", output, *options)
    assert_one_line(found.exit_code, found.stderr, 2, re.escape(message))


@pytest.mark.parametrize(
    ("column", "type_of_input", "message"),
    [
        ([1, None, 3], "int64", "'v' has missing values, the model takes int64[n]; replace them, as with"),
        (["a", None, "c"], "string", "'v' has the value nan, the model takes texts; replace it"),
        (["a", "b", "c"], "float", "'v' has dtype object, the model takes float32[n]; convert it"),
        ([2**40, 1, 2], "int32", "'v' has dtype int64, the model takes int32[n]; convert it"),
        ([[1.0], [1.0, 2.0], [3.0]], "float", "rows of column 'v' have different shapes"),
    ],
    ids=["an empty integer", "an empty text", "texts for numbers", "too large", "lists of two lengths"],
)
def test_jobs_and_map_batches_raise_the_same_error(
    column: list[Any], type_of_input: str, message: str, folder: Path
) -> None:
    number = TensorProto.DataType.Value(type_of_input.upper())
    model = model_of([NODE("Identity", ["v"], ["y"])], {"v": (number, ("n",))}, ["y"])
    pd.DataFrame({"v": column}).to_parquet("v.parquet")
    with pytest.raises(BindError) as of_job:
        job_of(graph_from_onnx(model), "v.parquet", "o.parquet", batch=8)
    batches = load_onnx(model).map_batches
    with pytest.raises(BindError) as of_frame:
        batches(pd.read_parquet("v.parquet")).compute(scheduler="sync")
    assert message in str(of_job.value)
    assert str(of_job.value) in str(of_frame.value)


def test_lists_of_lists_categories_and_nullable_columns_are_inputs(folder: Path) -> None:
    nodes = [NODE("Mul", ["m", "v"], ["y"]), NODE("Identity", ["t"], ["u"])]
    inputs = {
        "m": (TensorProto.FLOAT, ("n", 2, 3)),
        "v": (TensorProto.FLOAT, ("n", 1, 1)),
        "t": (TensorProto.STRING, ("n",)),
    }
    onnx.save(model_of(nodes, inputs, ["y", "u"]), "nested.onnx")
    m = np.arange(24, dtype="float32").reshape(4, 2, 3)
    v = pd.array([1, None, 3, 4], dtype="Int64")
    t = pd.Categorical(["a", "b", "a", "b"])
    pd.DataFrame({"m": m.tolist(), "v": [[[x]] for x in [1.0, np.nan, 3, 4]], "t": t, "w": v}).to_parquet(
        "n.parquet"
    )
    job("nested.onnx", "n.parquet", "o.parquet")
    found = pd.read_parquet("o.parquet")
    y = np.stack([np.stack(row) for row in found["y"]])
    np.testing.assert_array_equal(y, m * np.reshape([1, np.nan, 3, 4], (4, 1, 1)))
    assert found["u"].tolist() == ["a", "b", "a", "b"]
    onnx.save(model_of([NODE("Neg", ["w"], ["z"])], {"w": (TensorProto.FLOAT, ("n", 1))}, ["z"]), "neg.onnx")
    job("neg.onnx", "n.parquet", "o.parquet")
    np.testing.assert_array_equal(pd.read_parquet("o.parquet")["z"], [-1, np.nan, -3, -4])
