"""Large weights in files: workers map the files, and onnxruntime reads them; bytes travel if they must."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from distributed import Client
from models import mlp

from ferroflow_dask import Model, load_onnx
from ferroflow_dask.exceptions import FerroflowError
from ferroflow_dask.graph.mapped import in_file
from ferroflow_dask.kernels import ort_graph
from ferroflow_dask.kernels.ort_graph import open_graph
from ferroflow_dask.kernels.session_settings import SessionSettings
from ferroflow_dask.lowering import batch_model, mapped

X = np.random.default_rng(0).standard_normal((3, 784)).astype("float32")
#: Of the large weight [B].
NBYTES = 2000 * 784 * 4


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model with 6 MB of weights in another file; as many count as large."""
    monkeypatch.setattr(mapped, "_LEAST", NBYTES)
    path = tmp_path / "m.onnx"
    onnx.save(mlp(hidden=2000), path, save_as_external_data=True, location="w.bin", size_threshold=64)
    return path


def expected(path: Path) -> Any:
    return onnxruntime.InferenceSession(path).run(None, {"x": X})[0]


def as_bound(model: Model, client: Client) -> Any:
    return model.bind(x=X)


def as_batches(model: Model, client: Client) -> Any:
    return model.map_batches(X)


def as_placed(model: Model, client: Client) -> Any:
    return model.scatter(client).bind(x=X)


def result(collection: Any, client: Client) -> Any:
    found = client.compute(collection).result()
    return next(iter(found.values())) if isinstance(found, dict) else found


@pytest.mark.cluster
@pytest.mark.parametrize("way", [as_bound, as_batches, as_placed])
def test_no_weights_travel_to_workers_that_can_read_the_file(
    way: Any, path: Path, process_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_model, "runner_here", None)  # the client opens no session
    with process_client.as_current():
        collection = way(load_onnx(path), process_client)
        sent = sum(len(pickle.dumps(task)) for task in dict(collection.__dask_graph__()).values())
        assert sent < NBYTES / 20
        np.testing.assert_allclose(result(collection, process_client), expected(path), rtol=1e-4, atol=1e-5)


@pytest.mark.cluster
def test_placed_weights_are_mapped_on_each_worker(path: Path, process_client: Client) -> None:
    def of_files(dask_worker: Any) -> list[bool]:
        from ferroflow_dask.graph.mapped import in_file

        return [in_file(value) is not None for value in dask_worker.data.values() if value.nbytes > 2**20]

    placed = load_onnx(path).scatter(process_client)
    for are_mapped in process_client.run(of_files).values():
        assert are_mapped
        assert all(are_mapped)
    assert placed.graph.sources


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore:Sending large graph")
@pytest.mark.parametrize("way", [as_bound, as_batches, as_placed])
def test_the_bytes_travel_if_a_worker_cannot_read_the_file(
    way: Any, path: Path, process_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "_all_here", lambda _: False)
    with process_client.as_current():
        collection = way(load_onnx(path), process_client)
        content = sum(len(pickle.dumps(task)) for task in dict(collection.__dask_graph__()).values())
        assert (content > NBYTES) == (way is not as_placed)
        np.testing.assert_allclose(result(collection, process_client), expected(path), rtol=1e-4, atol=1e-5)


def test_a_file_that_has_changed_gets_one_line(path: Path) -> None:
    bound = load_onnx(path).bind(x=X)
    weights = path.with_name("w.bin")
    weights.write_bytes(weights.read_bytes() + b"\0")
    with pytest.raises(
        FerroflowError, match=r"w.bin: must be the file that the model was loaded from"
    ) as raised:
        bound.compute(scheduler="sync")
    assert "\n" not in str(raised.value)


def test_a_session_reads_very_large_weights_from_their_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_graph, "_OWN_MOST", 0)
    graph = load_onnx(path).graph
    constants = {source.name: source.value for source in graph.sources if not source.is_input}
    session = open_graph(graph, constants, SessionSettings(1))
    assert not isinstance(session, str), session
    assert [entry.name for entry in session._session.get_inputs()] == ["x"]
    np.testing.assert_allclose(next(iter(session({"x": X}).values())), expected(path), rtol=1e-4, atol=1e-5)


def test_views_of_mapped_arrays_are_where_they_begin(path: Path) -> None:
    weights = np.memmap(path.with_name("w.bin"), "float32", "r")
    for view in (weights[10:], np.asarray(weights)[10:].reshape(2, -1)[1:]):
        found = in_file(view)
        assert found is not None
        np.testing.assert_array_equal(found.open(), view)
    assert in_file(weights[::2]) is None
    assert in_file(np.array(weights)) is None
