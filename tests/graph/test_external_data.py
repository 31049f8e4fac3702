"""Weights in files: read inside the model's folder only, damage named, mapped on workers if large."""

from __future__ import annotations

import os
import pickle
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from agreement import assert_equal_to_reference
from distributed import Client
from models import mlp
from onnx import TensorProto, helper
from onnx.helper import make_node as node
from onnx.helper import make_tensor_value_info as info

from ferroflow_dask import Model, load_onnx
from ferroflow_dask.exceptions import FerroflowError, ModelError
from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.graph.mapped import in_file
from ferroflow_dask.kernels import evaluate, ort_graph
from ferroflow_dask.kernels.ort_graph import open_graph
from ferroflow_dask.kernels.session_settings import SessionSettings
from ferroflow_dask.lowering import batch_model, mapped

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL


@pytest.fixture
def external(tmp_path):
    """Save and return the folder of a model whose weights are in `weights.bin` beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save(mlp(), folder / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=64)
    assert (folder / "m.onnx").stat().st_size < 10_000
    return folder


def relocate(path: Path, **entries: str) -> None:
    """Change where the first external weight is said to be."""
    model = onnx.load(path, load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    for entry in tensor.external_data:
        entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("location", ["weights.bin", "data/w", "link.bin"])
def test_weights_in_other_files_of_the_folder_are_read(external, monkeypatch, location):
    (external / "data").mkdir()
    shutil.copy(external / "weights.bin", external / "data" / "w")
    (external / "link.bin").symlink_to("weights.bin")
    relocate(external / "m.onnx", location=location)
    monkeypatch.chdir(external)
    for path in ("m.onnx", external / "m.onnx"):
        graph = graph_from_onnx(path)
        assert_equal_to_reference(mlp(), graph, x=np.ones((2, 784), np.float32))


def test_external_tensors_inside_nodes_and_sub_graphs_are_read(tmp_path):
    def tensor(name: str) -> onnx.TensorProto:
        (tmp_path / name).write_bytes(np.float32([3, 4]).tobytes())
        result = TensorProto(name=name, data_type=FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
        result.external_data.add(key="location", value=name)
        return result

    def branch(name: str, *nodes: onnx.NodeProto, **extra: Any) -> onnx.GraphProto:
        return helper.make_graph(list(nodes), name, [], [info("r", FLOAT, [2])], **extra)

    then = branch("t", node("Identity", ["w"], ["r"]), initializer=[tensor("w")])
    otherwise = branch("e", node("Constant", [], ["r"], value=tensor("k")))
    nodes = [node("If", ["c"], ["i"], then_branch=then, else_branch=otherwise)]
    nodes += [node("Constant", [], ["d"], value=tensor("q")), node("Add", ["i", "d"], ["y"])]
    graph = helper.make_graph(nodes, "g", [info("c", BOOL, [])], [info("y", FLOAT, [2])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    imported = graph_from_onnx(tmp_path / "m.onnx")
    for c in (True, False):
        assert evaluate(imported, {"c": np.array(c)})["y"].tolist() == [6, 8]


@pytest.mark.parametrize(
    "location",
    [
        pytest.param("../secret.bin", id="a file in the folder above"),
        pytest.param("../model2/secret.bin", id="a folder whose name begins with the model's"),
        pytest.param("{outside}", id="an absolute path"),
        pytest.param("{inside}", id="an absolute path even if it is inside"),
        pytest.param("link.bin", id="a link to a file outside"),
        pytest.param("folder/secret.bin", id="a link to a folder outside"),
        pytest.param(".", id="the folder itself"),
        pytest.param("", id="nothing"),
    ],
)
def test_no_file_outside_the_model_folder_is_read(external, location):
    secret = external.parent / "secret.bin"
    shutil.copy(external / "weights.bin", secret)
    (external.parent / "model2").mkdir()
    shutil.copy(secret, external.parent / "model2")
    (external / "link.bin").symlink_to(secret)
    (external / "folder").symlink_to(external.parent)
    relocate(external / "m.onnx", location=location.format(outside=secret, inside=external / "weights.bin"))
    with pytest.raises(
        ModelError, match=r"m\.onnx: weight 'w0' .*outside the model's folder; it is not read"
    ):
        graph_from_onnx(external / "m.onnx")


DAMAGES = {
    "gone": (lambda f: (f / "weights.bin").unlink(), "'weights.bin', and there is no such file"),
    "cut off": (lambda f: os.truncate(f / "weights.bin", 9), "beyond the 9 bytes"),
    "a negative offset": (lambda f: relocate(f / "m.onnx", offset="-4"), "beyond"),
    "no number": (lambda f: relocate(f / "m.onnx", offset="x"), "damaged external data"),
    "no path": (lambda f: relocate(f / "m.onnx", location="a\0b"), "damaged external data"),
    "a length that does not fit": (lambda f: relocate(f / "m.onnx", length="8"), "'w0' is damaged"),
    "a pipe": (lambda f: (os.remove(f / "weights.bin"), os.mkfifo(f / "weights.bin")), "no such"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_external_data(external, damage, message):
    damage(external)
    with pytest.raises(ModelError, match=message) as error:
        graph_from_onnx(external / "m.onnx")
    assert "\n" not in str(error.value)


def test_large_weights_are_mapped_not_read(tmp_path: Path) -> None:
    """What a client holds of a large model are pages of the file, which the system may drop."""
    model = mlp(hidden=1024)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=64)
    graph = graph_from_onnx(path)
    values = [value for value in graph.constants.values() if value.nbytes >= 2**20]
    assert len(values) == 2
    for value in values:
        base = value
        while not isinstance(base, np.memmap):
            base = base.base
        assert type(value) is np.ndarray
        assert not value.flags.writeable
    assert_equal_to_reference(mlp(hidden=1024), graph, x=np.ones((2, 784), np.float32))


def test_loading_a_large_model_takes_no_memory_of_its_size(tmp_path: Path) -> None:
    n, width = 8, 2048  # 128 MiB
    nodes, tensors = [], []
    (tmp_path / "w.bin").write_bytes(bytes(4 * width * width) * n)
    for i in range(n):
        tensor = TensorProto(name=f"w{i}", data_type=FLOAT, dims=[width, width])
        tensor.data_location = TensorProto.EXTERNAL
        places = {"location": "w.bin", "offset": 4 * width * width * i, "length": 4 * width * width}
        for key, place in places.items():
            tensor.external_data.add(key=key, value=str(place))
        tensors.append(tensor)
        nodes.append(node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]))
    ends = [info(f"x{i}", FLOAT, ["n", width]) for i in (0, n)]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    tracemalloc.start()
    try:
        loaded = graph_from_onnx(tmp_path / "m.onnx")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(value.nbytes for value in loaded.constants.values()) == 128 * 2**20
    assert peak < 16 * 2**20


# ---------------------------------------------------------------- on workers

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
