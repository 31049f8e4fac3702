"""Models that are changed in one place, at random."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
from models import convolution, if_model, mlp, model_of
from onnx import TensorProto, helper

ODD = (-3, -1, 0, 1, 2, 5, 10**6, 2**40)


OPERATORS = (
    *("Add", "MatMul", "Conv", "Relu", "Reshape", "Gather", "Resize", "Loop"),
    *("Nope", "MaxPool", "Transpose", "Split", "Concat", "TopK", "GRU"),
)


OUTSIDE = ("../../etc/passwd", "/etc/hostname", "w.bin", "a/../../b")


node = helper.make_node


def reshapes() -> onnx.ModelProto:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Slice", ["s", "a", "b"], ["n"]),
        node("Concat", ["n", "k"], ["t"], axis=0),
        node("Reshape", ["x", "t"], ["r"]),
        node("Transpose", ["r"], ["q"], perm=[1, 0, 2]),
        node("Softmax", ["q"], ["z"], axis=-1),
        node("ReduceMean", ["z"], ["y"], keepdims=0),
    ]
    constants = {"a": np.int64([0]), "b": np.int64([1]), "k": np.int64([2, 3])}
    return model_of(nodes, {"x": (TensorProto.FLOAT, (4, 6))}, ["y"], opset=13, initializers=constants)


def attention() -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    nodes = [
        node("MatMul", ["x", "wq"], ["q"]),
        node("MatMul", ["x", "wk"], ["k"]),
        node("Transpose", ["k"], ["kt"], perm=[1, 0]),
        node("MatMul", ["q", "kt"], ["a"]),
        node("Softmax", ["a"], ["p"]),
        node("MatMul", ["p", "x"], ["o"]),
        node("Gather", ["o", "i"], ["g"]),
        node("Cast", ["g"], ["y"], to=TensorProto.FLOAT),
    ]
    weights: dict[str, Any] = {name: rng.standard_normal((8, 8), np.float32) for name in ("wq", "wk")}
    weights["i"] = np.int64([0, 2, 4])
    return model_of(nodes, {"x": (TensorProto.FLOAT, (5, 8))}, ["y"], initializers=weights)


def mutant(seed: int) -> bytes:
    """Return one of five models, changed in one or two places."""
    rng = random.Random(seed)
    models = (lambda: mlp(hidden=8), if_model, convolution, reshapes, attention)
    model = models[seed % len(models)]()
    for _ in range(rng.choice([1, 1, 2])):
        change = rng.choice([*CHANGES, None])
        if change is None:
            content = bytearray(model.SerializeToString())
            for _ in range(3):
                content[rng.randrange(len(content))] = rng.randrange(256)
            return bytes(content)
        change(rng, model.graph)
        if not model.graph.node:
            break
    return bytes(model.SerializeToString())


def attribute(rng: random.Random, graph: onnx.GraphProto) -> None:
    of_node = rng.choice(graph.node).attribute
    if of_node:
        chosen = rng.choice(of_node)
        if chosen.type == onnx.AttributeProto.INT:
            chosen.i = rng.choice(ODD)
        elif chosen.type == onnx.AttributeProto.INTS and chosen.ints:
            chosen.ints[rng.randrange(len(chosen.ints))] = rng.choice(ODD)


def operand(rng: random.Random, graph: onnx.GraphProto) -> None:
    inputs = rng.choice(graph.node).input
    values = [value for other in graph.node for value in (*other.output, *other.input)]
    if inputs:
        inputs[rng.randrange(len(inputs))] = rng.choice([*values, ""])


def operator(rng: random.Random, graph: onnx.GraphProto) -> None:
    rng.choice(graph.node).op_type = rng.choice(OPERATORS)


def size(rng: random.Random, graph: onnx.GraphProto) -> None:
    if graph.initializer:
        dims = rng.choice(graph.initializer).dims
        if dims:
            dims[rng.randrange(len(dims))] = rng.choice([0, 1, 2, 7, -1, 10**9])


def element(rng: random.Random, graph: onnx.GraphProto) -> None:
    if graph.initializer:
        rng.choice(graph.initializer).data_type = rng.randrange(0, 25)


def missing(rng: random.Random, graph: onnx.GraphProto) -> None:
    del graph.node[rng.randrange(len(graph.node))]


def elsewhere(rng: random.Random, graph: onnx.GraphProto) -> None:
    if graph.initializer:
        tensor = rng.choice(graph.initializer)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=rng.choice(OUTSIDE))


def input_shape(rng: random.Random, graph: onnx.GraphProto) -> None:
    dims = graph.input[0].type.tensor_type.shape.dim
    if dims:
        rng.choice(dims).dim_value = rng.choice([0, 1, 3, 9, -1])


CHANGES = (attribute, operand, operator, size, element, missing, elsewhere, input_shape)
