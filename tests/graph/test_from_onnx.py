"""Importing whole ONNX models: published architectures, every form of input, large weights."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from agreement import assert_equal_to_reference
from models import light_models, mlp, model_of, randomize
from onnx import TensorProto
from onnx.helper import make_node as node

from ferroflow_dask.exceptions import ModelError
from ferroflow_dask.graph import Graph, TensorSpec, from_onnx, graph_from_onnx
from ferroflow_dask.kernels import evaluate


def kinds(graph: Graph) -> dict[str, int]:
    return dict(Counter(op.kind for op in graph.ops))


#: Ops of each architecture as the files have them, apart from the `ConstantOfShape` nodes that stand for
#: weights; counted by hand from the published networks (layers) and checked with `onnx.load` (glue).
ARCHITECTURES = {
    "light_bvlc_alexnet": {"Conv": 5, "Gemm": 3, "LRN": 2, "MaxPool": 3, "Relu": 7, "Dropout": 2},
    "light_densenet121": {
        "Conv": 121,
        "BatchNormalization": 121,
        "Relu": 121,
        "Concat": 58,
        "AveragePool": 3,
    },
    "light_inception_v1": {"Conv": 57, "Gemm": 1, "Concat": 9, "MaxPool": 13, "Relu": 57, "LRN": 2},
    "light_inception_v2": {"Conv": 69, "BatchNormalization": 69, "Concat": 10, "AveragePool": 8, "Gemm": 1},
    "light_resnet50": {"Conv": 53, "BatchNormalization": 53, "Relu": 49, "Sum": 16, "Gemm": 1, "Softmax": 1},
    "light_shufflenet": {"Conv": 49, "BatchNormalization": 49, "Transpose": 16, "Sum": 13, "Concat": 3},
    "light_squeezenet": {"Conv": 26, "Relu": 26, "Concat": 8, "MaxPool": 3, "GlobalAveragePool": 1},
    "light_vgg19": {"Conv": 16, "Gemm": 3, "MaxPool": 5, "Relu": 18, "Softmax": 1},
    "light_zfnet512": {"Conv": 5, "Gemm": 3, "LRN": 2, "MaxPool": 3, "Softmax": 1},
}


@pytest.mark.parametrize("path", light_models(), ids=lambda path: path.stem)
def test_published_architectures_have_their_layers(path):
    graph = graph_from_onnx(path)
    assert graph.name == path.stem
    assert len(graph.ops) == len(onnx.load(path).graph.node)
    assert {kind: kinds(graph)[kind] for kind in ARCHITECTURES[path.stem]} == ARCHITECTURES[path.stem]
    (data,) = graph.inputs.values()
    assert data == TensorSpec.of("float32", (1, 3, 224, 224))
    (output,) = graph.outputs
    assert graph.spec(output).shape in [(1, 1000), (1, 1000, 1, 1)]
    assert all(
        graph.spec(value).size is not None for op in graph.ops for value in op.outputs if op.kind == "Conv"
    )


def test_every_architecture_is_covered():
    assert {path.stem for path in light_models()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["light_squeezenet", "light_shufflenet"])
def test_an_architecture_with_random_weights_tells_inputs_apart_as_onnx_reference_does(name):
    (path,) = (path for path in light_models() if path.stem == name)
    model = randomize(onnx.load(path), seed=1)
    graph = graph_from_onnx(model)
    (data,) = graph.inputs
    outputs = []
    for seed in (0, 1):
        x = np.random.default_rng(seed).standard_normal((1, 3, 224, 224), np.float32)
        (actual,) = evaluate(graph, {data: x}).values()
        (expected,) = evaluate(graph, {data: x}, providers=["reference"]).values()
        np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-6)
        outputs.append(actual)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.05 * outputs[0].max()
    assert outputs[0].max() < 0.9


def test_a_perceptron_from_its_file(tmp_path):
    model = mlp(seed=2)
    onnx.save(model, tmp_path / "mlp.onnx")
    graph = graph_from_onnx(tmp_path / "mlp.onnx")
    assert (graph.name, graph.outputs, kinds(graph)) == ("mlp", ("y",), {"Gemm": 3, "Relu": 2})
    assert graph.inputs == {"x": TensorSpec.of("float32", ("batch", 784))}
    assert graph.spec("y") == TensorSpec.of("float32", ("batch", 10))
    assert set(graph.constants) == {"w0", "b0", "w1", "b1", "w2", "b2"}
    for batch in (1, 5):
        assert_equal_to_reference(model, graph, x=np.full((batch, 784), 0.1, np.float32))


@pytest.mark.parametrize("form", ["path", "text", "bytes", "message"])
def test_a_model_is_a_path_or_bytes_or_a_message(tmp_path, form):
    model = mlp()
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    given = {"path": path, "text": str(path), "bytes": path.read_bytes(), "message": model}[form]
    before = model.SerializeToString(deterministic=True)
    assert len(graph_from_onnx(given).ops) == 5
    assert graph_from_onnx(given, name="mine").name == "mine"
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("limit", [0, 64, 10**9])
def test_weights_withheld_from_checker_and_inference_are_all_there(monkeypatch, limit):
    monkeypatch.setattr(from_onnx, "_LARGE", limit)
    checked = []
    check = onnx.checker.check_model
    monkeypatch.setattr(
        onnx.checker, "check_model", lambda model: (checked.append(model.ByteSize()), check(model))
    )
    model = mlp()
    graph = graph_from_onnx(model)
    assert graph.spec("h1").shape == ("batch", 32)
    assert_equal_to_reference(model, graph, x=np.ones((2, 784), np.float32))
    assert (checked[0] > 100_000) == (limit == 10**9)


def test_shapes_that_small_weights_decide_are_inferred():
    weight = np.zeros((8, 512), np.float32)  # large: withheld
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Reshape", ["h", "shape"], ["y"])]
    model = model_of(
        nodes,
        {"x": (TensorProto.FLOAT, [6, 8])},
        ["y"],
        initializers={"w": weight, "shape": np.int64([3, -1])},
    )
    assert graph_from_onnx(model).spec("y").shape == (3, 1024)


def test_a_weight_larger_than_the_limit_of_messages_is_no_obstacle(monkeypatch):
    model = mlp()
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", 10_000)
    assert len(graph_from_onnx(model).ops) == 5
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", 100)
    with pytest.raises(ModelError, match="more than 2 GiB of weights inside functions or sub-graphs"):
        graph_from_onnx(model)
