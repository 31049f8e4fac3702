"""ONNX models from paths, URLs, file objects, bytes and messages, and the folders of their weights."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from ferroflow_dask.arguments import check_kind
from ferroflow_dask.exceptions import ModelError, UsageError
from ferroflow_dask.graph import custom_ops
from ferroflow_dask.graph.protos import nested_nodes, tensors_of_node
from ferroflow_dask.graph.weights import first_line

#: What a file in onnxruntime's own format has after its first four bytes.
_ORT_MARK = b"ORTM"
_LOG_FATAL = 4


@dataclass(frozen=True)
class ModelFile:
    """A model that has been read, without the weights in other files.

    Parameters
    ----------
    proto : ModelProto
    folder : Path or None
        Where weights in other files are.
    name : str
        Name of the file without its suffix; empty if there is no file.
    """

    proto: onnx.ModelProto
    folder: Path | None
    name: str = ""


def label_of(model: Any) -> str:
    """Return what errors call a model.

    Raises
    ------
    UsageError
        It is nothing that can be loaded.
    """
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    if hasattr(model, "read"):
        return _path_of(model) or "model"
    wanted = "a file's path or URL, the bytes of a file, an open file, or an onnx.ModelProto"
    check_kind("load_onnx", model, (bytes, bytearray, memoryview, onnx.ModelProto), wanted)
    return "model"


@contextmanager
def read_model(model: Any, folder: str | os.PathLike[str] | None = None) -> Iterator[ModelFile]:
    """Yield a model; its folder is there in the context only, if the model comes from a URL.

    Parameters
    ----------
    model : str, path, bytes, file object or ModelProto
    folder : str or path, optional
        Where weights in other files are. The default is the folder of the model's file.

    Raises
    ------
    ModelError
        The model cannot be read, or is no model.
    """
    own = None if folder is None else Path(folder)
    if isinstance(model, onnx.ModelProto):
        yield ModelFile(_checked(model), own)
        return
    if isinstance(model, str | os.PathLike):
        text = os.fspath(model)
        if is_url(text):
            with _fetched(text, own) as found:
                yield found
            return
        path = Path(text)
        yield ModelFile(_parse(_read(path)), own or path.parent, path.stem)
        return
    content, path_of_file = _content(model), _path_of(model)
    if path_of_file:
        path = Path(path_of_file)
        yield ModelFile(_parse(content), own or path.parent, path.stem)
        return
    yield ModelFile(_parse(content), own)


def is_url(text: str) -> bool:
    """Return whether a text is a URL and not the path of a file that exists."""
    return "://" in text and not os.path.exists(text)


def _path_of(file: Any) -> str:
    """Return the path of an open file; empty if it has none."""
    name = getattr(file, "name", None)
    return name if isinstance(name, str) and os.path.isfile(name) else ""


def _content(model: Any) -> bytes:
    if not hasattr(model, "read"):
        return bytes(model)
    try:
        content = model.read()
    except (OSError, ValueError) as error:  # a closed file, or text that is none
        raise ModelError(
            f"cannot be read; open the file with open(path, 'rb'): {first_line(error)}"
        ) from error
    if not isinstance(content, bytes):
        raise UsageError(
            f"load_onnx takes files that yield bytes, got {type(content).__name__}; open the file with "
            "open(path, 'rb')"
        )
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError("there is no such file") from None
    except IsADirectoryError:
        raise ModelError("is a folder; give the .onnx file in it") from None
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}") from error


@contextmanager
def _fetched(url: str, folder: Path | None) -> Iterator[ModelFile]:
    """Yield the model at a URL; weights in other files are in a folder that exists in the context only.

    Large weights stay mapped after it: the system keeps deleted files as long as they are mapped.
    """
    import fsspec

    stem = Path(posixpath.basename(url.partition("::")[0])).stem
    with TemporaryDirectory(prefix="ferroflow-") as made:
        try:
            files, path = fsspec.core.url_to_fs(url)
            if isinstance(files, fsspec.implementations.local.LocalFileSystem):
                proto, there = _parse(_read(Path(path))), Path(path).parent
            else:
                proto, there = _parse(files.cat_file(path)), Path(made)
                for location in () if folder else _locations(proto):
                    target = there / location
                    target.parent.mkdir(parents=True, exist_ok=True)
                    files.get_file(posixpath.join(posixpath.dirname(path), location), str(target))
        except ModelError:
            raise
        except FileNotFoundError as error:
            raise ModelError(f"there is no such file: {first_line(error)}") from error
        except Exception as error:
            raise ModelError(f"cannot be fetched: {first_line(error)}") from error
        yield ModelFile(proto, folder or there, stem)


def _locations(proto: onnx.ModelProto) -> list[str]:
    """Return the files that a model's weights are in, relative to its folder; none outside of it."""
    nodes = (proto.graph.node, *(function.node for function in proto.functions))
    tensors = [
        *proto.graph.initializer,
        *(part for sparse in proto.graph.sparse_initializer for part in (sparse.values, sparse.indices)),
        *(tensor for some in nodes for node in nested_nodes(some) for tensor in tensors_of_node(node)),
    ]
    found = {
        posixpath.normpath(entry.value)
        for tensor in tensors
        for entry in tensor.external_data
        if entry.key == "location" and entry.value
    }
    # The others are refused when they are read.
    return sorted(path for path in found if not path.startswith(("/", "..")))


def _parse(content: bytes) -> onnx.ModelProto:
    if not content:
        raise ModelError("is empty")
    if content[4:8] == _ORT_MARK:
        content = _from_ort(content)
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise ModelError("is no ONNX model, or is truncated") from error
    return _checked(proto)


def _checked(proto: onnx.ModelProto) -> onnx.ModelProto:
    if not proto.HasField("graph"):
        raise ModelError("is no ONNX model: it has no graph")
    if not proto.graph.output:
        raise ModelError("has no outputs, so there is nothing to compute")
    return proto


def _from_ort(content: bytes) -> bytes:
    """Return a model in onnxruntime's own format as ONNX: onnxruntime opens it and writes it again."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ModelError("has onnxruntime's own format, and onnxruntime is not installed") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _LOG_FATAL
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.save_model_format", "ONNX")
    custom_ops.register(options)
    with TemporaryDirectory(prefix="ferroflow-") as folder:
        written = Path(folder) / "model.onnx"
        options.optimized_model_filepath = str(written)
        try:
            onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            return written.read_bytes()
        except Exception as error:
            raise ModelError(
                f"has onnxruntime's own format, but onnxruntime does not open it: {first_line(error)}"
            ) from error
