"""Models that are tried out before they take batches: dependent rows, declared outputs, real rows."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import onnx
import pytest
from batches import rows
from distributed import Client
from models import model_of
from onnx import TensorProto, helper
from onnx.helper import make_node as node

from ferroflow_dask import load_onnx
from ferroflow_dask.cli.batches import in_batches
from ferroflow_dask.exceptions import BindError, UnknownNameError, UsageError
from ferroflow_dask.graph.outputs import with_outputs
from ferroflow_dask.lowering import trials
from ferroflow_dask.lowering.batches import how_batched, map_batches

pytestmark = pytest.mark.usefixtures("_no_cluster")
TRY_OUT = trials.try_out
X = da.zeros((6, 3), chunks=2, dtype=np.float32)
FLOAT = TensorProto.FLOAT


def one_op(*arguments: Any, n: int | str = "n", element: int = FLOAT, **more: Any) -> onnx.ModelProto:
    """Return a model of one op on `x`, n rows of three numbers."""
    constants = more.pop("initializers", None)
    node = helper.make_node(arguments[0], ["x", *arguments[1:]], ["y"], **more)
    return model_of([node], {"x": (element, (n, 3))}, ["y"], initializers=constants)


DEPENDENT = {
    "any number of rows": one_op("Softmax", axis=0),
    "two rows at a time": one_op("Softmax", axis=0, n=2),
    "four rows at a time, the last of which is repeated": one_op("Softmax", axis=0, n=4),
    "rows whose place counts": one_op("Add", "c", n=2, initializers={"c": np.float32([[1], [2]])}),
    "integers": one_op("CumSum", "axis", element=TensorProto.INT64, initializers={"axis": np.int64(0)}),
    "the number of rows": model_of(
        [
            helper.make_node("Shape", ["x"], ["n"], end=1),
            helper.make_node("Cast", ["n"], ["float_n"], to=FLOAT),
            helper.make_node("Div", ["x", "float_n"], ["y"]),
        ],
        {"x": (FLOAT, ("n", 3))},
        ["y"],
    ),
    "half precision": one_op("Softmax", axis=0, element=TensorProto.FLOAT16),
}


@pytest.mark.parametrize("model", DEPENDENT.values(), ids=DEPENDENT)
def test_a_model_whose_rows_depend_on_each_other_is_refused(model: onnx.ModelProto) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    x = da.from_array(rows(8, 3).astype(dtype), chunks=4)
    for ask in (map_batches, how_batched):
        with pytest.raises(
            BindError, match=r"^rows of model 'test' depend on each other .* with bind, or without --batch$"
        ):
            ask(load_onnx(model).graph, x)


def branch(node: onnx.NodeProto) -> onnx.GraphProto:
    result = helper.make_tensor_value_info(node.output[0], FLOAT, (3,))
    return helper.make_graph([node], node.op_type, [], [result])


NOT_TRIED = {
    "random numbers": one_op("RandomNormalLike"),
    "dropout in training": one_op(
        "Dropout", "r", "t", initializers={"r": np.float32(0.5), "t": np.bool_(True)}
    ),
    "a random number inside of a branch": model_of(
        [
            helper.make_node(
                "If",
                ["c"],
                ["r"],
                then_branch=branch(helper.make_node("RandomNormal", [], ["t"], shape=[3])),
                else_branch=branch(helper.make_node("Identity", ["zero"], ["e"])),
            ),
            helper.make_node("Add", ["x", "r"], ["y"]),
        ],
        {"x": (FLOAT, ("n", 3))},
        ["y"],
        initializers={"c": np.bool_(True), "zero": np.float32([0, 0, 0])},
    ),
    "one row at a time": one_op("Softmax", axis=0, n=1),
    "texts": one_op("Identity", element=TensorProto.STRING),
}


@pytest.mark.parametrize("model", NOT_TRIED.values(), ids=NOT_TRIED)
def test_what_cannot_be_tried_out_is_computed(model: onnx.ModelProto) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    x = np.ones((8, 3), np.float32).astype("U" if dtype.kind == "O" else dtype).astype(dtype)
    found = load_onnx(model).map_batches(da.from_array(x, chunks=4))
    assert found.compute(scheduler="sync").shape == (8, 3)


def test_a_model_that_magnifies_rounding_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded_otherwise_alone(*arguments: Any) -> tuple[Any, ...]:
        return tuple(y * np.float32(1.004 if len(y) == 1 else 1) for y in TRY_OUT(*arguments))

    monkeypatch.setattr(trials, "try_out", rounded_otherwise_alone)
    assert load_onnx(one_op("Relu")).map_batches(X).shape == (6, 3)


def test_a_model_is_tried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(trials, "try_out", lambda *arguments: runs.append(1) or TRY_OUT(*arguments))
    graph = load_onnx(one_op("Relu"))
    for n in (4, 6):
        graph.map_batches(X[:n])
        assert len(runs) == 4
    load_onnx(one_op("Relu", n=1)).map_batches(X)
    assert len(runs) == 4 + 2  # as it is, and freed


def test_texts_are_tried_out_with_texts() -> None:
    node = helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER")
    model = model_of([node], {"x": (TensorProto.STRING, ("n",))}, ["y"])
    # It may leave texts out, so how many come out ONNX cannot tell.
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.STRING, ["m"]))
    words = np.array(["A", "bC", "d", "E", "F"], object)
    y = load_onnx(model).map_batches(da.from_array(words, chunks=2))
    assert y.compute(scheduler="sync").tolist() == ["a", "bc", "d", "e", "f"]


def test_what_goes_whole_with_each_batch_is_told_where_shapes_do_not_fit() -> None:
    add = helper.make_node("Add", ["x", "b"], ["s"])
    take = helper.make_node("Compress", ["s", "which"], ["y"], axis=1)
    inputs = {"x": (FLOAT, ("n", 3)), "b": (FLOAT, ("m", 3))}
    which = {"which": np.array([True, False, True])}
    model = load_onnx(model_of([add, take], inputs, ["y"], initializers=which))
    with pytest.raises(BindError, match=r"tried out with zeros: .*; 'b' goes whole with every batch$"):
        model.map_batches({"x": X, "b": np.zeros((6, 3), np.float32)})


@pytest.mark.parametrize("has_default", [False, True])
def test_batches_on_the_command_line_take_all_inputs_as_rows(has_default: bool) -> None:
    scales = [helper.make_node("Mul", ["x", "k"], ["z"]), helper.make_node("Mul", ["z", "w"], ["y"])]
    types = {"x": (FLOAT, ("n", 4)), "k": (FLOAT, (4,)), **({"w": (FLOAT, (4,))} if has_default else {})}
    model = model_of(scales, types, ["y"], initializers={"w": np.ones(4, np.float32)})
    inputs = {"x": np.ones((4, 4), np.float32), **dict.fromkeys([*types][1:], np.ones(4, np.float32))}
    which = "without a default " if has_default else ""
    with pytest.raises(BindError, match=f"--batch takes all inputs {which}as rows"):
        in_batches(load_onnx(model).graph, inputs, 2, lambda: 1, seed=0)
    with pytest.raises(
        BindError, match=r"inputs of \[4, 6\] rows make no batches; --batch takes each of them"
    ):
        in_batches(load_onnx(model).graph, {**inputs, "x": np.ones((6, 4), np.float32)}, 2, lambda: 1, seed=0)


def test_what_is_tried_out_may_be_on_a_cluster_without_the_model(process_client: Client) -> None:
    add, take = (
        helper.make_node("Add", ["x", "b"], ["s"]),
        helper.make_node("Compress", ["s", "which"], ["y"], axis=1),
    )
    inputs = {"x": (FLOAT, ("n", 3)), "b": (FLOAT, (3,))}
    which = {"which": np.array([True, False, True])}
    model = load_onnx(model_of([add, take], inputs, ["y"], initializers=which))
    x, b = np.ones((6, 3), np.float32), np.arange(3, dtype=np.float32)
    y = model.map_batches({"x": da.from_array(x, (2, -1)), "b": process_client.scatter(b, broadcast=True)})
    np.testing.assert_array_equal(process_client.compute(y).result(), (x + b)[:, ::2])


INT64 = TensorProto.INT64


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


HEADED = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


def test_outputs_are_chosen_and_others_are_not_computed() -> None:
    loaded = load_onnx(two_heads())
    x = da.from_array(HEADED, chunks=(2, -1))
    right = loaded.map_batches(x, outputs=["b"]).compute(scheduler="sync")
    np.testing.assert_allclose(right, np.exp(HEADED), rtol=1e-5)
    found = loaded.map_batches(x, outputs=["b", "a"])
    assert list(found) == ["b", "a"]
    np.testing.assert_array_equal(found["a"].compute(scheduler="sync"), -HEADED)
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
        load_onnx(two_heads()).map_batches(HEADED, outputs=outputs)
