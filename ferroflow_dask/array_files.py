"""Inputs and outputs of graphs in NumPy's files."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ferroflow_dask.exceptions import FerroflowError, UsageError
from ferroflow_dask.graph import Graph


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
        A file cannot be read, or it is not said which input it holds.
    """
    inputs: dict[str, Any] = {}
    for text in files:
        name, is_named, path = text.partition("=")
        if not is_named:
            name, path = "", text
        loaded = _load(path)
        if isinstance(loaded, dict):
            if name:
                raise UsageError(
                    f"--input {text!r}: an .npz file has its own names; give it without {name!r}"
                )
            inputs.update(loaded)
            continue
        if not name:
            if len(graph.inputs) != 1:
                raise UsageError(
                    f"--input {path!r} needs a name, like {next(iter(graph.inputs), 'x')}={path}"
                )
            name = next(iter(graph.inputs))
        inputs[name] = loaded
    return inputs


def _load(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"--input {path!r} cannot be read as .npy or .npz: {error}") from error


def write_outputs(path: str, outputs: Mapping[str, Any]) -> None:
    """Write arrays by name to an `.npz` file.

    Raises
    ------
    UsageError
        An output is no array (a sequence, say).
    FerroflowError
        The file cannot be written.
    """
    arrays = {name: _as_array(name, value) for name, value in outputs.items()}
    # As np.savez does, which would take an output named "file" for its own argument.
    try:
        with zipfile.ZipFile(path, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
    except OSError as error:
        raise FerroflowError(f"--output {path!r} cannot be written: {error}") from error


def _as_array(name: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray | np.generic):
        raise UsageError(f"--output writes arrays; output {name!r} is a {type(value).__name__}")
    array = np.asarray(value)
    return array.astype(str) if array.dtype == object else array  # ONNX's strings
