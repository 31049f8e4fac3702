"""Importing whole ONNX models: published architectures, every form of input, large weights."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from agreement import assert_equal_to_reference
from models import light_models, mlp, model_of
from onnx import TensorProto
from onnx.helper import make_node as node

from ferroflow_dask.exceptions import ModelError
from ferroflow_dask.graph import TensorSpec, from_onnx, graph_from_onnx


@pytest.mark.parametrize("path", light_models(), ids=lambda path: path.stem)
def test_published_architectures_have_their_layers(path):
    graph = graph_from_onnx(path)
    assert graph.name == path.stem
    assert Counter(op.kind for op in graph.ops) == Counter(
        node.op_type for node in onnx.load(path).graph.node
    )
    (data,) = graph.inputs.values()
    assert data == TensorSpec.of("float32", (1, 3, 224, 224))
    (output,) = graph.outputs
    assert graph.spec(output).shape in [(1, 1000), (1, 1000, 1, 1)]
    assert all(
        graph.spec(value).size is not None for op in graph.ops for value in op.outputs if op.kind == "Conv"
    )


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
