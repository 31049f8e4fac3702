"""Constants of graphs: results of a run cannot change them, and weights of sub-graphs are among them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import assert_same
from models import model_of, reference
from numpy.testing import assert_array_equal
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node as node
from onnx.helper import make_tensor_value_info as info

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.graph import Builder, Graph, graph_from_onnx
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.lowering import GRANULARITIES, bind_graph, scatter

ONE = ClusterProfile((1,))
X = np.zeros(3, np.float32)
W = np.float32([1, 2, 3])


def weighted(w: Any = W) -> Graph:
    """Return x + w, with w and a reshaped w among the outputs."""
    builder = Builder("g")
    x, weight = builder.input("x", "float32", (3,)), builder.constant(w, name="w")
    rows = builder.op("Reshape", weight, builder.constant([3, 1], name="shape"))
    builder.output("w", y=builder.op("Add", x, weight), rows=rows)
    return builder.to_graph()


def change_all(results: dict[str, Any]) -> None:
    """Do with results what their owner may, in place."""
    for value in results.values():
        if value.flags.writeable:
            np.multiply(value, 100, out=value)


def computed(graph: Graph, granularity: str) -> dict[str, Any]:
    bound = bind_graph(graph, {"x": X}, granularity=granularity, profile=ONE)
    found: dict[str, Any] = bound.compute(scheduler="sync")
    return found


def test_changing_results_changes_no_later_run():
    graph = weighted(W.copy())
    for providers in (None, ["array"], ["reference"]):
        change_all(evaluate(graph, {"x": X}, providers=providers))
        assert_array_equal(evaluate(graph, {"x": X})["y"], W)
    for granularity in GRANULARITIES:
        change_all(computed(graph, granularity))
        assert_array_equal(evaluate(graph, {"x": X})["y"], W)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_changing_results_changes_nothing_in_a_worker_of_the_same_process(thread_client, granularity):
    graph = scatter(weighted(W.copy()), thread_client)
    for _ in range(2):
        results = bind_graph(graph, {"x": X}, granularity=granularity, profile=ONE).compute()
        assert_array_equal(results["y"], W)
        change_all(results)


def test_the_array_that_a_constant_was_given_as_is_neither_copied_nor_made_read_only():
    mine = W.copy()
    graph = weighted(mine)
    assert np.shares_memory(graph.constants["w"], mine)
    assert not graph.constants["w"].flags.writeable
    assert mine.flags.writeable


TRANSPOSED_STRINGS = np.array([["a", "b"], ["c", "d"]], object).T


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(
    "value", [W, np.float32([[1, 2], [3, 4]])[:, 1], TRANSPOSED_STRINGS], ids=["plain", "strided", "strings"]
)
def test_constants_are_read_only_after_pickling(value, protocol):
    builder = Builder()
    builder.output(builder.constant(value, name="w"))
    graph = pickle.loads(pickle.dumps(builder.to_graph(), protocol))
    assert not graph.constants["w"].flags.writeable
    assert_array_equal(graph.constants["w"], value)


def test_a_buffer_that_came_beside_a_pickle_is_not_copied():
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(weighted(), 5, buffer_callback=buffers.append)
    received = [bytearray(buffer) for buffer in buffers]
    graph = pickle.loads(content, buffers=received)
    weight = graph.constants["w"]
    assert any(np.shares_memory(weight, np.frombuffer(buffer, np.uint8)) for buffer in received)
    assert not weight.flags.writeable


def test_constants_of_a_model_are_read_only_in_whatever_form_it_has_them():
    nodes = [
        node("Constant", [], ["floats"], value_floats=[1.0, 2.0, 3.0]),
        node("Constant", [], ["texts"], value_strings=["a", "b"]),
        node("Add", ["x", "floats"], ["h"]),
        node("Add", ["h", "listed"], ["y"]),
    ]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [3])}, ["y", "floats", "listed"])
    model.graph.initializer.append(onnx.helper.make_tensor("listed", TensorProto.FLOAT, [3], [4, 5, 6]))
    model.graph.output[2].CopyFrom(info("listed", TensorProto.FLOAT, [3]))
    model.graph.output[0].CopyFrom(info("y", TensorProto.FLOAT, [3]))
    graph = graph_from_onnx(model)
    expected = reference(model, {"x": X})
    change_all(evaluate(graph, {"x": X}))
    for name, value in evaluate(graph, {"x": X}).items():
        assert_array_equal(value, expected[name])
    assert not any(value.flags.writeable for value in graph.constants.values())


# ---------------------------------------------------------------- large weights of sub-graphs

SIDE = 40
ROWS = np.random.default_rng(0).standard_normal((2, SIDE), dtype=np.float32)
FIRST, SECOND, SMALL = (
    np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    for seed, shape in ((1, (SIDE, SIDE)), (2, (SIDE, SIDE)), (3, (SIDE,)))
)


def branch(name: str, nodes: list[Any], **weights: Any) -> onnx.GraphProto:
    """A branch whose result is named for it, with initializers."""
    result = info(f"{name}_out", TensorProto.FLOAT, None)
    return helper.make_graph(
        nodes, name, [], [result], [numpy_helper.from_array(value, key) for key, value in weights.items()]
    )


def both_have_w() -> onnx.NodeProto:
    return node(
        "If", ["c"], ["y"],
        then_branch=branch("then", [node("MatMul", ["x", "w"], ["then_out"])], w=FIRST),
        else_branch=branch("else", [node("MatMul", ["x", "w"], ["else_out"])], w=SECOND),
    )  # fmt: skip


def read_at_depth_two() -> onnx.NodeProto:
    """The other branch has a weight of the same name."""
    own = branch("own", [node("MatMul", ["x", "u"], ["own_out"])], u=SECOND)
    outer = branch("outer", [node("MatMul", ["x", "w"], ["outer_out"])])
    then = branch("then", [node("If", ["d"], ["then_out"], then_branch=own, else_branch=outer)], w=FIRST)
    other = branch("other", [node("MatMul", ["x", "w"], ["other_out"])], w=SECOND)
    return node("If", ["c"], ["y"], then_branch=then, else_branch=other)


def a_constant() -> onnx.NodeProto:
    nodes = [
        node("Constant", [], ["w"], value=numpy_helper.from_array(FIRST)),
        node("Constant", [], ["b"], value=numpy_helper.from_array(SMALL)),
        node("MatMul", ["x", "w"], ["m"]),
        node("Add", ["m", "b"], ["then_out"]),
    ]
    other = branch("other", [node("Identity", ["x"], ["other_out"])])
    return node("If", ["c"], ["y"], then_branch=branch("then", nodes), else_branch=other)


@pytest.mark.parametrize("d", [True, False])
@pytest.mark.parametrize("c", [True, False])
@pytest.mark.parametrize("make", [both_have_w, read_at_depth_two, a_constant])
def test_large_weights_are_the_graphs(make, c, d):
    inputs = {"x": ROWS, "c": np.array(c), "d": np.array(d)}
    model = model_of(
        [make(), node("MatMul", ["x", "w_2"], ["z"])],
        {
            "x": (TensorProto.FLOAT, list(ROWS.shape)),
            "c": (TensorProto.BOOL, []),
            "d": (TensorProto.BOOL, []),
        },
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
    results = [info("w", TensorProto.FLOAT, [SIDE, SIDE])]
    then = helper.make_graph([], "then", [], results, [numpy_helper.from_array(FIRST, "w")])
    other = branch("other", [node("Identity", ["x"], ["other_out"])])
    fork = node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    model = model_of([fork], {"x": (TensorProto.FLOAT, [2, SIDE]), "c": (TensorProto.BOOL, [])}, ["y"])
    graph = graph_from_onnx(model)
    assert not graph.constants
    assert_same(evaluate(graph, {"x": ROWS, "c": np.array(True)})["y"], FIRST)
