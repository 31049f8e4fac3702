"""Turn what ONNX stores values in into arrays: tensors, sparse tensors, `Constant` nodes, other files.

No file outside the model's folder is ever read, whatever the model says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from ferroflow_dask.exceptions import ModelError
from ferroflow_dask.graph.protos import domain_from_name

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
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor = self.loaded(tensor)
        try:
            return np.asarray(onnx.numpy_helper.to_array(tensor))
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError(f"weight {tensor.name!r} is damaged: {first_line(error)}") from error

    def loaded(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """Return a tensor that is in another file as one that carries its data."""
        content = _external_content(tensor, self._folder)
        return onnx.TensorProto(
            name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=content
        )


def _external_content(tensor: onnx.TensorProto, folder: Path | None) -> bytes:
    """Read a tensor's data from its file, which must lie inside the model's folder, links resolved."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ModelError(f"weight {tensor.name!r} is in the file {location!r}; give the model by its path")
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
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content: bytes = file.read(length)
    except OSError as error:
        raise ModelError(f"{location!r} cannot be read: {error.strerror}") from error
    return content
