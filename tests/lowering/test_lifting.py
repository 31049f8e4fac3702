"""Large weights of sub-graphs become the graph's: ops do not carry them, and results are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from agreement import assert_same
from models import model_of, reference
from onnx import TensorProto
from onnx.helper import make_graph, make_node, make_tensor_value_info
from onnx.numpy_helper import from_array

from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.lowering import bind_graph

SIDE = 40
X = np.random.default_rng(0).standard_normal((2, SIDE), dtype=np.float32)
FIRST, SECOND, SMALL = (
    np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    for seed, shape in ((1, (SIDE, SIDE)), (2, (SIDE, SIDE)), (3, (SIDE,)))
)


def branch(name: str, nodes: list[Any], **weights: Any) -> onnx.GraphProto:
    """A branch whose result is named for it, with initializers."""
    result = make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)
    return make_graph(nodes, name, [], [result], [from_array(value, key) for key, value in weights.items()])


def both_have_w() -> onnx.NodeProto:
    return make_node(
        "If", ["c"], ["y"],
        then_branch=branch("then", [make_node("MatMul", ["x", "w"], ["then_out"])], w=FIRST),
        else_branch=branch("else", [make_node("MatMul", ["x", "w"], ["else_out"])], w=SECOND),
    )  # fmt: skip


def read_at_depth_two() -> onnx.NodeProto:
    """The other branch has a weight of the same name."""
    own = branch("own", [make_node("MatMul", ["x", "u"], ["own_out"])], u=SECOND)
    outer = branch("outer", [make_node("MatMul", ["x", "w"], ["outer_out"])])
    then = branch("then", [make_node("If", ["d"], ["then_out"], then_branch=own, else_branch=outer)], w=FIRST)
    other = branch("other", [make_node("MatMul", ["x", "w"], ["other_out"])], w=SECOND)
    return make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)


def a_constant() -> onnx.NodeProto:
    nodes = [
        make_node("Constant", [], ["w"], value=from_array(FIRST)),
        make_node("Constant", [], ["b"], value=from_array(SMALL)),
        make_node("MatMul", ["x", "w"], ["m"]),
        make_node("Add", ["m", "b"], ["then_out"]),
    ]
    other = branch("other", [make_node("Identity", ["x"], ["other_out"])])
    return make_node("If", ["c"], ["y"], then_branch=branch("then", nodes), else_branch=other)


@pytest.mark.parametrize("d", [True, False])
@pytest.mark.parametrize("c", [True, False])
@pytest.mark.parametrize("make", [both_have_w, read_at_depth_two, a_constant])
def test_large_weights_are_the_graphs(make, c, d):
    inputs = {"x": X, "c": np.array(c), "d": np.array(d)}
    model = model_of(
        [make(), make_node("MatMul", ["x", "w_2"], ["z"])],
        {"x": (TensorProto.FLOAT, list(X.shape)), "c": (TensorProto.BOOL, []), "d": (TensorProto.BOOL, [])},
        ["y", "z"],
        initializers={"w_2": FIRST + SECOND},
    )
    before = model.SerializeToString(deterministic=True)
    expected = reference(model, inputs)
    graph = graph_from_onnx(model)
    assert model.SerializeToString(deterministic=True) == before
    op = graph.ops[0]
    assert max(value.ByteSize() for value in op.attributes.values()) < 1000
    assert set(op.captured) & set(graph.constants)
    found = [evaluate(graph, inputs), evaluate(graph, inputs, providers=["reference"])]
    found += [
        bind_graph(graph, inputs, granularity=how).compute(scheduler="sync") for how in ("whole", "ops")
    ]
    for values in found:
        for name, value in expected.items():
            assert_same(values[name], value)


def test_a_weight_that_is_a_branchs_result_stays_there():
    results = [make_tensor_value_info("w", TensorProto.FLOAT, [SIDE, SIDE])]
    then = make_graph([], "then", [], results, [from_array(FIRST, "w")])
    other = branch("other", [make_node("Identity", ["x"], ["other_out"])])
    node = make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    model = model_of([node], {"x": (TensorProto.FLOAT, [2, SIDE]), "c": (TensorProto.BOOL, [])}, ["y"])
    graph = graph_from_onnx(model)
    assert not graph.constants
    assert_same(evaluate(graph, {"x": X, "c": np.array(True)})["y"], FIRST)
