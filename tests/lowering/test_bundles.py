"""Ops in bundles: the same numbers as one by one, each op once, cut as the cluster at hand wants it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st
from models import light_models, randomize
from numpy.testing import assert_array_equal

from ferroflow_dask import executed
from ferroflow_dask.annotations import RANK_ANNOTATION
from ferroflow_dask.bundling.predict import Work, predict
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.cost import AnalyticCost, MeasuredCost, estimate
from ferroflow_dask.exceptions import KernelError, UnknownNameError, UsageError
from ferroflow_dask.graph import (
    TOPOLOGIES,
    Builder,
    Graph,
    Op,
    bounds,
    generate_graph,
    graph_from_onnx,
    random_inputs,
)
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.lowering import bind_graph, executed_here, predictions_of, scatter
from ferroflow_dask.lowering.bundles import bundle
from ferroflow_dask.lowering.collection import BoundGraph
from ferroflow_dask.lowering.tasks import exported, lower

FOUR = ClusterProfile((1,) * 4)
#: Sizes at which each built-in graph runs in a moment.
SMALL: dict[str, dict[str, Any]] = {
    "imbalanced": {"n_heavy": 2, "heavy_ms": 3.0, "n_fast": 30, "fast_ms": 0.1},
    "wide": {"width": 6, "depth": 3},
    "large-wide": {"width": 20},
    "xlarge-wide": {"width": 40},
    "skewed": {"n": 20, "factor": 2.0},
    "transformer": {"seq_len": 8, "d_model": 16, "n_heads": 4},
    "large-transformer": {"layers": 2, "seq_len": 8, "d_model": 16, "n_heads": 4},
    "xlarge-transformer": {"layers": 3, "seq_len": 8, "d_model": 16, "n_heads": 4},
    "resnet": {"channels": 8},
    "matmul-chain": {"n_ops": 10, "m": 8},
    "matmul-parallel": {"n_branches": 6, "ops_per_branch": 4, "m": 8},
    "uniform": {"n": 8, "dim": 8},
}


class NothingKnown:
    def seconds(self, op: Op, graph: Graph) -> float | None:
        return None


def run(bound: BoundGraph) -> dict[str, Any]:
    outputs: dict[str, Any] = bound.compute(scheduler="sync")
    return outputs


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_array_equal(found[name], value)


# The same results


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("costs", [None, NothingKnown()], ids=["known", "unknown"])
@pytest.mark.parametrize(
    "cluster", [ClusterProfile((1,)), FOUR, ClusterProfile((4,) * 8)], ids=["1", "4", "32"]
)
def test_a_built_in_graph_gives_the_same(name: str, costs: Any, cluster: ClusterProfile) -> None:
    graph = generate_graph(name, seed=3, **SMALL[name])
    bound = bind_graph(graph, {}, costs=costs, profile=cluster)
    assert_same(run(bound), evaluate(graph))
    assert executed_here(bound.run).executed_ops == len(graph.live_ops)
    assert bound.n_tasks <= len(graph.live_ops) + len(graph.sources)


@st.composite
def graphs(draw: Callable[..., Any]) -> Graph:
    """Draw a graph of sums, some of them with two outputs, some outputs of the graph in its middle."""
    builder = Builder("random")
    values = [builder.input("x", "float32", (2,)), builder.constant(np.float32([1, 2]), "one")]
    for _ in range(draw(st.integers(1, 25))):
        operand = st.sampled_from(values[-12:])
        if draw(st.integers(0, 4)):
            values.append(builder.op("Add", draw(operand), draw(operand)))
        else:
            both = builder.op("Concat", draw(operand), draw(operand), axis=0)
            values += builder.op("Split", both, outputs=2, axis=0, num_outputs=2)
    builder.output(
        **{f"y{i}": value for i, value in enumerate(draw(st.sets(st.sampled_from(values), min_size=1)))}
    )
    return builder.to_graph()


@settings(max_examples=60)
@given(graphs(), st.randoms(use_true_random=False))
def test_any_convex_cut_gives_the_same(graph: Graph, rng: Any) -> None:
    # Consecutive ops of a topological order are a cut without cycles.
    ops = list(graph.live_ops)
    cuts = sorted(rng.sample(range(1, len(ops)), rng.randint(0, len(ops) - 1))) if len(ops) > 1 else []
    groups = [ops[a:b] for a, b in itertools.pairwise([0, *cuts, len(ops)])] if ops else []
    x = dict.fromkeys(graph.inputs, np.float32([3, 4]))
    lowered = lower(graph, x, "cut", providers=("array", "onnxruntime"), costs={}, bundles=groups)
    bound = BoundGraph("cut", lowered.dsk, lowered.places, n_tasks=lowered.n_tasks, graph=graph)
    before = executed_here("cut").executed_ops
    assert_same(run(bound), evaluate(graph, x))
    assert executed_here("cut").executed_ops - before == len(ops)
    group_of = {value: i for i, group in enumerate(groups) for op in group for value in op.outputs}
    read = {(value, i) for i, group in enumerate(groups) for op in group for value in op.operands}
    crossing = {value for value, i in read if group_of.get(value, i) != i}
    assert exported(graph, groups) == crossing.union(graph.outputs)


@settings(max_examples=60)
@given(graphs(), st.integers(1, 5), st.sampled_from([1e-5, 1e-3]), st.data())
def test_any_graph_on_any_cluster_gives_the_same(
    graph: Graph, workers: int, task_s: float, data: st.DataObject
) -> None:
    x = dict.fromkeys(graph.inputs, np.float32([3, 4]))
    seconds = {op.id: data.draw(st.sampled_from([1e-6, 1e-4, 1e-2, None])) for op in graph.ops}

    class Drawn:
        def seconds(self, op: Op, graph: Graph) -> float | None:
            return seconds[op.id]

    bound = bind_graph(graph, x, costs=Drawn(), profile=ClusterProfile((1,) * workers, task_s=task_s))
    assert_same(run(bound), evaluate(graph, x))
    assert executed_here(bound.run).executed_ops == len(graph.live_ops)


@settings(max_examples=40)
@given(graphs(), st.integers(1, 6))
def test_bundles_are_a_partition_in_an_order_that_can_run(graph: Graph, workers: int) -> None:
    seconds = dict.fromkeys((op.id for op in graph.ops), 1e-4)
    cut = bundle(graph, seconds, ClusterProfile((1,) * workers)).bundles
    assert sorted(op.id for one in cut for op in one) == sorted(op.id for op in graph.live_ops)
    known = set(graph.inputs) | set(graph.constants)
    for one in cut:
        for op in one:
            assert known.issuperset(op.operands)
            known.update(op.outputs)


# Predictions


def work_of(graph: Graph, seconds: dict[int, float]) -> Work:
    ops = graph.live_ops
    return Work(
        graph.live_edges,
        [seconds[op.id] for op in ops],
        lambda i: sum(graph.spec(value).nbytes or 0 for value in ops[i].outputs),
    )


def test_a_prediction_is_not_below_what_is_possible() -> None:
    for name, given_sizes in SMALL.items():
        graph = generate_graph(name, **given_sizes)
        seconds = estimate(graph, AnalyticCost())
        least_s = bounds(graph, seconds).makespan(4)
        prediction = predict(work_of(graph, seconds), [[i] for i in range(len(graph.live_ops))], FOUR)
        assert prediction.makespan_s >= least_s
        assert bundle(graph, seconds, FOUR).prediction.makespan_s <= prediction.makespan_s
        assert bind_graph(graph, {}, profile=FOUR).prediction is not None


def test_a_cut_that_moves_too_much_is_passed_over() -> None:
    # The first cut of this architecture does; the next is one bundle.
    (path,) = (path for path in light_models() if path.stem.endswith("inception_v1"))
    graph = graph_from_onnx(randomize(onnx.load(path)))
    found = predictions_of(graph, random_inputs(graph, 0), FOUR)
    assert found["bundles"].makespan_s < found["ops"].makespan_s


def test_a_prediction_counts_what_moves() -> None:
    builder = Builder("two branches")
    x = builder.constant(np.zeros((100, 100), np.float32))
    left, right = builder.op("Relu", x), builder.op("Abs", x)
    builder.output(y=builder.op("Add", left, right))
    graph = builder.to_graph()
    seconds = dict.fromkeys((op.id for op in graph.ops), 1.0)
    two = ClusterProfile((1, 1), task_s=0.1, round_trip_s=0.2, submit_s=0.3, bandwidth=1e5)
    apart = predict(work_of(graph, seconds), [[0], [1], [2]], two)
    # Both are sent, one 0.1 s after the other; the last op waits for the later one, and for the other's data.
    assert apart.nbytes_moved == 40_000
    assert apart.makespan_s == pytest.approx(0.3 + 0.2 + 1.0 + 0.2 + 0.1 + (0.2 + 0.4) + 1.0)
    together = predict(work_of(graph, seconds), [[0, 1, 2]], two)
    assert (together.nbytes_moved, together.makespan_s) == (0, pytest.approx(0.3 + 0.1 + 3.0))


def test_a_profile_is_checked() -> None:
    with pytest.raises(UsageError, match="at least one thread each"):
        ClusterProfile(())
    with pytest.raises(UsageError, match="task_s of a cluster is -1"):
        ClusterProfile((1,), task_s=-1)
    assert ClusterProfile.from_dict(FOUR.as_dict()) == FOUR


# Learning


def test_costs_are_learned_by_operator_and_shape() -> None:
    graph = generate_graph("matmul-parallel", n_branches=2, ops_per_branch=2, m=4)
    other = generate_graph("matmul-parallel", n_branches=2, ops_per_branch=2, m=8)
    measured = MeasuredCost()
    assert estimate(graph, measured) == {}
    measured.observe(graph, {op.id: 0.5 for op in graph.ops[:1]})
    assert set(estimate(graph, measured).values()) == {0.5}
    assert estimate(other, measured) == {}
    measured.observe(graph, {op.id: 1.5 for op in graph.ops})
    assert list(estimate(graph, measured).values()) == pytest.approx([0.8] * 4)
    assert estimate(other, MeasuredCost(AnalyticCost())) == estimate(other, AnalyticCost())
    kept = MeasuredCost(AnalyticCost(), measured.as_dict())
    assert estimate(graph, kept) == estimate(graph, measured)
    kept.observe(other, {op.id: 2.0 for op in other.ops})
    assert set(estimate(other, kept).values()) == {2.0}
    assert len(kept.as_dict()) == 2


# On a cluster


def test_some_outputs_alone_cost_only_what_they_need() -> None:
    graph = generate_graph("matmul-parallel", n_branches=4, ops_per_branch=3, m=64)
    slow = replace(FOUR, task_s=1e-6, round_trip_s=1e-6)
    bound = bind_graph(graph, {}, profile=slow)
    name = graph.outputs[0]
    only = bound.only(name)
    assert_same(run(only), {name: evaluate(graph)[name]})
    assert executed_here(bound.run).executed_ops == 3
    assert only.n_tasks == len(only.__dask_graph__()) < bound.n_tasks
    assert only.prediction is None
    (bundle_key,) = only.__dask_keys__()
    (layer,) = (layer for layer in only.__dask_graph__().layers.values() if bundle_key in layer)
    assert set(layer) == {bundle_key}
    assert RANK_ANNOTATION in layer.annotations
    with pytest.raises(UnknownNameError, match="unknown output 'z'"):
        bound.only("z")


@pytest.mark.cluster
def test_a_retry_runs_the_bundle_again(ferroflow_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = generate_graph("wide", width=1, depth=5)
    n_slept = 0

    def sleep(seconds: float) -> None:
        nonlocal n_slept
        n_slept += 1
        if n_slept == 3:
            raise OSError("once")

    monkeypatch.setattr("ferroflow_dask.kernels.synthetic.time", SimpleNamespace(sleep=sleep))
    bound = bind_graph(graph, {}, profile=ClusterProfile((1,)))
    assert_same(ferroflow_client.compute(bound, retries=1).result(), evaluate(graph))
    assert executed(ferroflow_client, bound.run).executed_ops == 2 + len(graph.live_ops)
    failing = bind_graph(graph, {}, profile=ClusterProfile((1,)))
    n_slept = 0
    with pytest.raises(KernelError, match=r"failed on .* once"):
        ferroflow_client.compute(failing).result()


# A session has its constants; and ops that are tasks one by one have all sources as such.
@pytest.mark.parametrize(("granularity", "n_sources"), [("whole", 1), ("bundles", 2), ("ops", 4)])
def test_small_sources_travel_in_bundles_and_large_ones_are_tasks(granularity: str, n_sources: int) -> None:
    builder = Builder("sources")
    x, z = builder.input("x", "float32", (256,)), builder.input("z", "float32", (256,))
    small = builder.constant(np.float32([2]), "small")
    large = builder.constant(np.ones(257, np.float32), "large")
    sums = [builder.op("Add", builder.op("Mul", x, small), z), builder.op("Mul", large, small)]
    # What is asked for has a key, however small it is.
    builder.output(sum=sums[0], product=sums[1], small=small)
    graph = builder.to_graph()
    inputs = dict.fromkeys(("x", "z"), np.arange(256, dtype=np.float32))
    bound = bind_graph(graph, inputs, profile=FOUR, granularity=granularity)
    assert bound.prediction is not None
    assert bound.n_tasks == bound.prediction.n_tasks + n_sources
    assert_same(run(bound), evaluate(graph, inputs))
    assert list(run(bound.only("product"))) == ["product"]


def test_small_sources_are_a_task_where_very_many_read_them() -> None:
    builder = Builder("readers")
    x = builder.input("x", "float32", (256,))
    ends = {f"y{i}": builder.op("Add", x, x) for i in range(1200)}
    builder.output(**ends)
    graph = builder.to_graph()
    x_given = {"x": np.zeros(256, np.float32)}
    each = [[op] for op in graph.live_ops]
    lowered = lower(graph, x_given, "many", providers=("array",), costs={}, bundles=each)
    n_dependent = sum(bool(task.dependencies) for task in dict(lowered.dsk).values())
    # Each reads it twice.
    assert 0 < 1200 - n_dependent <= 512
    assert lowered.n_tasks == 1201


def test_text_and_objects_are_sources_of_their_own() -> None:
    builder = Builder("text")
    x = builder.input("x", "object", (2,))
    builder.output(y=builder.op("StringNormalizer", x, case_change_action="UPPER"))
    graph = builder.to_graph()
    inputs = {"x": np.array(["a", "b"], object)}
    bound = bind_graph(graph, inputs, profile=FOUR)
    assert bound.n_tasks == 2
    assert_same(run(bound), {"y": np.array(["A", "B"], object)})


def test_small_constants_that_are_placed_are_waited_for_by_no_bundle(ferroflow_client: Client) -> None:
    graph = generate_graph("imbalanced", **SMALL["imbalanced"])
    bound = bind_graph(scatter(graph, ferroflow_client), {}, profile=FOUR)
    assert bound.n_tasks == len(bound.__dask_graph__())  # no Future among them
    assert not any(task.dependencies for task in dict(bound.__dask_graph__()).values())
    assert_same(ferroflow_client.compute(bound).result(), evaluate(graph))
