"""`load_onnx` takes paths, URLs, bytes, open files and messages, in ONNX's format and in onnxruntime's."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import onnx
import onnxruntime
import pytest
from models import mlp

from ferroflow_dask import ClusterProfile, load_onnx
from ferroflow_dask.exceptions import FerroflowError, ModelError, UsageError

X = np.random.default_rng(0).standard_normal((3, 784)).astype("float32")
(EXPECTED,) = onnxruntime.InferenceSession(mlp().SerializeToString()).run(None, {"x": X})
#: Larger than what is mapped instead of read.
LARGE = 400


def output(model: Any, x: Any = X, **options: Any) -> Any:
    return next(iter(load_onnx(model, **options).bind(x=x).compute(scheduler="sync").values()))


def save(folder: Path, hidden: int = 32) -> Path:
    """Write a model whose weights are in another file."""
    folder.mkdir(exist_ok=True)
    path = folder / "m.onnx"
    onnx.save(mlp(hidden=hidden), path, save_as_external_data=True, location="w.bin", size_threshold=64)
    return path


def as_ort(model: onnx.ModelProto, path: Path) -> Path:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    return path


@pytest.mark.parametrize(
    "given",
    [
        lambda path: path,
        str,
        Path.read_bytes,
        lambda path: bytearray(path.read_bytes()),
        lambda path: io.BytesIO(path.read_bytes()),
        onnx.load,
        lambda path: f"file://{path}",
    ],
    ids=["path", "text", "bytes", "bytearray", "file in memory", "message", "URL of a local file"],
)
def test_a_model_is_loaded_from(given: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(mlp(), path)
    np.testing.assert_allclose(output(given(path)), EXPECTED, rtol=1e-4, atol=1e-5)


def test_an_open_file_has_a_name_and_weights_next_to_it(tmp_path: Path) -> None:
    with save(tmp_path).open("rb") as file:
        assert load_onnx(file).name == "m"
        file.seek(0)
        np.testing.assert_allclose(output(file), EXPECTED, rtol=1e-4, atol=1e-5)


def test_bytes_and_messages_get_their_weights_from_a_folder(tmp_path: Path) -> None:
    path = save(tmp_path)
    for model in (path.read_bytes(), onnx.load(path, load_external_data=False)):
        with pytest.raises(ModelError, match=r"give the model by its path, or .* folder=…\)"):
            load_onnx(model)
        np.testing.assert_allclose(output(model, folder=tmp_path), EXPECTED, rtol=1e-4, atol=1e-5)


def test_a_url_brings_its_weights_with_it(tmp_path: Path) -> None:
    path = save(tmp_path, hidden=LARGE)
    files = fsspec.filesystem("memory")
    for name in ("m.onnx", "w.bin"):
        files.pipe_file(f"/models/{name}", (tmp_path / name).read_bytes())
    try:
        assert load_onnx("memory://models/m.onnx").name == "m"
        expected = output(path)
        np.testing.assert_array_equal(output("memory://models/m.onnx"), expected)
        with files.open("/models/m.onnx") as file:
            np.testing.assert_array_equal(output(file, folder=tmp_path), expected)
        files.rm_file("/models/w.bin")
        with pytest.raises(ModelError, match=r"^memory://models/m.onnx: there is no such file"):
            load_onnx("memory://models/m.onnx")
    finally:
        files.rm("/models", recursive=True)


@pytest.mark.parametrize(
    "options", [{"granularity": "whole"}, {"granularity": "ops"}, {"granularity": "bundles"}]
)
def test_a_model_in_onnxruntimes_own_format_runs_in_each_granularity(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path = as_ort(mlp(), tmp_path / "m.ort")
    profile = ClusterProfile((1, 1)) if options["granularity"] == "bundles" else None
    model = load_onnx(path)
    assert any(op.domain == "com.microsoft" for op in model.graph.ops)  # as onnxruntime has fused it
    (found,) = model.bind(x=X, profile=profile, **options).compute(scheduler="sync").values()
    np.testing.assert_allclose(found, EXPECTED, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.map_batches(X).compute(scheduler="sync"), EXPECTED, rtol=1e-4, atol=1e-5)


def damaged_ort(folder: Path) -> bytes:
    content = bytearray(as_ort(mlp(), folder / "m.ort").read_bytes())
    content[8:64] = bytes(56)
    return bytes(content)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda _: io.StringIO("x"), UsageError, r"files that yield bytes, got str; open the file with open"),
        (lambda _: 7, UsageError, r"path or URL, the bytes of a file, an open file, or .* and not 7"),
        (
            lambda _: "nothing://m.onnx",
            ModelError,
            r"^nothing://m.onnx: cannot be fetched: Protocol not known",
        ),
        (lambda _: "memory://none/m.onnx", ModelError, r"^memory://none/m.onnx: there is no such file"),
        (lambda _: io.BytesIO(b""), ModelError, "^model: is empty"),
        (damaged_ort, ModelError, "^model: has onnxruntime's own format, but onnxruntime does not open it"),
    ],
    ids=["text file", "number", "unknown protocol", "missing at the URL", "empty file", "damaged .ort"],
)
def test_what_cannot_be_loaded_gets_one_line(
    given: Any, error: type[FerroflowError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as raised:
        load_onnx(given(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_closed_file_gets_one_line(tmp_path: Path) -> None:
    with save(tmp_path).open("rb") as file:
        pass
    with pytest.raises(ModelError, match=r"open the file with open\(path, 'rb'\): .*closed"):
        load_onnx(file)
