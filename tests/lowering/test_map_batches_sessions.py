"""Sessions that compute batches: their options, weights and memory, and a warm-up."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import onnxruntime
import pytest
from batches import expected, rows
from distributed import Client, LocalCluster
from models import mlp, model_of
from onnx import TensorProto, helper

from ferroflow_dask import Model, load_onnx
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Builder, graph_from_onnx
from ferroflow_dask.kernels import session as sessions
from ferroflow_dask.lowering import scatter
from ferroflow_dask.lowering.batch_model import LoadedModel, RunModel
from ferroflow_dask.lowering.sealed import Sealed


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of sessions that this process has opened."""
    seen: list[Any] = []
    session = onnxruntime.InferenceSession

    def open_session(model: Any, options: Any = None, **others: Any) -> Any:
        seen.append(options)
        return session(model, options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", open_session)
    return seen


@pytest.mark.parametrize("batch_size", [None, 2])
def test_sessions_have_the_options(opened: list[Any], batch_size: int | None) -> None:
    x = rows(5, 784)
    y = load_onnx(mlp()).map_batches(
        da.from_array(x, chunks=(3, 784)),
        batch_size=batch_size,
        intra_op_num_threads=3,
        session_options={
            "graph_optimization_level": "basic",
            "enable_mem_pattern": False,
            "session.intra_op.allow_spinning": "1",
        },
    )
    np.testing.assert_allclose(y.compute(scheduler="sync"), expected(mlp(), x=x)[0], rtol=1e-4, atol=1e-6)
    options = opened[0]
    assert options.intra_op_num_threads == 3
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert not options.enable_mem_pattern
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"


def test_other_options_are_another_session() -> None:
    model, x = load_onnx(mlp()), da.from_array(rows(2, 784))
    for n_threads in (1, 2, 1):
        model.map_batches(x, intra_op_num_threads=n_threads).compute(scheduler="sync")
    settings = [key[1][-1] for key in list(sessions._runners.order)[-2:]]
    assert [setting.n_threads for setting in settings] == [2, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"session_options": {"threads": 3}},
            "unknown session option 'threads'; .*enable_mem",
        ),
        ({"session_options": ["a"]}, r"session_options must be a dict of fields .* got \['a'\]"),
        ({"session_options": {"enable_profiling": "x"}}, "'enable_profiling' must be a bool, got 'x'"),
        (
            {"session_options": {"graph_optimization_level": "some"}},
            "graph_optimization_level must be one of disabled, basic, extended, all, got 'some'",
        ),
        ({"intra_op_num_threads": 0}, "intra_op_num_threads must be an integer, at least 1, got 0"),
    ],
)
def test_options_that_onnxruntime_does_not_have_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_onnx(mlp()).map_batches(rows(2, 784), **options)


@pytest.mark.cluster
@pytest.mark.parametrize("is_scattered", [False, True])
def test_warm_up_opens_the_model_on_each_worker(process_client: Client, is_scattered: bool) -> None:
    def n_open(token: str) -> int:
        from ferroflow_dask.kernels import session

        return sum(key[0].startswith(token) for key in session._runners)

    class Halves:
        def __call__(self, part: Any) -> Any:
            return part / np.float32(2)

    model = load_onnx(mlp())
    x = da.from_array(rows(4, 784), chunks=2)
    with process_client.as_current():
        model = model.scatter(process_client) if is_scattered else model
        y = model.map_batches(x, warm_up=True, preprocess=Halves)
    graph = dict(y.__dask_graph__())
    (function,) = {
        node.value for node in graph.values() if type(getattr(node, "value", None)).__name__ == "MapChunk"
    }
    run = getattr(function.model, "run", function.model)
    assert set(process_client.run(n_open, run.sealed.token).values()) == {1}
    found = process_client.compute(y).result()
    np.testing.assert_allclose(
        found, expected(mlp(), x=x.compute(scheduler="synchronous") / 2)[0], rtol=1e-4, atol=1e-6
    )


def test_warm_up_needs_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_client() -> None:
        raise ValueError("no clients found")

    monkeypatch.setattr("ferroflow_dask.lowering.warm_up.default_client", no_client)
    with pytest.raises(UsageError, match="warm_up needs a client"):
        load_onnx(mlp()).map_batches(rows(2, 784), warm_up=True)


def n_fetched(client: Client) -> int:
    """Return the bytes that workers have fetched of each other."""

    def fetched(dask_worker: Any) -> int:  # in here, since workers cannot import tests
        return sum(int(entry["total"]) for entry in dask_worker.transfer_incoming_log)

    return sum(client.run(fetched).values())


@pytest.mark.cluster
def test_shapes_are_tried_out_where_the_weights_are(thread_client: Client) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Shape", ["h"], ["s"]),
        helper.make_node("Slice", ["s", "zero", "one"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["t"], axis=0),
        helper.make_node("Reshape", ["h", "t"], ["y"]),
    ]
    w = rows(40, 60)
    constants = {"w": w, "zero": np.int64([0]), "one": np.int64([1]), "rest": np.int64([2, -1])}
    model = model_of(nodes, {"x": (TensorProto.FLOAT, ("n", 40))}, ["y"], initializers=constants)
    x = rows(6, 40)
    y = Model(scatter(graph_from_onnx(model), thread_client)).map_batches(da.from_array(x, chunks=4))
    assert y.shape == (6, 2, 30)
    np.testing.assert_allclose(
        thread_client.compute(y).result(), (x @ w).reshape(6, 2, 30), rtol=1e-4, atol=1e-5
    )


@pytest.mark.cluster
@pytest.mark.usefixtures("_copies_stay")
@pytest.mark.parametrize("is_scattered", [False, True], ids=["in the graph", "placed"])
def test_weights_travel_to_each_worker_once(process_client: Client, is_scattered: bool) -> None:
    model, x = mlp(hidden=512), rows(64, 784)
    graph = graph_from_onnx(model)
    if is_scattered:
        graph = scatter(graph, process_client)
    weights = sum(source.spec.nbytes or 0 for source in graph.sources if not source.is_input)

    before = n_fetched(process_client)
    y = Model(graph).map_batches(da.from_array(x, chunks=(4, -1)))
    found = process_client.compute(y).result()
    np.testing.assert_allclose(found, expected(model, x=x)[0], rtol=1e-4, atol=1e-5)
    moved = n_fetched(process_client) - before
    assert moved < (0.2 if is_scattered else 1.2) * weights + x.nbytes


@pytest.mark.cluster
def test_very_large_weights_stay_where_they_are(
    thread_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ferroflow_dask.kernels import ort_graph as provider

    monkeypatch.setattr(provider, "_OWN_MOST", 1000)
    x = rows(6, 784)
    graph = scatter(graph_from_onnx(mlp()), thread_client)
    found = thread_client.compute(Model(graph).map_batches(da.from_array(x, chunks=(2, -1)))).result()
    np.testing.assert_allclose(found, expected(mlp(), x=x)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_three_gigabytes_of_weights_on_workers_of_six() -> None:
    builder, n = Builder("large"), 11_000
    weights = [rows(n, n) / np.float32(np.sqrt(n)) for _ in range(6)]
    value = builder.input("x", "float32", ("n", n))
    for weight in weights:
        value = builder.op("Relu", builder.op("MatMul", value, builder.constant(weight)))
    builder.output(y=value)
    x = rows(32, n)
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="6GiB", dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        client.amm.stop()  # it would drop copies for which no task waits
        graph = scatter(builder.to_graph(), client)
        found = client.compute(Model(graph).map_batches(da.from_array(x, chunks=(8, -1)))).result()
        assert n_fetched(client) < 10 * x.nbytes  # once, when they were placed
    for weight in weights:
        x = np.maximum(x @ weight, 0)
    np.testing.assert_allclose(found, x, rtol=1e-3, atol=1e-4)


def test_weights_count_in_a_workers_memory() -> None:
    from dask.sizeof import sizeof

    run = RunModel(Sealed("", b"graph"), (), ("x",), frozenset("x"), None)
    assert sizeof(LoadedModel(run, {"a": np.zeros(1000), "b": np.zeros(10)})) >= 8085
