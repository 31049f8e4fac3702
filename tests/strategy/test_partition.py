"""Graphs in parts compute what the whole ones do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import light_models, randomize
from numpy.testing import assert_allclose
from split_cases import CASES, one_op, random_strategy
from split_models import MODELS, mlp

from ferroflow_dask.graph import Builder, Graph, graph_from_onnx, random_inputs
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.strategy import (
    Configuration,
    Strategy,
    partition,
    space_of,
    spaces_of,
    splittable,
    whole_on,
    with_shapes,
)

_PROVIDERS = ("array", "onnxruntime", "reference")


def assert_same(graph: Graph, strategy: Strategy, seed: int = 0, rtol: float = 1e-4) -> Graph:
    inputs = random_inputs(graph, seed)
    expected = evaluate(graph, inputs, providers=_PROVIDERS)
    parts = partition(graph, strategy)
    found = evaluate(parts, inputs, providers=_PROVIDERS)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert_allclose(found[name], value, rtol=rtol, atol=rtol * max(1e-3, np.abs(value).max(initial=0)))
    for value in found:
        assert parts.spec(value).shape == graph.spec(value).shape
    return parts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_each_operator_in_parts_gives_what_it_gives_whole(case: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = one_op(case, rng)
    assert_same(graph, random_strategy(graph, rng), seed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_each_case_splits_its_operator_along_each_axis(case: Any) -> None:
    # Random strategies must not pass because nothing is ever split.
    axes = Counter[str]()
    for seed in range(60):
        graph = one_op(case, np.random.default_rng(seed))
        (space,) = spaces_of(graph).values()
        axes.update(() if isinstance(space, str) else (axis.name for axis in space.axes))
    assert sum(axes.values()) > 30
    if case.__name__ in ("matmul", "gemm", "conv", "heads", "reduction", "einsum"):
        assert axes["contracted"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(6))
def test_whole_models_with_random_strategies_give_the_same(name: str, seed: int) -> None:
    graph = MODELS[name]
    parts = assert_same(graph, random_strategy(graph, np.random.default_rng(seed)), rtol=1e-3)
    assert len(parts.ops) > 2 * len(graph.ops)


def test_a_published_model_of_an_old_operator_set() -> None:
    (path,) = (path for path in light_models() if path.stem.endswith("squeezenet"))
    graph = graph_from_onnx(randomize(onnx.load(path)))
    rng = np.random.default_rng(1)
    assert_same(graph, random_strategy(graph, rng, n_workers=2, most=2), rtol=2e-3)


def _along(graph: Graph, axis: str, workers: tuple[str, ...] = ("0", "1")) -> Strategy:
    """Return the strategy that splits each operator along an axis, if it has that."""
    operators = {}
    for name, space in spaces_of(graph).items():
        has = not isinstance(space, str) and space.sizes.get(axis, 1) >= len(workers)
        operators[name] = Configuration(workers, {axis: 2}) if has else Configuration(workers[:1])
    return Strategy(workers, operators)


def _kinds(graph: Graph) -> Counter[str]:
    return Counter(op.op_type for op in graph.live_ops)


def test_equal_splits_need_nothing_between_the_operators() -> None:
    graph = mlp()
    kinds = _kinds(assert_same(graph, _along(graph, "sample")))
    # The input is cut, and one half moves to the second worker. The output is put together on the first.
    assert kinds == {"Gemm": 6, "Relu": 6, "Softmax": 2, "Slice": 2, "Concat": 1, "Identity": 1}


def test_halos_alone_are_exchanged() -> None:
    b = Builder("halo")
    x = b.op("Relu", b.input("x", np.float32, (1, 4, 16, 5)))
    weight = b.constant(np.ones((4, 4, 3, 1), np.float32))
    b.output(y=b.op("Relu", b.op("Conv", x, weight, pads=[1, 0, 1, 0])))
    graph = b.to_graph()
    parts = assert_same(graph, _along(graph, "attribute2"))
    moved = [
        parts.spec(value).shape
        for op in parts.ops
        for value in op.inputs
        if value in parts.producers and parts.producers[value].worker != op.worker and op.op_type == "Concat"
    ]
    assert moved == [(1, 4, 1, 5), (1, 4, 1, 5), (1, 4, 8, 5)]  # two halos, and half of the output


def test_weights_are_cut_once_and_partial_sums_are_added() -> None:
    b = Builder("two")
    x = b.input("x", np.float32, (4, 6))
    hidden = b.op("Relu", b.op("MatMul", x, b.constant(np.ones((6, 8), np.float32), "w1"), name="up"))
    b.output(y=b.op("MatMul", hidden, b.constant(np.ones((8, 6), np.float32), "w2"), name="down"))
    graph = b.to_graph()
    two = Configuration(("0", "1"), {"parameter1": 2})
    operators = {"up": two, hidden: Configuration(("0", "1"), {"attribute1": 2})}
    operators["down"] = Configuration(("0", "1"), {"contracted": 2})
    parts = assert_same(graph, Strategy(("0", "1"), operators))
    shapes = {source.name: source.spec.shape for source in parts.sources if source.name.startswith("w")}
    assert shapes == {
        "w1[0:6,0:4]": (6, 4),
        "w1[0:6,4:8]": (6, 4),
        "w2[0:4,0:6]": (4, 6),
        "w2[4:8,0:6]": (4, 6),
    }
    # Columns, then rows, as in Megatron-LM: one exchange for both layers.
    assert _kinds(parts) == {"MatMul": 4, "Relu": 2, "Add": 1, "Identity": 2}


def test_one_worker_and_no_splits_is_the_graph_itself() -> None:
    for graph in MODELS.values():
        parts = assert_same(graph, whole_on(graph))
        assert [op.name for op in parts.ops] == [op.name for op in graph.live_ops]
        assert {op.worker for op in parts.ops} == {"0"}


def test_sub_graphs_read_values_under_their_names() -> None:
    value = onnx.helper.make_tensor_value_info("out", 1, None)
    branch = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["h"], ["out"])], "branch", [], [value])
    b = Builder("if")
    hidden = b.op("Relu", b.input("x", np.float32, (6,)), name="h")
    condition = b.constant(np.array(True))
    spec = TensorSpec.of(np.float32, (6,))
    b.output(y=b.op("If", condition, spec=spec, then_branch=branch, else_branch=branch), h=hidden)
    graph = b.to_graph()
    operators = {name: Configuration(("0",)) for name in spaces_of(graph)}
    operators["h"] = Configuration(("1", "0", "1"), {"sample": 3})
    assert_same(graph, Strategy(("0", "1"), operators))
    assert "If has no rule" in spaces_of(graph).values()


def test_symbolic_shapes_follow_from_the_inputs() -> None:
    b = Builder("free")
    x = b.input("x", np.float32, ("batch", 4))
    b.output(y=b.op("Relu", b.op("MatMul", x, b.constant(np.eye(4, dtype=np.float32)), name="m")))
    graph = b.to_graph()
    assert space_of(graph.ops[0], graph) == "the shape of 'x' is not known"
    known = with_shapes(graph, {"x": TensorSpec.of(np.float32, (6, 4))})
    assert known.spec("y").shape == (6, 4)
    assert_same(known, _along(known, "sample"))


def test_the_table_says_why_an_operator_stays_whole() -> None:
    b = Builder("odd")
    x = b.input("x", np.float32, (4, 4))
    b.output(
        b.op("Det", x, name="det"), b.op("Slice", x, *[b.input(n, np.int64, (1,)) for n in "ab"], name="s")
    )
    graph = b.to_graph()
    assert spaces_of(graph)["det"] == "Det has no rule"
    assert "not" in str(spaces_of(graph)["s"])
    assert {"MatMul", "Conv", "ferroflow.MatMul", "Softmax", "LSTM"} <= set(splittable())
