"""Strategies on workers: bundles that keep to one worker, pins, weights, bytes that move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask.array as da
import numpy as np
import pytest
from dask import delayed
from dask.distributed import Client
from numpy.testing import assert_allclose
from split_cases import random_strategy
from split_models import MODELS, block, mlp

from ferroflow_dask import GraphBuilder, Model, executed
from ferroflow_dask.exceptions import StrategyError, UsageError
from ferroflow_dask.graph import Graph, random_inputs
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.kernels.session import share_of
from ferroflow_dask.lowering import bind_graph
from ferroflow_dask.lowering.execution import ExecuteBundle, ExecuteOp
from ferroflow_dask.lowering.pinned import in_parts, on_cluster
from ferroflow_dask.lowering.pinned_bundles import _finest, _merged, _reads, _simulated, bundles_of
from ferroflow_dask.lowering.whole import ExecutePart
from ferroflow_dask.strategy import Configuration, Strategy, partition, spaces_of, whole_on


def two_workers(graph: Graph, seed: int) -> Strategy:
    return random_strategy(graph, np.random.default_rng(seed), n_workers=2, most=2)


def split(graph: Graph, *axes: str) -> Strategy:
    """Split each operator along the first axis that it has, on two workers."""
    operators = {}
    for name, space in spaces_of(graph).items():
        sizes = {} if isinstance(space, str) else space.sizes
        axis = next((axis for axis in axes if axis in sizes), None)
        operators[name] = Configuration(("0",)) if axis is None else Configuration(("0", "1"), {axis: 2})
    return Strategy(("0", "1"), operators)


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_allclose(found[name], value, rtol=1e-3, atol=1e-3 * max(1e-3, np.abs(value).max()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(8))
def test_bundles_keep_to_a_worker_and_can_run_one_after_another(name: str, seed: int) -> None:
    graph = partition(MODELS[name], random_strategy(MODELS[name], np.random.default_rng(seed)))
    bundles = bundles_of(graph, {})
    assert sorted(op.id for ops in bundles for op in ops) == sorted(op.id for op in graph.live_ops)
    made: set[str] = set()
    for ops in bundles:
        assert len({op.worker for op in ops}) == 1
        inside = {value for op in ops for value in op.outputs}
        for op in ops:
            assert all(value in made or value in inside for value in op.operands if value in graph.producers)
        made |= inside
    assert len(bundles) < len(graph.live_ops)


def test_a_worker_gets_no_value_that_it_does_not_read() -> None:
    for graph in MODELS.values():
        for seed in range(8):
            parts = partition(graph, random_strategy(graph, np.random.default_rng(seed)))
            bundles = bundles_of(parts, {})
            home = {value: i for i, ops in enumerate(bundles) for op in ops for value in op.outputs}
            readers: dict[int, dict[str, set[str]]] = {}
            for i, ops in enumerate(bundles):
                for value in (value for op in ops for value in op.operands):
                    if home.get(value, i) != i:
                        exports = readers.setdefault(home[value], {})
                        exports.setdefault(value, set()).add(ops[0].worker)
            moving = [i for i, by in readers.items() if set.union(*by.values()) != {bundles[i][0].worker}]
            assert moving
            assert all(len(set(map(frozenset, readers[i].values()))) == 1 for i in moving)


def test_sends_come_before_the_work_of_their_worker() -> None:
    graph = mlp()
    addressed = split(graph, "sample").on({"0": "tcp://a", "1": "tcp://b"})
    dsk = bind_graph(graph, random_inputs(graph), strategy=addressed).__dask_graph__()
    (layer,) = (layer for name, layer in dsk.layers.items() if name.startswith("ops-"))
    priority, workers = (layer.annotations[name] for name in ("priority", "workers"))
    assert [workers(key) for key in layer if priority(key)] == [["tcp://a"]]
    assert sorted(workers(key)[0] for key in layer) == ["tcp://a", "tcp://a", "tcp://a", "tcp://b"]


def test_bundles_that_compute_are_sessions_which_workers_keep_as_one_model() -> None:
    graph = block()
    addressed = split(graph, "attribute1").on({"0": "tcp://a", "1": "tcp://b"})
    parts = in_parts(graph, {}, addressed)
    collections = [bind_graph(parts, random_inputs(graph)) for _ in range(2)]
    calls = []
    for bound in collections:
        dsk = bound.__dask_graph__()
        (layer,) = (layer for name, layer in dsk.layers.items() if name.startswith("ops-"))
        calls.append([task.func for task in layer.values()])
    computing = [call for call in calls[0] if isinstance(call, ExecutePart)]
    moving = [call for call in calls[0] if not isinstance(call, ExecutePart)]
    assert computing
    assert {op.op_type for call in moving for op in ops_of(call)} <= {"Identity", "Slice", "Concat"}
    # The same sessions in each run. All of them together count as one open model.
    assert {call.sealed.token for call in computing} == {
        call.sealed.token for call in calls[1] if isinstance(call, ExecutePart)
    }
    assert sum(share_of(call.sealed.token) for call in computing) == pytest.approx(1)


def ops_of(call: ExecuteBundle | ExecuteOp) -> list[Op]:
    return [call.op] if isinstance(call, ExecuteOp) else list(call.plan.ops)


def test_equal_splits_are_a_bundle_for_each_worker() -> None:
    slow, fast = (partition(mlp(), split(mlp(), "sample")) for _ in range(2))
    # The half of the input that moves, the layers on each worker, and the concatenation of the output.
    assert sorted(map(len, bundles_of(slow, {op.id: 1.0 for op in slow.ops}))) == [1, 1, 8, 8]
    # Ops that cost less than a task wait for others in one bundle.
    assert sorted(map(len, bundles_of(fast, {}))) == [1, 8, 9]


def test_bundles_delay_nothing_that_another_worker_waits_for() -> None:
    # On both workers: attention, then a second half that reads the attention of the other one.
    graph = block(64, 64)
    parts = partition(graph, split(graph, "attribute2", "attribute1"))
    ops, edges, costs = parts.live_ops, parts.live_edges, {op.id: 0.05 for op in parts.ops}
    finest = _finest(ops, edges, costs)
    merged = _merged(finest, parts)
    assert len(merged) < len(finest)
    longest_s, shortest_s = (_simulated(groups, _reads(groups, parts))[0] for groups in (merged, finest))
    assert longest_s <= 1.01 * shortest_s
    n_ops = sum(len(group.ops) for group in merged)
    assert n_ops == len(ops)


@pytest.mark.parametrize("granularity", ["bundles", "ops", None])
def test_a_strategy_needs_no_cluster(granularity: str | None) -> None:
    graph = mlp()
    inputs = random_inputs(graph)
    bound = Model(graph).bind(inputs, strategy=two_workers(graph, 0), granularity=granularity)
    assert bound.granularity == (granularity or "bundles")
    assert_close(bound.compute(scheduler="sync"), evaluate(graph, inputs))


def test_lazy_inputs_are_split_too_and_sources_may_be_outputs() -> None:
    b = GraphBuilder("open")
    x = b.input("x", "float32", ("n", 4))
    weight = b.constant(np.ones((4, 4), np.float32), "w")
    product = b.op("MatMul", x, weight, name="m")
    b.output(x, weight, z=b.op("Relu", product, name="r"))
    model = b.build()
    halves = Configuration(("0", "1"), {"sample": 2})
    strategy = Strategy(("0", "1"), {"m": halves, "r": halves})
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    for value in (array, da.from_array(array, chunks=(2, 4))):
        found = model.bind(x=value, strategy=strategy).compute(scheduler="sync")
        assert_allclose(found["z"], array @ np.ones((4, 4)))
        assert_allclose(found["x"], array)
        assert_allclose(found["w"], 1)
    with pytest.raises(
        StrategyError, match=r"'m' \(MatMul\) cannot be split: the shape of '.*' is not known"
    ):
        model.bind(x=delayed(array), strategy=strategy)


@pytest.fixture
def client(process_client: Client) -> Iterator[Client]:
    with process_client.as_current():
        yield process_client


@pytest.mark.cluster
@pytest.mark.parametrize("name", MODELS)
def test_parts_on_two_processes_give_what_the_whole_gives(name: str, process_client: Client) -> None:
    graph = MODELS[name]
    inputs = random_inputs(graph)
    expected = evaluate(graph, inputs)
    for seed in range(2):
        strategy = on_cluster(two_workers(graph, seed), process_client)
        placed = Model(graph).scatter(process_client, strategy)
        for model in (placed, Model(graph)):
            bound = model.bind(inputs, strategy=None if model is placed else strategy)
            assert_close(process_client.compute(bound).result(), expected)
            assert executed(process_client, bound.run).executed_ops == len(placed.graph.live_ops)


@pytest.mark.cluster
def test_parts_run_where_the_strategy_says(process_client: Client) -> None:
    graph = mlp()
    one, two = sorted(process_client.scheduler_info(n_workers=-1)["workers"])
    only = Strategy((two,), {op.name: Configuration((two,)) for op in graph.live_ops})
    bound = bind_graph(graph, random_inputs(graph), strategy=only, granularity="ops")
    persisted = process_client.persist(bound)
    process_client.compute(persisted).result()
    by_worker = process_client.has_what()
    assert not any("gemm" in str(key) or "softmax" in str(key) for key in by_worker[one])
    assert any("softmax" in str(key) for key in by_worker[two])


@pytest.mark.cluster
def test_each_worker_gets_the_weights_that_its_parts_read(process_client: Client) -> None:
    graph = block()
    # Each weight is cut in two: by columns, or by rows where products are summed up.
    parts = Model(graph).scatter(process_client, split(graph, "contracted", "parameter2", "sample")).graph
    big = {
        source.value.key: source
        for source in parts.sources
        if source.is_scattered and source.spec.nbytes > 128
    }
    where = process_client.who_has()
    assert all(len(where[key]) == 1 for key, source in big.items() if "[" in source.name)
    whole = sum(source.spec.nbytes or 0 for source in graph.sources if source.spec.shape == (16, 64))
    cut = [source for source in big.values() if source.spec.shape == (8, 64)]
    assert sum(source.spec.nbytes or 0 for source in cut) == whole


@pytest.mark.cluster
def test_names_of_workers_are_those_of_the_default_client(client: Client) -> None:
    graph = mlp()
    inputs = random_inputs(graph)
    parts = in_parts(graph, inputs, two_workers(graph, 0))
    assert {op.worker for op in parts.ops} == set(client.scheduler_info(n_workers=-1)["workers"])
    with pytest.raises(StrategyError, match="worker 'gone' of the strategy must be one of"):
        bind_graph(graph, inputs, strategy=whole_on(graph, ("gone",)))


def test_a_strategy_does_not_fit_all_options() -> None:
    graph = mlp()
    inputs, strategy = random_inputs(graph), two_workers(graph, 0)
    with pytest.raises(UsageError, match="a strategy needs granularity 'bundles' or 'ops', got 'whole'"):
        bind_graph(graph, inputs, strategy=strategy, granularity="whole")
    with pytest.raises(UsageError, match="in parts already"):
        bind_graph(partition(graph, strategy), inputs, strategy=strategy)
    with pytest.raises(UsageError, match="a Strategy, as read_strategy"):
        bind_graph(graph, inputs, strategy="s.json")  # type: ignore[arg-type]
