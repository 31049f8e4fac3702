"""Graphs as Dask collections: same results everywhere, every op executed once, clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client
from numpy.testing import assert_allclose, assert_array_equal

from ferroflow_dask import Model, executed
from ferroflow_dask.annotations import COST_ANNOTATION, CPU, GPU, KIND_ANNOTATION, RANK_ANNOTATION
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.exceptions import BindError, KernelError, UsageError
from ferroflow_dask.graph import Builder, Graph, Op, Source, generate_graph, upward_ranks
from ferroflow_dask.graph.nodes import UNKNOWN
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.lowering import GRANULARITIES, bind_graph, executed_here, scatter
from ferroflow_dask.lowering.collection import BoundGraph

RNG = np.random.default_rng(0)
UNKNOWN_ROWS = da.ones((4, 3), dtype="f4")[da.arange(4) > 1]
ONE = ClusterProfile((1,))


class Nothing:
    """The cost model of a user who declares nothing."""

    def seconds(self, op: object, graph: object) -> None:
        return None


def two_layer() -> Graph:
    builder = Builder("two-layer")
    x = builder.input("x", "float32", ("batch", 3))
    hidden = builder.op("MatMul", x, builder.constant(RNG.random((3, 4), dtype=np.float32), "w"))
    builder.output(y=builder.op("Relu", hidden), hidden=hidden)
    return builder.to_graph()


def split_in_two() -> Graph:
    builder = Builder("split")
    first, second = builder.op(
        "Split", builder.input("x", "float32", (2, 6)), outputs=2, axis=1, num_outputs=2
    )
    builder.output(first=first, total=builder.op("Add", first, second))
    return builder.to_graph()


def passed_through() -> Graph:
    builder = Builder("passed through")
    x = builder.input("x", "float32", (5, 3))
    builder.output(x, doubled=builder.op("Add", x, x), c=builder.constant(np.float32([7]), "seven"))
    return builder.to_graph()


def optional_left_out() -> Graph:
    builder = Builder("clip")
    x = builder.input("x", "float32", (5,))
    builder.output(y=builder.op("Clip", x, "", builder.constant(np.float32(0.5))))
    return builder.to_graph()


CASES: list[tuple[Callable[[], Graph], dict[str, Any]]] = [
    (two_layer, {"x": RNG.random((5, 3), dtype=np.float32)}),
    (split_in_two, {"x": RNG.random((2, 6), dtype=np.float32)}),
    (passed_through, {"x": RNG.random((5, 3), dtype=np.float32)}),
    (optional_left_out, {"x": RNG.standard_normal(5, dtype=np.float32)}),
    (lambda: generate_graph("transformer", seq_len=4, d_model=8, n_heads=2), {}),
]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Products are rounded as the arrays of a process are aligned.
        assert_allclose(found[name], value, rtol=1e-6)


@pytest.mark.cluster
@pytest.mark.parametrize(("make", "inputs"), CASES)
def test_a_cluster_gives_the_sequential_result(
    make: Callable[[], Graph], inputs: dict[str, Any], process_client: Client
) -> None:
    graph = make()
    expected = evaluate(graph, inputs)
    placed = scatter(graph, process_client)
    for one in (graph, placed, placed):
        bound = Model(one).bind(**inputs)
        assert_same(process_client.compute(bound).result(), expected)
        assert executed(process_client, bound.run).executed_ops == len(graph.live_ops)
    bound = Model(graph).bind(**inputs)
    assert_same(bound.compute(scheduler="threads"), expected)
    assert executed_here(bound.run).executed_ops == len(graph.live_ops)


@pytest.mark.cluster
@pytest.mark.usefixtures("_copies_stay")
def test_placed_constants_are_on_every_worker_before_the_graph_is_computed(process_client: Client) -> None:
    graph = two_layer()
    placed = scatter(graph, process_client)
    (future,) = placed.constants.values()
    assert len(process_client.who_has([future])[future.key]) == 2
    _, tasks = Model(placed).bind(x=np.zeros((1, 3), "float32")).__dask_graph__().layers.values()
    assert not any(key[0].startswith("source") for key in tasks)


@pytest.mark.cluster
def test_placing_twice_is_placing_once(process_client: Client) -> None:
    placed = scatter(two_layer(), process_client)
    again = scatter(placed, process_client)
    assert [s.value for s in again.sources] == [s.value for s in placed.sources]
    with pytest.raises(UsageError, match="are on a cluster"):
        evaluate(placed, {"x": np.zeros((1, 3), "float32")})


@pytest.mark.cluster
def test_dask_compute_takes_several_graphs_and_other_collections(process_client: Client) -> None:
    x = np.float32([[1, 2, 3]])
    graph = two_layer()
    with process_client.as_current():
        first, second, array = dask.compute(
            Model(graph).bind(x=x), Model(graph).bind(x=2 * x), da.ones(10, chunks=5).sum()
        )
    assert_same(first, evaluate(graph, {"x": x}))
    assert_same(second, evaluate(graph, {"x": 2 * x}))
    assert array == 10


@pytest.mark.cluster
def test_a_persisted_graph_stays_on_the_cluster_and_computes_to_the_same(process_client: Client) -> None:
    inputs = {"x": RNG.random((5, 3), dtype=np.float32)}
    graph = two_layer()
    persisted = process_client.persist(Model(graph).bind(**inputs))
    assert isinstance(persisted, BoundGraph)
    assert_same(process_client.compute(persisted).result(), evaluate(graph, inputs))
    assert executed(process_client, persisted.run).executed_ops == 2  # not again


def test_keys_are_readable_and_unique_to_each_binding() -> None:
    graph = two_layer()
    x = np.zeros((1, 3), "float32")
    first, second = (Model(graph).bind(x=x, granularity="ops") for _ in range(2))
    assert {key[0].split("-")[0] for key in first.__dask_keys__()} == {"relu", "matmul"}
    assert set(first.__dask_keys__()).isdisjoint(second.__dask_keys__())


def test_what_a_graph_needs_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding a graph again costs neither the look-up of kernels nor the estimate of durations."""
    graph, x = two_layer(), np.zeros((1, 3), "float32")
    Model(graph).bind(x=x)
    asked: list[str] = []
    monkeypatch.setattr("ferroflow_dask.kernels.choice.find_provider", lambda *_: asked.append("provider"))
    monkeypatch.setattr("ferroflow_dask.lowering.collection.estimate", lambda *_: asked.append("costs"))
    Model(graph).bind(x=x)
    assert not asked
    Model(graph).bind(x=x, providers=["array"])
    assert set(asked) == {"provider"}


def test_equal_ops_are_not_merged() -> None:
    graph = generate_graph("matmul-parallel", n_branches=4, ops_per_branch=3, m=4)
    bound = Model(graph).bind()
    bound.compute(scheduler="sync")
    report = executed_here(bound.run)
    assert report.executed_ops == 12
    assert bound.n_tasks == 12 + 2  # the sources, which no place() has put on a cluster
    assert set(report.seconds) == {op.id for op in graph.ops}


def test_ops_that_no_output_needs_are_not_run() -> None:
    builder = Builder()
    x = builder.input("x", "float32", (2,))
    builder.op("Relu", x, name="dead")
    builder.output(y=builder.op("Neg", x))
    bound = Model(builder.to_graph()).bind(x=np.float32([1, 2]))
    bound.compute(scheduler="sync")
    assert executed_here(bound.run).executed_ops == 1


def test_tasks_carry_cost_and_upward_rank() -> None:
    graph = generate_graph("wide", width=2, depth=3, skew=0.5)
    layer = next(
        layer
        for name, layer in Model(graph).bind().__dask_graph__().layers.items()
        if name.startswith("ops-")
    )
    costs = {op.id: op.attributes["duration"] for op in graph.ops}
    ranks = upward_ranks(graph, costs)
    for op, key in zip(graph.live_ops, layer, strict=True):
        assert layer.annotations[COST_ANNOTATION](key) == costs[op.id]
        assert layer.annotations[RANK_ANNOTATION](key) == pytest.approx(ranks[op.id])


def test_of_ops_that_are_alike_to_dask_the_first_starts_first() -> None:
    bound = bind_graph(generate_graph("imbalanced"), costs=Nothing())
    dsk = dict(bound.__dask_graph__())
    order = dask.order.order(dsk)
    ops = [key for key in dsk if str(key[0]).startswith("slow-")]
    assert sorted(ops, key=order.__getitem__) == ops


def test_without_costs_tasks_carry_their_kind_only() -> None:
    bound = bind_graph(generate_graph("resnet", channels=2), costs=Nothing())
    annotations = [layer.annotations for layer in bound.__dask_graph__().layers.values() if layer.annotations]
    assert [list(annotation) for annotation in annotations] == [[KIND_ANNOTATION]]


def test_ops_of_one_kind_have_operator_attributes_and_shapes_in_common() -> None:
    def kinds(graph: Graph) -> dict[str, str]:
        bound = Model(graph).bind()
        (annotations,) = (
            layer.annotations for layer in bound.__dask_graph__().layers.values() if layer.annotations
        )
        of_keys = annotations[KIND_ANNOTATION].values()
        return {op.name: kind for op, kind in zip(graph.live_ops, of_keys, strict=True)}

    slow = kinds(generate_graph("imbalanced", n_heavy=2, n_fast=2))
    assert slow["heavy_1"] == slow["heavy_2"] != slow["fast_3"] == slow["fast_4"]
    small, large = (kinds(generate_graph("matmul-chain", n_ops=2, m=m)) for m in (2, 3))
    assert len(set(small.values())) == len(set(large.values())) == 1
    assert set(small.values()).isdisjoint(large.values())


@pytest.mark.parametrize(
    ("op_type", "threshold", "kinds"),
    [
        ("MatMul", 25, {GPU}),
        ("Gemm", 25, {GPU}),
        ("Gemm", 26, {CPU}),
        ("Add", 1, {CPU}),
    ],
)
def test_products_from_a_threshold_on_run_on_gpus(op_type: str, threshold: int, kinds: set[str]) -> None:
    builder = Builder()
    a, b = builder.constant(np.ones((5, 5), "f4")), builder.constant(np.ones((5, 5), "f4"))
    builder.output(y=builder.op(op_type, a, b))
    bound = bind_graph(builder.to_graph(), gpu_matmul_threshold=threshold)
    (annotation,) = bound.__dask_graph__().layers[f"ops-{bound.run}"].annotations[COST_ANNOTATION].values()
    assert set(annotation) == kinds


REFUSED = {
    "missing": ({}, "input 'x' of graph 'two-layer' is missing; it takes x: float32.batch, 3."),
    "unknown name": ({"z": 1}, "no input 'z'; it takes x:"),
    "dtype of a Dask array": ({"x": da.zeros((2, 3))}, "'x' has dtype float64.*astype"),
    "unknown sizes": ({"x": UNKNOWN_ROWS}, "must be known: call compute_chunk_sizes"),
    "a frame": (
        {"x": dd.from_pandas(pd.DataFrame({"a": [1.0]}), 1)},
        r"is a DataFrame, and no Dask array; pass x=frame.to_dask_array\(lengths=True\)",
    ),
    "a series": ({"x": dd.from_pandas(pd.Series([1.0]), 1)}, "is a Series, and no Dask array"),
    "shape of a Dask array": ({"x": da.zeros((2, 4), dtype="f4")}, r"shape \[2, 4\]"),
    "a collection of parts": ({"x": db.from_sequence(range(4), npartitions=2)}, "is a Bag of 2 parts"),
}


@pytest.mark.parametrize(("inputs", "message"), REFUSED.values(), ids=REFUSED)
def test_bind_refuses(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(BindError, match=message):
        Model(two_layer()).bind(**inputs)


X = RNG.random((5, 3), dtype=np.float32)
LAZY: dict[str, Callable[[Any], Any]] = {
    "array": lambda _: da.from_array(X, chunks=2),
    "expression": lambda _: (da.from_array(X, chunks=(2, 1)) * 2).astype("f4") / np.float32(2),
    "delayed": lambda _: dask.delayed(np.array)(X),
    "future": lambda client: client.submit(np.array, X),
}


@pytest.mark.cluster
@pytest.mark.parametrize("make", [passed_through, two_layer])
@pytest.mark.parametrize("kind", LAZY)
def test_inputs_may_be_lazy(kind: str, make: Callable[[], Graph], thread_client: Client) -> None:
    graph = make()
    expected = evaluate(graph, {"x": X})
    bound = Model(graph).bind(x=LAZY[kind](thread_client))
    assert_same(thread_client.compute(bound).result(), expected)
    assert_same(thread_client.persist(bound).compute(), expected)
    if kind != "future":
        assert_same(bound.compute(scheduler="sync"), expected)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "uint8": (lambda: (X * 3).astype("u1"), r"'x' has dtype uint8.*pass array.astype\('float32'\)$"),
    "float64": (lambda: X.astype("f8"), "'x' has dtype float64"),
    "int64": (lambda: X.astype("i8"), "'x' has dtype int64"),
    "a list": (X.tolist, r"'x' has dtype float64.*pass numpy.asarray\(value, 'float32'\)$"),
    "a frame with texts": (
        lambda: pd.DataFrame({"a": ["x"], "b": [1.0]}),
        r"'x' has dtype object.*pass some columns, as frame\[names\].to_numpy\('float32'\)$",
    ),
    "a file's name": (lambda: "x.npy", r"'x' is the text 'x.npy', .*pass an array, as numpy.load"),
    "rank": (lambda: X[0], r"'x' has shape \[3\], the graph takes float32\[batch, 3\]"),
    "size": (lambda: X[:, :2], r"'x' has shape \[5, 2\]"),
    "ragged": (lambda: [[1.0], [2.0, 3.0]], "'x' is a list, and no array"),
}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("wrong", WRONG)
def test_lazy_inputs_are_checked_once_they_are_computed(wrong: str, granularity: str) -> None:
    make, message = WRONG[wrong]
    bound = bind_graph(two_layer(), {"x": dask.delayed(make)()}, profile=ONE, granularity=granularity)
    with pytest.raises(BindError, match=message):
        bound.compute(scheduler="sync")
    with pytest.raises(BindError, match=message):  # as if it had been here
        Model(two_layer()).bind(x=make())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_lazy_inputs_that_fit_give_the_same_in_every_granularity(granularity: str) -> None:
    graph = passed_through()
    bound = bind_graph(graph, {"x": dask.delayed(X.copy)()}, profile=ONE, granularity=granularity)
    assert_same(bound.compute(scheduler="sync"), evaluate(graph, {"x": X}))
    # The delayed value, its check, and the ops in one; or each op, and a constant that is an output.
    assert bound.n_tasks == (5 if granularity == "ops" else 3)


def test_a_lazy_input_has_the_symbolic_dimensions_of_those_that_are_here() -> None:
    builder = Builder("g")
    x, w = (builder.input(name, "float32", ("batch", 3)) for name in "xw")
    builder.output(y=builder.op("Add", x, w))
    bound = Model(builder.to_graph()).bind(x=dask.delayed(X[:1].copy)(), w=X)
    with pytest.warns(UserWarning, match="dimension 'batch' is 5 in input 'w' and 1 in 'x'; the model calls"):
        assert_same(bound.compute(scheduler="sync"), {"y": X[:1] + X})
    with pytest.warns(UserWarning, match="dimension 'batch' is 1 in input 'x' and 5 in 'w'"):
        assert_same(Model(builder.to_graph()).evaluate(x=X[:1], w=X), {"y": X[:1] + X})
    with pytest.warns(UserWarning, match="dimension 'batch' is 1 in input 'x' and 5 in 'w'"):
        bound = Model(builder.to_graph()).bind(x=X[:1], w=X)
    assert_same(bound.compute(scheduler="sync"), {"y": X[:1] + X})


@pytest.mark.cluster
def test_futures_are_checked_on_their_worker(process_client: Client) -> None:
    graph = two_layer()
    wrong, right = process_client.scatter([X.astype("f8"), X])
    with pytest.raises(BindError, match="'x' has dtype float64, the graph takes float32"):
        process_client.compute(Model(graph).bind(x=wrong)).result()
    assert_same(process_client.compute(Model(graph).bind(x=right)).result(), evaluate(graph, {"x": X}))


def test_lazy_sequences_are_left_to_the_kernel() -> None:
    concat = Op(1, "concat", "ConcatFromSequence", ("s",), ("y",), attributes={"axis": 0})
    graph = Graph("g", (Source(0, "s", UNKNOWN),), (concat,), ("y",), opsets={"": 21})
    bound = Model(graph).bind(s=dask.delayed([X, X]))
    assert_array_equal(bound.compute(scheduler="sync")["y"], np.concatenate([X, X]))


def test_only_binding_takes_lazy_inputs() -> None:
    with pytest.raises(BindError, match=r"Dask collection; pass the array: x=value.compute\(\)"):
        evaluate(two_layer(), {"x": da.from_array(X)})


@pytest.mark.cluster
def test_an_op_that_fails_is_named_and_the_cluster_lives_on(process_client: Client) -> None:
    builder = Builder()
    shape = builder.input("shape", "int64", (2,))
    builder.output(y=builder.op("Reshape", builder.constant(np.zeros(6, "f4")), shape, name="reshaped"))
    graph = builder.to_graph()
    with pytest.raises(KernelError, match="reshaped"):
        process_client.compute(Model(graph).bind(shape=np.int64([4, 4]))).result()
    assert process_client.compute(Model(graph).bind(shape=np.int64([2, 3]))).result()["y"].shape == (2, 3)
