"""Inputs and outputs of graphs in NumPy's files."""

from __future__ import annotations

import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ferroflow_dask.exceptions import BindError, FerroflowError, UsageError
from ferroflow_dask.graph import Graph, TensorSpec
from ferroflow_dask.graph.inputs import check_dtype
from ferroflow_dask.whole_files import replacing

#: How .npy and .npz files begin.
_MAGIC = (np.lib.format.MAGIC_PREFIX, b"PK\x03\x04", b"PK\x05\x06")
#: What NumPy and zipfile raise over files that are none of theirs.
_DAMAGED = (
    *(OSError, ValueError, EOFError, SyntaxError, RuntimeError, tokenize.TokenError),
    *(zipfile.BadZipFile, zlib.error),
)


def read_inputs(graph: Graph, files: Sequence[str]) -> dict[str, Any]:
    """Return arrays by name from files given as `[NAME=]PATH`.

    Parameters
    ----------
    graph : Graph
        Tells the name of an input where it is the only one.
    files : sequence of str
        A `.npy` file holds one input, an `.npz` file any number under their names.

    Raises
    ------
    UsageError
        A file cannot be read, it is not said which input it holds, or two hold the same.
    """
    specs = {**graph.inputs, **graph.defaults}
    if not specs:
        raise UsageError(f"graph {graph.name!r} has no inputs; leave --input {files[0]!r} out")
    inputs: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for text in files:
        name, is_named, path = text.partition("=")
        if not is_named or (name not in specs and os.path.isfile(text)):
            name, path = "", text  # file names may have a =, too
        loaded = _load(path)
        if isinstance(loaded, dict):
            if name:
                raise UsageError(
                    f"--input {text!r}: an .npz file has its own names; give it without {name!r}"
                )
        elif not name:
            if len(graph.inputs) != 1:
                raise UsageError(f"--input {path!r} needs a name, like {next(iter(specs))}={path}")
            name = next(iter(graph.inputs))
        arrays = loaded if isinstance(loaded, dict) else {name: loaded}
        if twice := [name for name in arrays if name in inputs]:
            raise UsageError(
                f"--input {sources[twice[0]]!r} and --input {text!r} both give input {twice[0]!r}; give one"
            )
        _check_dtypes(specs, path, arrays)
        inputs.update(arrays)
        sources.update(dict.fromkeys(arrays, text))
    return inputs


def _check_dtypes(specs: Mapping[str, TensorSpec], path: str, arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        if name in specs:
            try:
                check_dtype(name, array, specs[name])
            except BindError as error:
                raise BindError(f"{str(error).replace('; pass ', '; save ')} in {path!r}") from error


def _load(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            _check_magic(path, file.peek(len(_MAGIC[0])))
            loaded = np.load(file, allow_pickle=False)
            return dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    except MemoryError as error:
        raise UsageError(f"--input {path!r} says that it is larger than memory: {error}") from error
    except UsageError:
        raise
    except _DAMAGED as error:
        has_objects = str(error).startswith("Object arrays")
        cure = "; save texts as array.astype(str), numbers with a dtype of theirs" if has_objects else ""
        raise UsageError(f"--input {path!r} cannot be read as .npy or .npz: {error}{cure}") from error


def _check_magic(path: str, head: bytes) -> None:
    """Raise `UsageError` where a file begins as no file of NumPy's does, which NumPy takes for a pickle."""
    if head.startswith(_MAGIC) or not head:  # what is empty, NumPy tells
        return
    stem, _ = os.path.splitext(path)
    raise UsageError(
        f"--input {path!r} is no .npy or .npz file, which --input takes; write one by "
        f"numpy.save({stem + '.npy'!r}, array)"
    )


def check_outputs(path: str, graph: Graph) -> None:
    """Raise `UsageError` where `write_outputs` would: an output of the graph is known to be no array."""
    for name in graph.outputs:
        if graph.spec(name).is_sequence:
            raise UsageError(
                f"--output {path!r} takes arrays, and output {name!r} of graph {graph.name!r} is a sequence; "
                f"leave --output out, or get it in Python: load_onnx(file).bind(…).compute()[{name!r}]"
            )


def write_outputs(path: str, outputs: Mapping[str, Any]) -> None:
    """Write arrays by name to an `.npz` file.

    Raises
    ------
    UsageError
        An output is no array (a sequence, say).
    FerroflowError
        The file cannot be written; one that was there is as it was.
    """
    arrays = {name: as_numpys(name, value) for name, value in outputs.items()}
    # As np.savez does, which would take an output named "file" for its own argument.
    try:
        with replacing(path) as beside, zipfile.ZipFile(beside, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
    except OSError as error:
        raise FerroflowError(f"--output {path!r} cannot be written: {error.strerror or error}") from error


def as_numpys(name: str, value: Any) -> Any:
    """Return an output as an array of NumPy's own types; raises `UsageError` if it is none."""
    if not isinstance(value, np.ndarray | np.generic):
        raise UsageError(f"--output writes arrays; output {name!r} is a {type(value).__name__}")
    array = np.asarray(value)
    return array.astype(str) if array.dtype == object else _of_numpys_type(array)  # ONNX's strings


def _of_numpys_type(array: Any) -> Any:
    """Return an array of a type that NumPy's files have, with the same values.

    Of what only `ml_dtypes` has, floats (bfloat16, float8, …) become float32, and integers (int4, …) int8 or
    uint8.
    """
    if array.dtype.type.__module__ != "ml_dtypes":
        return array
    name = array.dtype.name
    if name.startswith(("int", "uint")):
        return array.astype(np.int8 if name.startswith("int") else np.uint8)
    return array.astype(np.float32)
