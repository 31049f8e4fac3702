"""Initializers that a model lists as inputs, too, are defaults: whoever computes it may give others."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
import onnx
import pytest
from agreement import assert_equal_to_reference, assert_same
from command_line import USAGE, answer, assert_one_line, ferroflow
from dask._task_spec import Task
from distributed import Client
from models import model_of, reference
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.helper import make_node as node

from ferroflow_dask import Model
from ferroflow_dask.annotations import is_scattered_key
from ferroflow_dask.bench import run_on_cluster
from ferroflow_dask.cli.batches import in_batches, run_batches
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.exceptions import BindError
from ferroflow_dask.graph import Graph, graph_from_onnx, random_inputs
from ferroflow_dask.graph.defaults import with_inputs
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.lowering import bind_graph, scatter

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
#: Below and above the size [B] from which on weights travel beside a graph.
WIDTHS = (3, 1200)


def layer(width: int, ir_version: int = 8) -> onnx.ModelProto:
    """Return y = relu(x) * w + b, where `w` may be given, and `b` may not from IR version 4 on."""
    nodes = [node("Relu", ["x"], ["r"]), node("Mul", ["r", "w"], ["m"]), node("Add", ["m", "b"], ["y"])]
    inputs: dict[str, Any] = {"x": (FLOAT, ["rows", width]), "w": (FLOAT, [width])}
    if ir_version < 4:  # which lists them all
        inputs["b"] = (FLOAT, [width])
    initializers = {"w": np.full(width, 2, np.float32), "b": np.arange(width, dtype=np.float32)}
    return model_of(nodes, inputs, ["y"], initializers=initializers, opset=13, ir_version=ir_version)


def given(width: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return an input, and what may be given in place of the default."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((6, width), np.float32), rng.standard_normal(width, np.float32)


@pytest.mark.parametrize("ir_version", [3, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_default_counts_until_another_value_is_given(width: int, ir_version: int) -> None:
    model = layer(width, ir_version)
    graph = graph_from_onnx(model)
    x, w = given(width)
    assert list(graph.inputs) == ["x"]
    assert list(graph.defaults) == (["w", "b"] if ir_version == 3 else ["w"])
    assert_equal_to_reference(model, graph, x=x)
    assert_equal_to_reference(model, graph, x=x, w=w)
    assert_equal_to_reference(model, graph, x=x)  # the graph is what it was


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("granularity", ["ops", "bundles", "whole"])
@pytest.mark.parametrize("providers", [None, ["array", "reference"]], ids=["session", "op by op"])
def test_bound_graphs_take_it(width: int, granularity: str, providers: list[str] | None) -> None:
    model = layer(width)
    graph = graph_from_onnx(model)
    x, w = given(width)
    for inputs in ({"x": x, "w": w}, {"x": x}):
        bound = bind_graph(
            graph, inputs, granularity=granularity, profile=ClusterProfile((1, 1)), providers=providers
        )
        assert bound.granularity == granularity
        assert_same(bound.compute(scheduler="sync")["y"], reference(model, inputs)["y"])


@pytest.mark.cluster
@pytest.mark.parametrize("width", WIDTHS)
def test_a_placed_default_gives_way(process_client: Client, width: int) -> None:
    model = layer(width)
    graph = scatter(graph_from_onnx(model), process_client)
    x, w = given(width)
    for inputs in ({"x": x, "w": w}, {"x": x}):
        expected = reference(model, inputs)["y"]
        for granularity in ("ops", "whole"):
            bound = bind_graph(graph, inputs, granularity=granularity)
            assert_same(process_client.compute(bound).result()["y"], expected)
        batches = Model(graph).map_batches({**inputs, "x": da.from_array(x, (2, -1))})
        assert_same(process_client.compute(batches).result(), expected)


def test_shapes_that_a_default_does_not_reach_are_kept() -> None:
    nodes = [
        node("NonZero", ["x"], ["places"]),  # of how many, only the model says
        node("Cast", ["places"], ["p"], to=FLOAT),
        node("Mul", ["p", "w"], ["y"]),
    ]
    model = model_of(
        nodes, {"x": (FLOAT, [6]), "w": (FLOAT, ["n"])}, ["y"], initializers={"w": np.ones(1, np.float32)}
    )
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("places", INT64, [1, 6]))
    graph = graph_from_onnx(model)
    opened = with_inputs(graph, ["w"])
    assert [graph.spec(name).shape for name in ("places", "p")] == [(1, 6), (1, 6)]
    assert [opened.spec(name) for name in ("places", "p")] == [graph.spec(name) for name in ("places", "p")]


def test_indices_of_a_slice_may_be_given() -> None:
    inputs = {"x": (FLOAT, [6]), **{name: (INT64, [1]) for name in ("starts", "ends")}}
    values = {"starts": np.int64([1]), "ends": np.int64([3])}
    nodes = [node("Slice", ["x", "starts", "ends"], ["s"]), node("Relu", ["s"], ["y"])]
    model = model_of(nodes, inputs, [], initializers=values)
    model.graph.output.append(onnx.helper.make_tensor_value_info("y", FLOAT, ["n"]))
    graph = graph_from_onnx(model)
    x = np.arange(6, dtype=np.float32)
    assert graph.spec("s").shape == (2,)
    assert with_inputs(graph, ["ends"]).spec("s").size is None
    for more in ({}, {"ends": np.int64([6])}, {"starts": np.int64([5]), "ends": np.int64([6])}):
        assert_equal_to_reference(model, graph, x=x, **more)
        bound = bind_graph(graph, {"x": x, **more}, granularity="ops")
        assert_same(bound.compute(scheduler="sync")["y"], reference(model, {"x": x, **more})["y"])


def test_a_body_of_an_if_may_read_a_default() -> None:
    def branch(op_type: str) -> onnx.GraphProto:
        out = onnx.helper.make_tensor_value_info(op_type, FLOAT, [3])
        return onnx.helper.make_graph([node(op_type, ["x", "w"], [op_type])], op_type, [], [out])

    fork = node("If", ["c"], ["y"], then_branch=branch("Add"), else_branch=branch("Mul"))
    inputs = {"x": (FLOAT, [3]), "c": (TensorProto.BOOL, []), "w": (FLOAT, [3])}
    model = model_of([fork], inputs, ["y"], initializers={"w": np.float32([1, 2, 3])})
    graph = graph_from_onnx(model)
    x, w = np.float32([4, 5, 6]), np.float32([7, 8, 9])
    for c in (np.array(True), np.array(False)):
        assert_equal_to_reference(model, graph, x=x, c=c)
        assert_equal_to_reference(model, graph, x=x, c=c, w=w)
        for granularity in ("ops", "whole"):
            bound = bind_graph(graph, {"x": x, "c": c, "w": w}, granularity=granularity)
            assert_same(bound.compute(scheduler="sync")["y"], x + w if c else x * w)


def test_of_many_defaults_some_are_named() -> None:
    names = [f"w{i}" for i in range(9)]
    total = node("Sum", ["x", *names], ["y"])
    inputs = {name: (FLOAT, [2]) for name in ("x", *names)}
    graph = graph_from_onnx(
        model_of([total], inputs, ["y"], initializers=dict.fromkeys(names, np.float32([1, 2])))
    )
    message = r"and, if given, w0: float32\[2\], w1: float32\[2\], w2: float32\[2\], …$"
    with pytest.raises(BindError, match=message):
        Model(graph).bind(z=1)
    html = Model(graph)._repr_html_()
    assert "w0: float32[2]" in html
    assert "w7: float32[2], …<" in html


@pytest.mark.parametrize("error", [TypeError, KeyError, RuntimeError])
def test_a_graph_that_onnx_cannot_hold_is_bound_all_the_same(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> Any:
        raise error("it cannot be written")

    graph = graph_from_onnx(layer(3))
    with monkeypatch.context() as patch:
        patch.setattr("ferroflow_dask.graph.inference.to_onnx", failing)
        opened = with_inputs(graph, ["w"])
    assert [str(opened.spec(name)) for name in "rmy"] == ["float32[rows, 3]", *["float32[…]"] * 2]


@pytest.mark.cluster
def test_a_record_knows_the_session_of_a_graph_with_a_given_default(process_client: Client) -> None:
    graph = graph_from_onnx(layer(3))
    x, w = given(3)
    run = run_on_cluster(
        graph, {"x": x, "w": w}, process_client, policy="dask", processes=True, granularity="whole"
    )
    assert run.record.in_session


@pytest.mark.cluster
def test_what_goes_whole_with_batches_is_on_the_workers_before_the_clock_starts(
    process_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the tasks that are timed have it, nor one of the workers alone."""
    width = 100_000
    x, w = given(width)
    graph = with_inputs(graph_from_onnx(layer(width)), ["w"])
    compute = process_client.compute
    placed: list[int] = []

    def watched(collections: Any) -> Any:
        tasks = {key: task for one in collections for key, task in dict(one.__dask_graph__()).items()}
        assert len(cloudpickle.dumps(tasks)) < w.nbytes
        read = set().union(*(task.dependencies for task in tasks.values() if isinstance(task, Task)))
        # Of other keys Dask's active memory manager would leave one copy.
        placed.append(sum(map(is_scattered_key, read)))
        return compute(collections)

    monkeypatch.setattr(process_client, "compute", watched)
    arrays = in_batches(graph_from_onnx(layer(width)), {"x": x, "w": w}, 2, lambda: 1, seed=0)
    with process_client.as_current():
        outputs, _ = run_batches(graph, arrays, process_client, repeat=1)
    assert_same(outputs["y"], reference(layer(width), {"x": x, "w": w})["y"])
    assert placed == [2, 2]  # `b`, which is a constant, and `w`


def test_the_graph_with_an_input_for_its_default_is_made_once() -> None:
    graph: Graph = pickle.loads(pickle.dumps(graph_from_onnx(layer(3))))
    assert with_inputs(graph, ["x", "z"]) is graph
    assert with_inputs(graph, ["x", "w"]) is with_inputs(graph, ["w"])
    assert list(with_inputs(graph, ["w"]).inputs) == ["x", "w"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"w": np.zeros(3)}, r"'w' has dtype float64, the graph takes float32\[3\]"),
        ({"w": np.zeros(4, np.float32)}, r"'w' has shape \[4\], the graph takes float32\[3\]"),
        ({"b": np.zeros(3, np.float32)}, r"no input 'b'; it takes x: .*; and, if given, w: float32\[3\]$"),
    ],
    ids=["dtype", "shape", "a constant"],
)
def test_what_does_not_fit_is_refused(inputs: dict[str, Any], message: str) -> None:
    graph = graph_from_onnx(layer(3))
    x = np.zeros((1, 3), np.float32)
    with pytest.raises(BindError, match=message):
        Model(graph).bind(x=x, **inputs)
    with pytest.raises(BindError, match=message):
        evaluate(graph, {"x": x, **inputs})


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(layer(3), "layer.onnx")
    for name, value in zip("xw", given(3), strict=True):
        np.save(f"{name}.npy", value)
    return tmp_path


LOCAL = ("--workers", "1", "--no-processes")


@pytest.mark.parametrize("is_drawn", [False, True], ids=["", "with an input that is drawn"])
@pytest.mark.parametrize(
    "how",
    [("--policy", "sequential"), LOCAL, (*LOCAL, "--batch", "2")],
    ids=["without Dask", "on a cluster", "in batches"],
)
def test_the_command_line_takes_it(files: Path, how: tuple[str, ...], is_drawn: bool) -> None:
    inputs = ("--input", "w=w.npy", *(() if is_drawn else ("--input", "x=x.npy")))
    told = answer("run", "--model", "layer.onnx", *inputs, "--output", "y.npz", *how)
    assert ("inputs were drawn at random" in told.stderr) == is_drawn
    x, w = given(3)
    with np.load(files / "y.npz") as written:
        y = written["y"]
    if is_drawn:
        x = random_inputs(graph_from_onnx(layer(3)), 0, len(y))["x"]
    assert_same(y, reference(layer(3), {"x": x, "w": w})["y"])


def test_the_command_line_tells_of_it(files: Path) -> None:
    facts = json.loads(answer("info", "--model", "layer.onnx", "--json").stdout)
    assert (facts["inputs"], facts["defaults"]) == ({"x": "float32[rows, 3]"}, {"w": "float32[3]"})
    np.save(files / "w.npy", np.zeros(3))
    told = ferroflow("run", "--model", "layer.onnx", "--input", "x=x.npy", "--input", "w=w.npy")
    assert_one_line(told.exit_code, told.stderr, USAGE, r"save array.astype\('float32'\) in 'w.npy'")
