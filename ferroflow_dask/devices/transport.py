"""What Dask has to know of arrays: how large resident ones are, and how they are sent and spilled.

Of NumPy's arrays it knows all but those of ml_dtypes' float8_e5m2, which call themselves `<f1`: a worker that
is sent one by Dask's own means cannot read it, and waits for it for ever.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dask.sizeof import sizeof
from distributed.protocol.numpy import deserialize_numpy_ndarray, serialize_numpy_ndarray
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from ferroflow_dask.devices.attached import attached
from ferroflow_dask.devices.resident import Resident

#: What NumPy says of types that others have added to it.
_REGISTERED = 2


def _nbytes(resident: Resident) -> int:
    return resident.nbytes


def _serialize(resident: Resident, context: Any = None) -> tuple[dict[str, Any], list[Any]]:
    header, frames = serialize_numpy_ndarray(resident.to_host(), context)
    return {"array": header}, frames


def _deserialize(header: dict[str, Any], frames: list[Any]) -> Any:
    array = deserialize_numpy_ndarray(header["array"], frames)
    # Where there is a device it goes there when an op on the device reads it, and not before.
    return array if attached() is None else Resident(array)


def _serialize_numpy(array: Any, context: Any = None) -> tuple[dict[str, Any], list[Any]]:
    if array.dtype.kind == "f" and array.dtype.isbuiltin == _REGISTERED:
        raise NotImplementedError  # it is pickled instead
    header, frames = serialize_numpy_ndarray(array, context)
    return header, frames


sizeof.register(Resident, _nbytes)
dask_serialize.register(Resident, _serialize)
dask_serialize.register(np.ndarray, _serialize_numpy)
dask_deserialize.register(Resident, _deserialize)
