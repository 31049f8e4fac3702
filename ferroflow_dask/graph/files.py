"""Graphs in versioned JSON: written by hand, by other programs or by `ferroflow info --output`.

`docs/command-line.md` describes the format. Large constants are in other files: `.onnx` or `.npz`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from ferroflow_dask.documents import (
    as_list,
    as_number,
    as_object,
    as_text,
    check_format,
    read_document,
    short,
)
from ferroflow_dask.exceptions import FerroflowError, GraphError, ModelError, UsageError
from ferroflow_dask.graph import validity
from ferroflow_dask.graph.builder import DEFAULT_OPSET, checked_dtype, checked_shape
from ferroflow_dask.graph.from_onnx import graph_from_onnx
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, UNKNOWN, Op, Source, TensorSpec
from ferroflow_dask.graph.protos import captured, spec_from_type, subgraphs
from ferroflow_dask.graph.to_onnx import to_onnx
from ferroflow_dask.whole_files import replacing, write_text

FORMAT, VERSION = "ferroflow graph", 1
_FIELDS = {"format", "version", "name", "opsets", "inputs", "constants", "values", "ops", "outputs"}
_OP_FIELDS = {"name", "op_type", "domain", "inputs", "outputs", "attributes", "duration_s", "nbytes"}
_CONSTANT_FIELDS = {"dtype", "shape", "base64", "file"}
#: Result of an op that sleeps and has no inputs, unless the file tells it [B].
_TOKEN_NBYTES = 64


def read_graph(path: str | Path) -> Graph:
    """Return the graph in a JSON file.

    Raises
    ------
    UsageError
        The file cannot be read, or describes no graph.
    ModelError
        Constants are in an ONNX model that cannot be read.
    """
    path = Path(path)
    document = read_document(path, "a graph")
    try:
        return _graph(check_format(document, FORMAT, VERSION), path)
    except UsageError as error:
        raise GraphError(f"{str(path)!r} is not a valid graph: {error}") from error


def write_graph(graph: Graph, path: str | Path, model: str | Path | None = None) -> None:
    """Write a graph as JSON.

    Parameters
    ----------
    graph : Graph
    path : str or path
        Constants of more than 4,096 bytes go to an `.npz` file of the same name, unless `model` has them.
    model : str or path, optional
        The ONNX file that the graph comes from.

    Raises
    ------
    FerroflowError
        The file cannot be written.
    """
    path = Path(path)
    file = path.with_suffix(".npz") if model is None else Path(model).absolute()
    large = {
        source.name: source.value for source in graph.sources if not (source.is_input or source.is_small)
    }
    is_below = path.absolute().parent in file.absolute().parents
    shown = str(file.absolute().relative_to(path.absolute().parent)) if is_below else str(file)
    try:
        if large and model is None:
            with replacing(file) as beside:
                np.savez(beside, **large)
        write_text(path, _as_json(graph, shown))
    except OSError as error:
        raise FerroflowError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _as_json(graph: Graph, file: str) -> str:
    head = {"format": FORMAT, "version": VERSION, "name": graph.name, "opsets": dict(graph.opsets)}
    rows: dict[str, Any] = {
        "inputs": {name: _type(spec) for name, spec in graph.inputs.items()},
        "constants": {
            source.name: _constant(source, file) for source in graph.sources if not source.is_input
        },
        "values": {name: _type(spec) for name, spec in graph.specs.items() if name in graph.producers},
        "ops": [_op_fields(op) for op in graph.topological_order],
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    for name, row in rows.items():
        is_list = isinstance(row, list)
        items = (
            map(json.dumps, row) if is_list else (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in row.items())
        )
        inner = ",\n".join(f"    {item}" for item in items)
        opening, closing = "[]" if is_list else "{}"
        lines.append(f'  "{name}": {opening}\n{inner}\n  {closing},')
    return "\n".join(["{", *lines, f'  "outputs": {json.dumps(graph.outputs)}', "}", ""])


def _type(spec: TensorSpec) -> dict[str, Any]:
    if spec.is_sequence:
        return {"is_sequence": True}
    found: dict[str, Any] = {} if spec.dtype is None else {"dtype": _dtype_name(spec)}
    return found if spec.shape is None else {**found, "shape": spec.shape}


def _dtype_name(spec: TensorSpec) -> str:
    assert spec.dtype is not None
    return spec.dtype.name.replace("object", "str")


def _constant(source: Source, file: str) -> dict[str, Any]:
    if not source.is_small:
        return {"file": file}
    content = onnx.numpy_helper.from_array(source.value).SerializeToString()
    return {"base64": base64.b64encode(content).decode()}


def _op_fields(op: Op) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": op.name}
    attributes = dict(op.attributes)
    if op.kind == f"{FERROFLOW_DOMAIN}.Slow":
        fields["duration_s"] = attributes.pop("duration")
        shape, dtype = attributes.pop("shape", None), attributes.pop("dtype", None)
        if shape is not None:
            fields["nbytes"] = math.prod(shape) * np.dtype(dtype).itemsize
    else:
        fields["op_type"] = op.op_type
        if op.domain:
            fields["domain"] = op.domain
    if op.inputs:
        fields["inputs"] = op.inputs
    if op.outputs != (op.name,):
        fields["outputs"] = op.outputs
    if attributes:
        fields["attributes"] = {name: _attribute(name, value) for name, value in attributes.items()}
    return fields


def _attribute(name: str, value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else [value]
    if all(
        isinstance(item, int | str) or (isinstance(item, float) and math.isfinite(item)) for item in items
    ):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            pass
    message = onnx.helper.make_attribute(name, value).SerializeToString()
    return {"base64": base64.b64encode(message).decode()}


def _graph(document: Mapping[str, Any], path: Path) -> Graph:
    _check_fields("a graph", document, _FIELDS)
    inputs = {name: _spec(name, row) for name, row in _object(document, "inputs").items()}
    constants = _constants(_object(document, "constants"), path.parent)
    if both := inputs.keys() & constants.keys():
        raise UsageError(f"{min(both)!r} must be an input or a constant, got both")
    sources = [Source(i, name, spec) for i, (name, spec) in enumerate(inputs.items())]
    for name, value in constants.items():
        sources.append(Source(len(sources), name, TensorSpec.of(value.dtype, value.shape), value))
    rows = as_list(document.get("ops"), "ops")
    ops = [_op(row, at, len(sources) + at) for at, row in enumerate(rows)]
    read = {value for op in ops for value in op.operands}
    outputs = document.get("outputs", [value for op in ops for value in op.outputs if value not in read])
    opsets = {domain: _version(domain, version) for domain, version in _object(document, "opsets").items()}
    if any(not op.domain for op in ops):
        opsets.setdefault("", DEFAULT_OPSET)
    graph = Graph(
        name=as_text(document.get("name", path.stem), "name"),
        sources=tuple(sources),
        ops=tuple(ops),
        outputs=_names(outputs, "outputs"),
        specs={name: _spec(name, row) for name, row in _object(document, "values").items()},
        opsets={**{op.domain: 1 for op in ops if op.domain}, **opsets},
    )
    if not graph.outputs:
        raise UsageError("outputs must name a value, got none")
    return _with_types(graph)


def _op(row: Any, at: int, op_id: int) -> Op:
    if not isinstance(row, Mapping):
        raise UsageError(
            f"op {at} must be an object, like {{'name': 'a', 'duration_s': 0.1}}, got {short(row)}"
        )
    name = as_text(row.get("name"), f"name of op {at}")
    _check_fields(f"op {name!r}", row, _OP_FIELDS)
    inputs = _names(row.get("inputs", []), f"inputs of op {name!r}")
    outputs = _names(row.get("outputs", [name]), f"outputs of op {name!r}")
    if not any(outputs):
        raise UsageError(f"outputs of op {name!r} must name a value, got none")
    sleeps = "duration_s" in row
    if sleeps == ("op_type" in row):
        raise UsageError(
            f"op {name!r} must have either duration_s or op_type, got {'both' if sleeps else 'none'}"
        )
    attributes: dict[str, Any] = {
        key: _attribute_value(f"attribute {key!r} of op {name!r}", value)
        for key, value in _object(row, "attributes", f" of op {name!r}").items()
    }
    if not sleeps:
        op_type = as_text(row["op_type"], f"op_type of op {name!r}")
        domain = as_text(row.get("domain", ""), f"domain of op {name!r}", may_be_empty=True)
        outer = captured(subgraphs(attributes))
        return Op(op_id, name, op_type, inputs, outputs, domain, attributes, outer)
    attributes["duration"] = as_number(row["duration_s"], f"duration_s of op {name!r}")
    if "nbytes" in row or not inputs:
        nbytes = as_number(row.get("nbytes", _TOKEN_NBYTES), f"nbytes of op {name!r}")
        attributes.update(shape=checked_shape(name, (int(nbytes),)), dtype="uint8")
    return Op(op_id, name, "Slow", inputs, outputs, FERROFLOW_DOMAIN, attributes)


def _attribute_value(where: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        message = onnx.AttributeProto()
        try:
            message.ParseFromString(_decoded(value, where))
            return onnx.helper.get_attribute_value(message)
        except (DecodeError, ValueError) as error:
            raise UsageError(f"{where} must be an attribute of ONNX in base64, got {short(value)}") from error
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int | float | str) for item in items):
        raise UsageError(f"{where} must be a number, a text, or a list of these, got {short(value)}")
    return value


def _constants(rows: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    files: dict[str, Mapping[str, Any]] = {}
    return {name: _constant_value(name, row, folder, files) for name, row in rows.items()}


def _constant_value(name: str, row: Any, folder: Path, files: dict[str, Mapping[str, Any]]) -> Any:
    """Return an array: a message of ONNX, raw bytes with dtype and shape, or one of an array file."""
    where = f"constant {name!r}"
    if not isinstance(row, Mapping):
        raise UsageError(f"{where} must be an object with base64 or file, got {short(row)}")
    _check_fields(where, row, _CONSTANT_FIELDS)
    if "file" not in row:
        content = _decoded(row, where)
        if "dtype" not in row:
            try:
                return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(content))
            except (DecodeError, ValueError, TypeError, KeyError) as error:
                raise UsageError(f"{where} must be a tensor of ONNX, or have dtype and shape") from error
        spec = _spec(name, row)
        if spec.nbytes != len(content):
            raise UsageError(f"{where} must have {spec.nbytes} bytes for {spec}, got {len(content)}")
        return np.frombuffer(content, spec.dtype).reshape(
            [int(dim) for dim in spec.shape or () if dim is not None]
        )
    file = as_text(row["file"], f"file of {where}")
    if file not in files:
        files[file] = _arrays(folder / file)
    if name not in files[file]:
        raise UsageError(f"{where} must be in {file!r}, got {short(sorted(files[file])[:4])}")
    return files[file][name]


def _arrays(path: Path) -> Mapping[str, Any]:
    if path.suffix != ".npz":
        return graph_from_onnx(path).constants
    try:
        with np.load(path, allow_pickle=False) as found:
            return dict(found)
    except Exception as error:  # zipfile and NumPy raise many
        raise ModelError(f"{path}: cannot be read as .npz: {error}") from error


def _with_types(graph: Graph) -> Graph:
    """Return a graph with the types that ONNX can infer; raises for what is no valid ONNX."""
    graph = replace(graph, specs={**_of_sleeping(graph), **graph.specs})
    ops = [op for op in graph.live_ops if op.domain != FERROFLOW_DOMAIN]
    if not ops:
        return graph
    light = [
        source if source.is_input or source.is_small else replace(source, value=None)
        for source in graph.sources
    ]
    produced = {value for op in ops for value in op.outputs}
    known = produced | {source.name for source in light}
    others = dict.fromkeys(value for op in ops for value in op.operands if value not in known)
    sources = [*light, *(Source(-1 - i, name, graph.spec(name)) for i, name in enumerate(others))]
    outputs = tuple(value for op in ops for value in op.outputs if value)
    model = to_onnx(Graph(graph.name, tuple(sources), tuple(ops), outputs, graph.specs, graph.opsets))
    try:
        if len(ops) == len(graph.live_ops):
            validity.check(model)
        inferred = validity.infer(model)
    except ModelError as error:
        raise UsageError(str(error)) from error
    entries = (*inferred.graph.value_info, *inferred.graph.output)
    found = {entry.name: spec_from_type(entry.type) for entry in entries if entry.name in produced}
    return replace(graph, specs={**found, **graph.specs})


def _of_sleeping(graph: Graph) -> dict[str, TensorSpec]:
    """Return the types of what ops that sleep yield."""
    specs: dict[str, TensorSpec] = {}
    for op in graph.topological_order:
        if op.kind == f"{FERROFLOW_DOMAIN}.Slow":
            shape = op.attributes.get("shape")
            first = specs.get(op.inputs[0], graph.spec(op.inputs[0])) if op.inputs else UNKNOWN
            specs[op.outputs[0]] = first if shape is None else TensorSpec.of(op.attributes["dtype"], shape)
    return specs


def _spec(name: str, row: Any) -> TensorSpec:
    if not isinstance(row, Mapping):
        raise UsageError(
            f"{name!r} must be an object like {{'dtype': 'float32', 'shape': [2, 3]}}, got {short(row)}"
        )
    if row.get("is_sequence"):
        return TensorSpec(is_sequence=True)
    if "dtype" not in row:
        return UNKNOWN
    dtype = checked_dtype(repr(name), row["dtype"])
    shape = row.get("shape")
    return TensorSpec(
        dtype, None if shape is None else checked_shape(name, as_list(shape, f"shape of {name!r}"))
    )


def _decoded(row: Mapping[str, Any], where: str) -> bytes:
    try:
        return base64.b64decode(row["base64"], validate=True)
    except KeyError as error:
        raise UsageError(f"{where} must have base64, got {short(dict(row))}") from error
    except (binascii.Error, TypeError, ValueError) as error:
        raise UsageError(f"{where} must be base64, got {short(row['base64'])}") from error


def _check_fields(where: str, row: Mapping[str, Any], allowed: set[str]) -> None:
    for name in row:
        if name not in allowed:
            raise UsageError(f"a field of {where} must be one of {', '.join(sorted(allowed))}, got {name!r}")


def _object(row: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    return as_object(row.get(name, {}), f"{name}{where}")


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value) or value == "":
        raise UsageError(f"{where} must be a list of names, got {short(value)}")
    return tuple(as_list(value, where))


def _version(domain: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        must = f"must be a whole number from 1 to {2**31 - 1}"
        raise UsageError(f"version of the opset {domain!r} {must}, got {short(value)}")
    return value
