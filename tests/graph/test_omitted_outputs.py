"""Outputs that a node leaves out: onnxruntime would end the process, so this runs in another one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from agreement import assert_same
from models import model_of, reference
from onnx import TensorProto
from onnx.helper import make_graph, make_node
from onnx.helper import make_tensor_value_info as info

from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.kernels import evaluate, make_plan
from ferroflow_dask.kernels.op_model import name_omitted_outputs
from ferroflow_dask.lowering import bind_graph

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = np.arange(8, dtype=np.float32).reshape(2, 4) - 3


def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    return make_graph(list(nodes), name, [], [info(nodes[-1].output[-1], FLOAT, [2, 2])])


def loop() -> onnx.NodeProto:
    """x is added to the carried value in two iterations; only the values of each are wanted."""
    body = make_graph(
        [
            make_node("Add", ["carried", "a"], ["sum"]),
            make_node("Identity", ["again"], ["still"]),
            make_node("Identity", ["sum"], ["seen"]),
        ],
        "body",
        [info("i", INT64, []), info("again", BOOL, []), info("carried", FLOAT, [2, 4])],
        [info("still", BOOL, []), info("sum", FLOAT, [2, 4]), info("seen", FLOAT, [2, 4])],
    )
    return make_node("Loop", ["n", "", "a"], ["", "b"], body=body)


def nested_split() -> onnx.NodeProto:
    """Values of the branches have the names that would be made up first."""
    then = branch(
        "then",
        make_node("Neg", ["a"], ["omitted_0"]),
        make_node("Split", ["omitted_0"], ["", "omitted_1"], axis=1, num_outputs=2),
    )
    other = branch("other", make_node("Split", ["a"], ["", "second"], axis=1, num_outputs=2))
    return make_node("If", ["c"], ["b"], then_branch=then, else_branch=other)


NODES = {
    "the carried value of a loop": loop,
    "the first part of a split": lambda: make_node("Split", ["a"], ["", "b"], axis=1, num_outputs=2),
    "the last part of a split": lambda: make_node("Split", ["a"], ["b", ""], axis=1, num_outputs=2),
    "a part of a split in a branch": nested_split,
    "what batch normalization learns first": lambda: make_node(
        "BatchNormalization", ["a", "w", "w", "w", "w"], ["b", "", "v"], training_mode=1
    ),
    "all that batch normalization learns": lambda: make_node(
        "BatchNormalization", ["a", "w", "w", "w", "w"], ["b", "", ""], training_mode=1
    ),
}


def model(left_out: str) -> onnx.ModelProto:
    node = NODES[left_out]()
    return model_of(
        [make_node("Neg", ["x"], ["a"]), node, make_node("Abs", ["b"], ["y"])],
        {"x": (FLOAT, [2, 4]), "n": (INT64, []), "c": (BOOL, []), "w": (FLOAT, [4])},
        ["y", *(name for name in node.output if name not in ("b", ""))],
    )


def run(left_out: str) -> None:
    proto = model(left_out)
    weights = np.float32([1, 2, 3, 4])
    inputs = {"x": X, "n": np.array(2), "c": np.array(True), "w": weights}
    # `onnx.reference` joins what it has seen along the wrong axis.
    is_loop = proto.graph.node[1].op_type == "Loop"
    expected = {"y": np.abs(np.stack([2 * X, 3 * X]))} if is_loop else reference(proto, inputs)
    graph = graph_from_onnx(proto)
    inputs = {name: inputs[name] for name in graph.inputs}
    found = [
        evaluate(graph, inputs),
        bind_graph(graph, inputs, granularity="whole").compute(scheduler="sync"),
    ]
    plan = make_plan(graph, graph.live_ops, [*inputs, *graph.constants], list(graph.outputs))
    for _ in range(2):  # from the second time on in segments
        values = plan.run(
            [*inputs.values(), *graph.constants.values()], ("onnxruntime", "reference"), time.perf_counter, []
        )
        found.append(dict(zip(graph.outputs, values, strict=True)))
    for outputs in found:
        for name, value in expected.items():
            assert_same(outputs[name], value)
    assert weights.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("left_out", NODES)
def test_outputs_may_be_left_out(left_out):
    done = subprocess.run(
        [sys.executable, Path(__file__), left_out],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr


def test_optional_outputs_stay_away_if_nothing_comes_behind_them():
    node = make_node("LSTM", ["x", "w", "r"], ["", "h", ""], hidden_size=3)
    proto = onnx.helper.make_model(make_graph([node, make_node("Neg", ["omitted_0"], ["y"])], "g", [], []))
    assert name_omitted_outputs(proto).graph.node[0].output == ["omitted_1", "h"]


if __name__ == "__main__":
    run(sys.argv[1])
