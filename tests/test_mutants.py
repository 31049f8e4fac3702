"""Mutated models on a cluster: an error of ours in one line, or what another implementation computes.

500 mutants run by default, as many as FERROFLOW_MUTANTS says otherwise.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from agreement import assert_same
from distributed import Client
from models import convolution, if_model, mlp, model_of
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ferroflow_dask import install
from ferroflow_dask.exceptions import FerroflowError
from ferroflow_dask.graph import graph_from_onnx, random_inputs
from ferroflow_dask.lowering import bind_graph

pytestmark = pytest.mark.cluster
N_MUTANTS = int(os.environ.get("FERROFLOW_MUTANTS", "500"))
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


def others(content: bytes, inputs: dict[str, Any]) -> list[list[Any]]:
    """Return what onnxruntime and the reference compute, as far as they do."""
    found = []
    for run in (_reference, _onnxruntime):
        try:
            found.append(run(content, inputs))
        except Exception:  # noqa: BLE001 -- it has no answer, whatever the reason
            continue
    return found


def _reference(content: bytes, inputs: dict[str, Any]) -> list[Any]:
    return list(ReferenceEvaluator(onnx.load_from_string(content)).run(None, inputs))


def _onnxruntime(content: bytes, inputs: dict[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return list(onnxruntime.InferenceSession(content, options).run(None, inputs))


def agrees(found: list[Any], expected: list[Any]) -> bool:
    try:
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, 1e-3, 1e-4)
    except AssertionError:
        return False
    return True


@pytest.mark.timeout(max(180, N_MUTANTS))
def test_a_mutant_is_an_error_of_ours_or_a_right_result(process_client: Client) -> None:
    install(process_client)
    workers = process_client.run(os.getpid)
    ended: Counter[str] = Counter()
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(N_MUTANTS):
            content = mutant(seed)
            try:
                graph = graph_from_onnx(content)
                inputs = random_inputs(graph, seed)
                found = list(process_client.compute(bind_graph(graph, inputs)).result(timeout=120).values())
            except FerroflowError as error:
                ended[type(error).__name__] += 1
                ended["long"] += "\n" in str(error)
                continue
            expected = others(content, inputs)
            ended["results"] += 1
            if expected and not any(agrees(found, other) for other in expected):
                wrong.append(seed)
    assert wrong == []
    assert ended["long"] == 0
    assert process_client.run(os.getpid) == workers
    assert min(ended["results"], ended["ModelError"], ended["KernelError"]) > N_MUTANTS / 50, ended
