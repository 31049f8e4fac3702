"""Turn what ONNX stores values in into arrays: tensors, sparse tensors, `Constant` nodes, other files.

No file outside the model's folder is ever read, whatever the model says.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from ferroflow_dask.exceptions import ModelError
from ferroflow_dask.graph.protos import domain_from_name

#: Tensors in other files that are not read but mapped have at least so many bytes [B].
_MAPPED_LEAST = 2**20

#: Forms in which a `Constant` node (opset 1 to 25) holds its value: attribute → its type.
_CONSTANT_FORMS = {
    "value": onnx.AttributeProto.TENSOR,
    "sparse_value": onnx.AttributeProto.SPARSE_TENSOR,
    "value_float": onnx.AttributeProto.FLOAT,
    "value_floats": onnx.AttributeProto.FLOATS,
    "value_int": onnx.AttributeProto.INT,
    "value_ints": onnx.AttributeProto.INTS,
    "value_string": onnx.AttributeProto.STRING,
    "value_strings": onnx.AttributeProto.STRINGS,
}


def first_line(error: BaseException) -> str:
    """Return what an error says, without the context that ONNX adds below."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def in_one_line(error: BaseException) -> str:
    """Return all that an error says, in one line and without the context that ONNX adds below."""
    return " ".join(str(error).partition("==> Context:")[0].split()) or type(error).__name__


def is_constant(node: onnx.NodeProto) -> bool:
    """Return whether the node is a well-formed `Constant`; the checker may not have seen it yet."""
    if node.op_type != "Constant" or domain_from_name(node.domain) or len(node.output) != 1:
        return False
    form = [
        entry.type == _CONSTANT_FORMS.get(entry.name) and not entry.ref_attr_name for entry in node.attribute
    ]
    return form == [True]


class WeightReader:
    """Reads the values of one model; raises ModelError, which names the weight, where one is damaged.

    Parameters
    ----------
    folder : Path or None
        Where the model's file lies; None where it came without one, and has no other files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def constant(self, node: onnx.NodeProto) -> NDArray[Any]:
        """Return the value of a `Constant` node, in any of its forms."""
        attribute = node.attribute[0]
        value = onnx.helper.get_attribute_value(attribute)
        match attribute.name:
            case "value":
                return self.array(value)
            case "sparse_value":
                return self.dense(value)
            case "value_string":
                return np.asarray(value.decode("utf-8"), object)
            case "value_strings":
                return np.asarray([text.decode("utf-8") for text in value], object)
        return np.asarray(value, np.float32 if attribute.name.startswith("value_float") else np.int64)

    def dense(self, sparse: onnx.SparseTensorProto) -> NDArray[Any]:
        """Return a sparse tensor (coordinates, or flat indices) as an ordinary one."""
        name = sparse.values.name
        values, indices = self.array(sparse.values), self.array(sparse.indices)
        try:
            dense = np.zeros(tuple(sparse.dims), values.dtype)
            coordinates = np.unravel_index(indices, dense.shape) if indices.ndim == 1 else tuple(indices.T)
            dense[coordinates] = values
        except (ValueError, TypeError, IndexError, MemoryError) as error:
            raise ModelError(f"sparse tensor {name!r} is damaged: {first_line(error)}") from error
        return dense

    def array(self, tensor: onnx.TensorProto) -> NDArray[Any]:
        """Return the value of a tensor; strings become objects."""
        if any(dim < 0 for dim in tensor.dims):  # NumPy would take -1 for any size
            raise ModelError(f"weight {tensor.name!r} is damaged: its shape is {list(tensor.dims)}")
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            mapped = self._mapped(tensor)
            if mapped is not None:
                return mapped
            tensor = self.loaded(tensor)
        try:
            return np.asarray(onnx.numpy_helper.to_array(tensor))
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError(f"weight {tensor.name!r} is damaged: {first_line(error)}") from error

    def _mapped(self, tensor: onnx.TensorProto) -> NDArray[Any] | None:
        """Return a large tensor in another file without reading it: pages come from the file when needed.

        None for tensors that are small, damaged, or not stored as arrays have them in memory.
        """
        place = _external_place(tensor, self._folder)
        try:
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
        except KeyError:
            return None
        nbytes = math.prod(tensor.dims) * dtype.itemsize
        is_whole = nbytes == place.length and not place.offset % dtype.itemsize
        if dtype.kind not in "fiu" or sys.byteorder != "little" or not is_whole or nbytes < _MAPPED_LEAST:
            return None
        try:
            found = np.memmap(place.path, dtype, "r", place.offset, tuple(tensor.dims))
        except (OSError, ValueError):
            return None
        return np.asarray(found)

    def loaded(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """Return a tensor that is in another file as one that carries its data."""
        content = _external_content(tensor, self._folder)
        return onnx.TensorProto(
            name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=content
        )


class _Place(NamedTuple):
    """Where the data of a tensor are in a file [B]."""

    path: Path
    offset: int
    length: int


def _external_place(tensor: onnx.TensorProto, folder: Path | None) -> _Place:
    """Return where a tensor's data are; the file must lie inside the model's folder, links resolved."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ModelError(
            f"weight {tensor.name!r} is in the file {location!r}; give the model by its path, or "
            "the folder of that file: load_onnx(model, folder=…)"
        )
    try:
        root = folder.resolve()
        path = (root / location).resolve()
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", -1))
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"weight {tensor.name!r} has damaged external data: {first_line(error)}") from error
    if Path(location).is_absolute() or root not in path.parents:
        raise ModelError(
            f"weight {tensor.name!r} is in {location!r}, outside the model's folder; it is not read"
        )
    if not path.is_file():
        raise ModelError(f"weight {tensor.name!r} is in {location!r}, and there is no such file")
    size = path.stat().st_size
    if offset < 0 or offset + max(length, 0) > size:
        raise ModelError(
            f"weight {tensor.name!r} lies beyond the {size} bytes of {location!r}; is it truncated?"
        )
    return _Place(path, offset, size - offset if length < 0 else length)


def _external_content(tensor: onnx.TensorProto, folder: Path | None) -> bytes:
    """Read a tensor's data from its file."""
    place = _external_place(tensor, folder)
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            content: bytes = file.read(place.length)
    except OSError as error:
        raise ModelError(f"{place.path.name!r} cannot be read: {error.strerror}") from error
    return content
