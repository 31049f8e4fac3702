"""Graphs as Dask collections: same results everywhere, every op executed once, clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from distributed import Client
from numpy.testing import assert_array_equal

from ferroflow_dask import BoundGraph, Graph, GraphBuilder, evaluate, executed, generate, place
from ferroflow_dask.exceptions import BindError, KernelError, KernelNotFoundError, UsageError
from ferroflow_dask.graph import upward_ranks
from ferroflow_dask.lowering import COST_ANNOTATION, KIND_ANNOTATION, RANK_ANNOTATION, executed_here
from ferroflow_dask.lowering.collection import bind

RNG = np.random.default_rng(0)


def two_layer() -> Graph:
    builder = GraphBuilder("two-layer")
    x = builder.input("x", "float32", ("batch", 3))
    hidden = builder.op("MatMul", x, builder.constant(RNG.random((3, 4), dtype=np.float32), "w"))
    builder.output(y=builder.op("Relu", hidden), hidden=hidden)
    return builder.build()


def split_in_two() -> Graph:
    builder = GraphBuilder("split")
    first, second = builder.op(
        "Split", builder.input("x", "float32", (2, 6)), outputs=2, axis=1, num_outputs=2
    )
    builder.output(first=first, total=builder.op("Add", first, second))
    return builder.build()


def passed_through() -> Graph:
    builder = GraphBuilder("passed through")
    x = builder.input("x", "float32", (2,))
    builder.output(x, doubled=builder.op("Add", x, x), c=builder.constant(np.float32([7]), "seven"))
    return builder.build()


def passed_through_of_five() -> Graph:
    builder = GraphBuilder("passed through")
    x = builder.input("x", "float32", (5, 3))
    builder.output(x, doubled=builder.op("Add", x, x))
    return builder.build()


def optional_left_out() -> Graph:
    builder = GraphBuilder("clip")
    x = builder.input("x", "float32", (5,))
    builder.output(y=builder.op("Clip", x, "", builder.constant(np.float32(0.5))))
    return builder.build()


CASES: list[tuple[Callable[[], Graph], dict[str, Any]]] = [
    (two_layer, {"x": RNG.random((5, 3), dtype=np.float32)}),
    (split_in_two, {"x": RNG.random((2, 6), dtype=np.float32)}),
    (passed_through, {"x": np.float32([1, 2])}),
    (optional_left_out, {"x": RNG.standard_normal(5, dtype=np.float32)}),
    (lambda: generate("transformer", seq_len=4, d_model=8, n_heads=2), {}),
]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_array_equal(found[name], value)


@pytest.mark.parametrize(("make", "inputs"), CASES)
@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_any_dask_scheduler_gives_the_sequential_result(
    make: Callable[[], Graph], inputs: dict[str, Any], scheduler: str
) -> None:
    graph = make()
    bound = graph.bind(**inputs)
    assert_same(bound.compute(scheduler=scheduler), evaluate(graph, inputs))
    assert executed_here(bound.run).executed_ops == len(graph.live_ops)


@pytest.mark.cluster
@pytest.mark.parametrize(("make", "inputs"), CASES)
def test_a_cluster_gives_the_sequential_result(
    make: Callable[[], Graph], inputs: dict[str, Any], process_client: Client
) -> None:
    graph = make()
    bound = graph.bind(**inputs)
    assert_same(process_client.compute(bound).result(), evaluate(graph, inputs))
    assert executed(process_client, bound.run).executed_ops == len(graph.live_ops)


@pytest.mark.cluster
@pytest.mark.parametrize(("make", "inputs"), CASES)
def test_placed_constants_give_the_sequential_result(
    make: Callable[[], Graph], inputs: dict[str, Any], process_client: Client
) -> None:
    graph = make()
    placed = place(graph, process_client)
    for _ in range(2):
        assert_same(process_client.compute(placed.bind(**inputs)).result(), evaluate(graph, inputs))


@pytest.mark.cluster
def test_placed_constants_are_on_every_worker_before_the_graph_is_computed(process_client: Client) -> None:
    graph = two_layer()
    placed = place(graph, process_client)
    (future,) = placed.constants.values()
    assert len(process_client.who_has([future])[future.key]) == 2
    _, tasks = placed.bind(x=np.zeros((1, 3), "float32")).__dask_graph__().layers.values()
    assert not any(key[0].startswith("source") for key in tasks)


@pytest.mark.cluster
def test_placing_twice_is_placing_once(process_client: Client) -> None:
    placed = place(two_layer(), process_client)
    again = place(placed, process_client)
    assert [s.value for s in again.sources] == [s.value for s in placed.sources]
    with pytest.raises(UsageError, match="are on a cluster"):
        evaluate(placed, {"x": np.zeros((1, 3), "float32")})


@pytest.mark.cluster
def test_dask_compute_takes_several_graphs_and_other_collections(process_client: Client) -> None:
    x = np.float32([[1, 2, 3]])
    graph = two_layer()
    with process_client.as_current():
        first, second, array = dask.compute(graph.bind(x=x), graph.bind(x=2 * x), da.ones(10, chunks=5).sum())
    assert_same(first, evaluate(graph, {"x": x}))
    assert_same(second, evaluate(graph, {"x": 2 * x}))
    assert array == 10


@pytest.mark.cluster
def test_a_persisted_graph_stays_on_the_cluster_and_computes_to_the_same(process_client: Client) -> None:
    inputs = {"x": RNG.random((5, 3), dtype=np.float32)}
    graph = two_layer()
    persisted = process_client.persist(graph.bind(**inputs))
    assert isinstance(persisted, BoundGraph)
    assert_same(process_client.compute(persisted).result(), evaluate(graph, inputs))
    assert executed(process_client, persisted.run).executed_ops == 2  # not again


def test_keys_are_readable_and_unique_to_each_binding() -> None:
    graph = two_layer()
    x = np.zeros((1, 3), "float32")
    first, second = graph.bind(x=x), graph.bind(x=x)
    assert {key[0].split("-")[0] for key in first.__dask_keys__()} == {"relu", "matmul"}
    assert set(first.__dask_keys__()).isdisjoint(second.__dask_keys__())


def test_equal_ops_are_not_merged() -> None:
    graph = generate("matmul-parallel", n_branches=4, ops_per_branch=3, m=4)
    bound = graph.bind()
    bound.compute(scheduler="sync")
    report = executed_here(bound.run)
    assert report.executed_ops == 12
    assert bound.n_tasks == 12 + 2  # the sources, which no place() has put on a cluster
    assert set(report.seconds) == {op.id for op in graph.ops}


def test_ops_that_no_output_needs_are_not_run() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "float32", (2,))
    builder.op("Relu", x, name="dead")
    builder.output(y=builder.op("Neg", x))
    bound = builder.build().bind(x=np.float32([1, 2]))
    bound.compute(scheduler="sync")
    assert executed_here(bound.run).executed_ops == 1


def test_a_source_is_one_task_however_many_ops_read_it() -> None:
    bound = generate("imbalanced").bind()
    sources, ops = bound.__dask_graph__().layers.values()
    assert len(sources) == 1
    assert len(ops) == 204


def test_tasks_carry_cost_and_upward_rank() -> None:
    graph = generate("wide", width=2, depth=3, skew=0.5)
    layer = next(
        layer for name, layer in graph.bind().__dask_graph__().layers.items() if name.startswith("ops-")
    )
    costs = {op.id: op.attributes["duration"] for op in graph.ops}
    ranks = upward_ranks(graph, costs)
    for key in layer:
        assert layer.annotations[COST_ANNOTATION](key) == costs[key[1]]
        assert layer.annotations[RANK_ANNOTATION](key) == pytest.approx(ranks[key[1]])


def test_without_costs_tasks_carry_their_kind_only() -> None:
    class Nothing:
        def seconds(self, op: object, graph: object) -> None:
            return None

    bound = bind(generate("resnet", channels=2), {}, costs=Nothing())
    annotations = [layer.annotations for layer in bound.__dask_graph__().layers.values() if layer.annotations]
    assert [list(annotation) for annotation in annotations] == [[KIND_ANNOTATION]]


def test_ops_of_one_kind_have_operator_attributes_and_shapes_in_common() -> None:
    def kinds(graph: Graph) -> dict[str, str]:
        bound = graph.bind()
        (annotations,) = (
            layer.annotations for layer in bound.__dask_graph__().layers.values() if layer.annotations
        )
        by_id = {key[1]: kind for key, kind in annotations[KIND_ANNOTATION].items()}
        return {op.name: by_id[op.id] for op in graph.live_ops}

    slow = kinds(generate("imbalanced", n_heavy=2, n_fast=2))
    assert slow["heavy_1"] == slow["heavy_2"] != slow["fast_3"] == slow["fast_4"]
    small, large = (kinds(generate("matmul-chain", n_ops=2, m=m)) for m in (2, 3))
    assert len(set(small.values())) == len(set(large.values())) == 1
    assert set(small.values()).isdisjoint(large.values())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        pytest.param({}, "input 'x' of graph 'g' is missing; it takes x: float32.batch, 3.", id="missing"),
        pytest.param({"z": 1}, "no input 'z'; it takes x:", id="unknown name"),
        pytest.param({"x": np.zeros((2, 3))}, "'x' has dtype float64.*astype..float32..", id="dtype"),
        pytest.param(
            {"x": np.zeros((2, 4), "f4")}, r"shape \[2, 4\], the graph takes float32.batch, 3.", id="size"
        ),
        pytest.param({"x": np.zeros(3, "f4")}, r"shape \[3\]", id="rank"),
        pytest.param({"x": da.zeros((2, 3))}, "'x' has dtype float64.*astype", id="dtype of a Dask array"),
        pytest.param({"x": da.zeros((2, 4), dtype="f4")}, r"shape \[2, 4\]", id="shape of a Dask array"),
        pytest.param(
            {"x": db.from_sequence(range(4), npartitions=2)},
            "is a Bag of 2 parts",
            id="a collection of parts",
        ),
        pytest.param(
            {"x": np.zeros((2, 3), "f4"), "w": np.zeros((5, 3), "f4")},
            "dimension 'batch' is 2 in input 'x' and 5 in 'w'",
            id="one symbol, two sizes",
        ),
    ],
)
def test_bind_refuses(inputs: dict[str, Any], message: str) -> None:
    builder = GraphBuilder("g")
    x = builder.input("x", "float32", ("batch", 3))
    if "w" in inputs:
        x = builder.op("Add", x, builder.input("w", "float32", ("batch", 3)))
    builder.output(y=builder.op("Relu", x))
    with pytest.raises(BindError, match=message):
        builder.build().bind(**inputs)


X = RNG.random((5, 3), dtype=np.float32)
LAZY: dict[str, Callable[[Any], Any]] = {
    "array": lambda _: da.from_array(X, chunks=2),
    "expression": lambda _: (da.from_array(X, chunks=(2, 1)) * 2).astype("f4") / np.float32(2),
    "delayed": lambda _: dask.delayed(np.array)(X),
    "future": lambda client: client.submit(np.array, X),
}


@pytest.mark.cluster
@pytest.mark.parametrize("make", [passed_through_of_five, two_layer])
@pytest.mark.parametrize("kind", LAZY)
def test_inputs_may_be_lazy(kind: str, make: Callable[[], Graph], thread_client: Client) -> None:
    graph = make()
    expected = evaluate(graph, {"x": X})
    bound = graph.bind(x=LAZY[kind](thread_client))
    for found in (thread_client.compute(bound).result(), thread_client.persist(bound).compute()):
        for name, value in expected.items():
            assert_array_equal(found[name], value)
    if kind != "future":
        for name, value in bound.compute(scheduler="sync").items():
            assert_array_equal(value, expected[name])


def test_only_binding_takes_lazy_inputs() -> None:
    with pytest.raises(BindError, match=r"Dask collection; pass the array: x=value.compute\(\)"):
        evaluate(two_layer(), {"x": da.from_array(X)})


def test_an_op_without_kernel_is_refused_before_anything_runs() -> None:
    builder = GraphBuilder()
    builder.output(y=builder.op("Frobnicate", builder.input("x"), domain="my.domain"))
    with pytest.raises(KernelNotFoundError, match=r"frobnicate_1.*my\.domain\.Frobnicate"):
        builder.build().bind(x=np.float32(1))


@pytest.mark.cluster
def test_an_op_that_fails_is_named_and_the_cluster_lives_on(process_client: Client) -> None:
    builder = GraphBuilder()
    shape = builder.input("shape", "int64", (2,))
    builder.output(y=builder.op("Reshape", builder.constant(np.zeros(6, "f4")), shape, name="reshaped"))
    graph = builder.build()
    with pytest.raises(KernelError, match="reshaped"):
        process_client.compute(graph.bind(shape=np.int64([4, 4]))).result()
    assert process_client.compute(graph.bind(shape=np.int64([2, 3]))).result()["y"].shape == (2, 3)
