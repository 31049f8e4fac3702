"""What Dask has to know of resident arrays: how large they are, and how they are sent and spilled."""

from __future__ import annotations

from typing import Any

from dask.sizeof import sizeof
from distributed.protocol.numpy import deserialize_numpy_ndarray, serialize_numpy_ndarray
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from ferroflow_dask.devices.attached import attached
from ferroflow_dask.devices.resident import Resident


def _nbytes(resident: Resident) -> int:
    return resident.nbytes


def _serialize(resident: Resident, context: Any = None) -> tuple[dict[str, Any], list[Any]]:
    header, frames = serialize_numpy_ndarray(resident.to_host(), context)
    return {"array": header}, frames


def _deserialize(header: dict[str, Any], frames: list[Any]) -> Any:
    array = deserialize_numpy_ndarray(header["array"], frames)
    # Where there is a device it goes there when an op on the device reads it, and not before.
    return array if attached() is None else Resident(array)


sizeof.register(Resident, _nbytes)
dask_serialize.register(Resident, _serialize)
dask_deserialize.register(Resident, _deserialize)
