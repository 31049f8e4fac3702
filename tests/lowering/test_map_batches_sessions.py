"""Options of the sessions that compute batches, and sessions that are opened before the first batch."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import onnxruntime
import pytest
from batches import expected, rows
from distributed import Client
from models import mlp

from ferroflow_dask import load_onnx
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.kernels import session as sessions


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
