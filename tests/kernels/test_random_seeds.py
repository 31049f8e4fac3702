"""Random numbers from a seed that a model has: the same in every run, however the model is run."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnxruntime
import pytest
from models import model_of
from onnx import TensorProto
from onnx.helper import make_graph, make_node, make_tensor_value_info

from ferroflow_dask.graph import Builder, Graph, graph_from_onnx
from ferroflow_dask.graph.to_onnx import to_onnx
from ferroflow_dask.kernels import evaluate, make_plan
from ferroflow_dask.kernels.segments import plans
from ferroflow_dask.lowering import bind_graph

X = np.full((1, 30), 0.5, np.float32)

#: Whether they read an operand, and their attributes.
DRAWN: dict[str, tuple[bool, dict[str, Any]]] = {
    "RandomNormal": (False, {"shape": [1, 30]}),
    "RandomNormalLike": (True, {}),
    "RandomUniform": (False, {"shape": [1, 30]}),
    "RandomUniformLike": (True, {}),
    "Bernoulli": (True, {}),
    "Multinomial": (True, {"sample_size": 30}),
}


def graph_of(op_type: str, *seeds: dict[str, float]) -> Graph:
    """One op for each of the seeds, which yield y0, y1, …, each between others that may share a session."""
    reads, attributes = DRAWN[op_type]
    builder = Builder("drawn")
    operands = [builder.op("Abs", builder.input("x", "float32", (1, 30)))] if reads else []
    for i, seed in enumerate(seeds):
        value = builder.op(op_type, *operands, **attributes, **seed)
        builder.output(**{f"y{i}": builder.op("Abs", value)})
    return builder.to_graph()


def inputs_of(graph: Graph) -> dict[str, Any]:
    return {"x": X} if "x" in graph.inputs else {}


@pytest.mark.parametrize("op_type", DRAWN)
def test_a_seed_gives_the_same_numbers_in_every_run(op_type):
    graph = graph_of(op_type, {"seed": 3.0}, {"seed": 3.0}, {"seed": 4.0})
    inputs = inputs_of(graph)
    # One run of a new session of onnxruntime, without any code of ours.
    session = onnxruntime.InferenceSession(to_onnx(graph).SerializeToString())
    expected = dict(zip(graph.outputs, session.run(list(graph.outputs), inputs), strict=True))
    assert (expected["y0"] == expected["y1"]).all()
    assert (expected["y0"] != expected["y2"]).any()
    found = [evaluate(graph, inputs) for _ in range(2)]
    found += [bind_graph(graph, inputs, granularity="whole").compute(scheduler="sync") for _ in range(2)]
    plans.clear()
    plan = make_plan(graph, graph.live_ops, [*inputs], list(graph.outputs))
    for _ in range(3):
        values = plan.run(list(inputs.values()), ("onnxruntime",), time.perf_counter, [])
        found.append(dict(zip(graph.outputs, values, strict=True)))
    for outputs in found:
        for name, value in expected.items():
            np.testing.assert_array_equal(outputs[name], value)


@pytest.mark.parametrize("op_type", DRAWN)
def test_without_a_seed_each_run_draws_other_numbers(op_type):
    graph = graph_of(op_type, {})
    assert (evaluate(graph, inputs_of(graph))["y0"] != evaluate(graph, inputs_of(graph))["y0"]).any()


@pytest.mark.parametrize("granularity", ["ops", "whole"])
def test_a_seed_in_a_branch_gives_the_same_numbers_in_every_run(granularity):
    def branch(name: str, seed: float) -> Any:
        result = make_tensor_value_info(name, TensorProto.FLOAT, [9])
        return make_graph([make_node("RandomUniform", [], [name], shape=[9], seed=seed)], name, [], [result])

    node = make_node("If", ["c"], ["y"], then_branch=branch("then", 3.0), else_branch=branch("other", 4.0))
    graph = graph_from_onnx(model_of([node], {"c": (TensorProto.BOOL, [])}, ["y"]))
    found = [
        bind_graph(graph, {"c": np.array(True)}, granularity=granularity).compute(scheduler="sync")["y"]
        for _ in range(3)
    ]
    assert found[0].tolist() == found[1].tolist() == found[2].tolist()
