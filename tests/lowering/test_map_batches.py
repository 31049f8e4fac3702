"""Batches of Dask arrays through whole models: the same numbers as onnxruntime."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
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
from distributed.utils_test import captured_logger
from models import light_models, mlp, model_of, randomize
from onnx import TensorProto, helper

from ferroflow_dask import load_onnx
from ferroflow_dask.exceptions import BindError, KernelError, KernelNotFoundError, UsageError
from ferroflow_dask.kernels import session as sessions
from ferroflow_dask.lowering import batch_model as models
from ferroflow_dask.lowering.batch_model import LoadedModel

#: The quick ones of the nine, all of which can be freed.
FREED = [
    path for path in light_models() if any(name in path.stem for name in ("squeeze", "shuffle", "resnet"))
]


@pytest.mark.parametrize("providers", [None, ["array", "reference"]], ids=["session", "op by op"])
def test_batches_give_what_one_call_gives(providers: list[str] | None) -> None:
    model, x = mlp(), rows(23, 784)
    y = load_onnx(model).map_batches(da.from_array(x, chunks=(5, 300)), providers=providers)
    assert isinstance(y, da.Array)
    assert (y.shape, y.dtype, y.chunks[0]) == ((23, 10), np.float32, (5, 5, 5, 5, 3))
    np.testing.assert_allclose(y.compute(scheduler="sync"), expected(model, x=x)[0], rtol=1e-4, atol=1e-6)


def test_any_array_can_be_the_only_input() -> None:
    x = rows(10, 784)
    model = load_onnx(mlp())
    y = model.map_batches(x, batch=4)
    assert y.chunks[0] == (4, 4, 2)
    assert model.map_batches(da.from_array(x, chunks=3), batch=np.int64(5)).chunks[0] == (5, 5)
    np.testing.assert_allclose(
        y.compute(scheduler="sync"), model.map_batches(x).compute(scheduler="sync"), rtol=1e-5
    )


@pytest.mark.parametrize("path", FREED, ids=lambda path: path.stem)
def test_a_fixed_batch_is_freed(path: Path) -> None:
    model = randomize(onnx.load(path))
    (entry,) = (e for e in model.graph.input if e.name not in {t.name for t in model.graph.initializer})
    shape = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
    assert shape[0] == 1
    x = rows(3, *shape[1:])
    with captured_logger("ferroflow_dask", level="INFO") as log:
        y = load_onnx(model).map_batches(da.from_array(x, chunks=2))
    assert "was fixed and has been freed" in log.getvalue()
    one_by_one = np.concatenate([expected(model, **{entry.name: x[i : i + 1]})[0] for i in range(3)])
    found = y.compute(scheduler="sync")
    assert y.shape == found.shape == one_by_one.shape
    np.testing.assert_allclose(found, one_by_one, rtol=1e-3, atol=1e-4 * np.abs(one_by_one).max())


def depends_on_its_batch() -> onnx.ModelProto:
    """Two rows at a time, to which a constant of two rows is added; they are the same."""
    nodes = [helper.make_node("Add", ["x", "c"], ["y"])]
    c = np.float32([[1, 2, 3], [1, 2, 3]])
    return model_of(nodes, {"x": (TensorProto.FLOAT, (2, 3))}, ["y"], initializers={"c": c})


def test_what_cannot_be_freed_is_fed_piece_by_piece() -> None:
    x = rows(7, 3)
    with captured_logger("ferroflow_dask", level="INFO") as log:
        y = load_onnx(depends_on_its_batch()).map_batches(da.from_array(x, chunks=(4, 3)))
    assert "fed 2 at a time" in log.getvalue()
    np.testing.assert_allclose(y.compute(scheduler="sync"), x + np.float32([1, 2, 3]))
    none = load_onnx(depends_on_its_batch()).map_batches(da.from_array(x[:0], chunks=(4, 3)))
    assert none.compute(scheduler="sync").shape == (0, 3)


def test_ops_that_onnxruntime_computes_otherwise_are_computed_as_onnx_describes() -> None:
    nodes = [helper.make_node("DFT", ["x", "", "axis"], ["y"])]
    model = model_of(
        nodes, {"x": (TensorProto.FLOAT, ("n", 10, 1))}, ["y"], opset=20, initializers={"axis": np.int64(1)}
    )
    x = rows(4, 10, 1)
    y = load_onnx(model).map_batches(da.from_array(x, chunks=2)).compute(scheduler="sync")
    np.testing.assert_allclose(
        y[..., 0] + 1j * y[..., 1], np.fft.fft(x[..., 0], axis=1), rtol=1e-5, atol=1e-6
    )


def two_in_two_out() -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Add", ["x", "b"], ["z"])]
    batched = (TensorProto.FLOAT, ("n", 4))
    return model_of(
        nodes,
        {"x": batched, "b": batched, "w": (TensorProto.FLOAT, (4, 2))},
        ["y", "z"],
    )


def test_dicts_in_and_several_outputs() -> None:
    x, b, w = rows(9, 4), rows(9, 4), rows(4, 2)
    graph = load_onnx(two_in_two_out())
    found = graph.map_batches({"x": da.from_array(x, chunks=4), "b": da.from_array(b, chunks=3), "w": w})
    assert list(found) == ["y", "z"]
    assert found["y"].chunks == ((4, 4, 1), (2,))
    np.testing.assert_allclose(found["y"].compute(scheduler="sync"), x @ w, rtol=1e-5)
    y, z = da.compute(found["y"], found["z"], scheduler="sync")
    np.testing.assert_allclose(y, x @ w, rtol=1e-5)
    np.testing.assert_allclose(z, x + b)


def test_shapes_that_onnx_cannot_tell_are_tried_out() -> None:
    # The second dimension of y is computed from values.
    nodes = [
        helper.make_node("Tile", ["x", "tiles"], ["tiled"]),
        helper.make_node("NonZero", ["ones"], ["nz"]),
        helper.make_node("Squeeze", ["nz", "0"], ["nz0"]),
        helper.make_node("Gather", ["tiled", "nz0"], ["y"], axis=1),
    ]
    constants = {"0": np.int64([0]), "tiles": np.int64([1, 2]), "ones": np.float32([1, 0, 1, 1])}
    model = model_of(nodes, {"x": (TensorProto.FLOAT, ("n", 3))}, ["y"], initializers=constants)
    x = rows(5, 3)
    y = load_onnx(model).map_batches(da.from_array(x, chunks=2))
    assert y.shape == (5, 3)
    np.testing.assert_allclose(y.compute(scheduler="sync"), np.tile(x, (1, 2))[:, [0, 2, 3]])


def reduces_its_batch() -> onnx.ModelProto:
    nodes = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)]
    return model_of(nodes, {"x": (TensorProto.FLOAT, ("n", 3))}, ["y"])


def finds_what_is_not_zero() -> onnx.ModelProto:
    """Its output has two rows, as a batch may have by chance."""
    return model_of([helper.make_node("NonZero", ["x"], ["y"])], {"x": (TensorProto.FLOAT, ("n", 3))}, ["y"])


def picks_columns() -> onnx.ModelProto:
    """There are as many columns as rows."""
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], end=1),
        helper.make_node("Concat", ["n", "n"], ["t"], axis=0),
        helper.make_node("ConstantOfShape", ["t"], ["y"]),
    ]
    return model_of(nodes, {"x": (TensorProto.FLOAT, ("n", 3))}, ["y"])


def of_another_domain() -> onnx.ModelProto:
    nodes = [helper.make_node("Unheard", ["x"], ["y"], domain="some.where")]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, ("n", 3))}, ["y"], domains={"some.where": 1})
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", 3)))
    return model


X = da.zeros((4, 784), chunks=2, dtype=np.float32)
TWO = {"x": X[:, :4], "b": X[:, :4], "w": np.zeros((4, 2), np.float32)}
FRAME = dd.from_pandas(pd.DataFrame({"a": np.zeros(4, np.float32)}), npartitions=2)


@pytest.mark.parametrize(
    ("model", "x", "options", "error", "message"),
    [
        (mlp, X.astype(float), {}, BindError, r"dtype float64, the graph takes float32.*astype\('float32'\)"),
        (mlp, X[:, :3], {}, BindError, r"shape \[4, 3\], the graph takes float32"),
        (mlp, X[X.sum(axis=1) > 0], {}, BindError, "call compute_chunk_sizes"),
        (mlp, {"x": np.zeros((4, 784), np.float32)}, {}, BindError, "no input is a Dask array"),
        (mlp, {"y": X}, {}, BindError, "'y' is none of them"),
        (two_in_two_out, X, {}, BindError, "give a dict of arrays"),
        (two_in_two_out, {"x": X[:, :4]}, {}, BindError, "'b' is missing"),
        (two_in_two_out, {**TWO, "b": X[:3, :4]}, {}, BindError, "input 'b' has 3 rows, others have 4"),
        (mlp, X, {"batch": 0}, UsageError, "batch is 0; it must be a number of rows, at least 1"),
        (mlp, X, {"batch": True}, UsageError, "batch is True; it must be a number of rows, at least 1"),
        (mlp, FRAME, {}, BindError, "input 'x' takes 784 columns, got 1"),
        (mlp, {"x": dask.delayed(X)}, {}, BindError, r"no Dask array; pass x=dask.array.from_delayed\("),
        (mlp, {"x": db.range(4, 2)}, {}, BindError, "is a Bag, and no Dask array"),
        (mlp, np.float32(1), {}, BindError, r"has shape \(\); its first dimension must be the batch"),
        (two_in_two_out, {**TWO, "w": np.zeros((4, 2))}, {}, BindError, "'w' has dtype float64"),
        (two_in_two_out, {**TWO, "w": FRAME}, {}, BindError, "'w' is a DataFrame, and no Dask array"),
        (reduces_its_batch, X[:, :3], {}, BindError, r"output 'y' .* has no batch dimension"),
        (finds_what_is_not_zero, X[:, :3], {}, BindError, r"\(2, 0\) for 3 rows: it has no batch dim"),
        (
            picks_columns,
            X[:, :3],
            {},
            BindError,
            r"rows of shape \(2,\) in a batch of 2 and \(3,\) in one of 3",
        ),
        (of_another_domain, X[:, :3], {}, KernelNotFoundError, "some.where.Unheard, opset 1"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_runs(
    model: Any, x: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_onnx(model()).map_batches(x, **options)


def test_a_model_that_fails_is_named_with_what_it_was_given() -> None:
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"])]
    table = rows(5, 2)
    model = model_of(nodes, {"x": (TensorProto.INT64, ("n",))}, ["y"], initializers={"table": table})
    y = load_onnx(model).map_batches(da.from_array(np.int64([1, 99]), chunks=2))
    with pytest.raises(KernelError, match=r"model 'test' failed on \(x: int64\(2,\)\)"):
        y.compute(scheduler="sync")


def test_a_process_keeps_few_models_open() -> None:
    with pytest.raises(ZeroDivisionError):
        sessions._kept(("broken", ()), lambda: 1 / 0)
    for _ in range(sessions._KEPT + 2):
        load_onnx(mlp()).map_batches(X).compute(scheduler="sync")
    assert len(sessions._runners) == sessions._KEPT
    assert not sessions._opening


@pytest.mark.cluster
def test_what_goes_with_every_batch_may_be_a_future(thread_client: Client) -> None:
    x, w = rows(9, 4), rows(4, 2)
    graph = load_onnx(two_in_two_out())
    batched = {name: da.from_array(x, chunks=4) for name in "xb"}
    y = graph.map_batches({**batched, "w": thread_client.scatter(w)})["y"]
    np.testing.assert_allclose(thread_client.compute(y).result(), x @ w, rtol=1e-5)
    y = graph.map_batches({**batched, "w": thread_client.scatter(w.astype("f8"))})["y"]
    with pytest.raises(BindError, match="'w' has dtype float64, the graph takes float32"):
        thread_client.compute(y).result()


def test_shapes_follow_the_values_of_other_inputs() -> None:
    nodes = [helper.make_node("Slice", ["x", "zero", "end", "one"], ["y"])]
    constants = {"zero": np.int64([0]), "one": np.int64([1])}
    inputs = {"x": (TensorProto.FLOAT, ("n", 10)), "end": (TensorProto.INT64, (1,))}
    graph = load_onnx(model_of(nodes, inputs, ["y"], initializers=constants))
    x = da.from_array(rows(8, 10), chunks=(4, 10))
    for end in (3, 5):
        y = graph.map_batches({"x": x, "end": np.int64([end])})
        assert y.shape == y.compute(scheduler="sync").shape == (8, end)


def token_in(y: Any) -> str:
    """Return the name by which workers know the model that computes an array."""
    values = [getattr(node, "value", None) for node in dict(y.__dask_graph__()).values()]
    (token,) = {value.run.sealed.token for value in values if isinstance(value, LoadedModel)}
    return str(token)


def test_a_model_stays_open_whatever_the_values_of_other_inputs() -> None:
    graph, tokens = load_onnx(two_in_two_out()), set()
    for n in range(models._VALUES_KEPT + 2):
        x, w = rows(9 + n % 2, 4), rows(4, 2)
        batched = da.from_array(x, chunks=4)
        y = graph.map_batches({"x": batched, "b": batched, "w": w})["y"]
        np.testing.assert_allclose(y.compute(scheduler="sync"), x @ w, rtol=1e-5)
        tokens.add(token_in(y))
    assert len(tokens) == 1
    (prepared,) = models._prepared[graph.graph].values()
    assert len(prepared.by_values) == models._VALUES_KEPT


def test_a_batch_is_taken_only_beside_values_with_which_rows_are_independent() -> None:
    inputs = {"x": (TensorProto.FLOAT, (2, 3)), "axis": (TensorProto.INT64, ())}
    graph = load_onnx(model_of([helper.make_node("CumSum", ["x", "axis"], ["y"])], inputs, ["y"]))
    x = rows(6, 3)
    batches = da.from_array(x, chunks=6)
    for _ in range(2):
        y = graph.map_batches({"x": batches, "axis": np.int64(1)})
        np.testing.assert_allclose(y.compute(scheduler="sync"), x.cumsum(axis=1), rtol=1e-5, atol=1e-6)
        with pytest.raises(BindError, match="depend on each other"):
            graph.map_batches({"x": batches, "axis": np.int64(0)})


def test_what_was_prepared_goes_with_the_graph() -> None:
    graph = load_onnx(mlp())
    graph.map_batches(X).compute(scheduler="sync")
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None
