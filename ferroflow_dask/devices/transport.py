"""What Dask has to know of arrays: how large resident ones are, and how they are sent and spilled.

Of NumPy's arrays it knows all but those of ml_dtypes' float8_e5m2, which call themselves `<f1`: a worker that
is sent one by Dask's own means cannot read it, and waits for it for ever.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dask.sizeof import sizeof
from distributed.protocol.cuda import cuda_deserialize, cuda_dumps, cuda_loads, cuda_serialize
from distributed.protocol.numpy import deserialize_numpy_ndarray, serialize_numpy_ndarray
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from ferroflow_dask.devices.attached import attached
from ferroflow_dask.devices.resident import Resident


def _nbytes(resident: Resident) -> int:
    return resident.nbytes


def _serialize(resident: Resident, context: Any = None) -> tuple[dict[str, Any], list[Any]]:
    header, frames = serialize_numpy_ndarray(resident.to_host(), context)
    return header, frames


# From GPU to GPU, where the link takes device memory (UCX).
def _serialize_on_device(resident: Resident) -> tuple[dict[str, Any], list[Any]]:
    # Where arrays of its library cannot be sent so, it raises NotImplementedError: Dask takes another way.
    try:
        header, frames = cuda_dumps(resident.finished())
    except ImportError as error:
        # Distributed's own part needs Numba, which nothing that we need brings along.
        raise NotImplementedError(str(error)) from error
    return header, frames


def _deserialize_on_device(header: dict[str, Any], frames: list[Any]) -> Any:
    array = cuda_loads(header, frames)
    runner = attached()
    if runner is None:  # of a client, which reads it as NumPy's
        return array.get()
    with runner.device.use():
        return Resident(runner, array, runner.device.record())


def _serialize_numpy(array: Any, context: Any = None) -> tuple[dict[str, Any], list[Any]]:
    if array.dtype.kind == "f" and not issubclass(array.dtype.type, np.floating):
        raise NotImplementedError  # it is pickled instead
    header, frames = serialize_numpy_ndarray(array, context)
    return header, frames


sizeof.register(Resident, _nbytes)
dask_serialize.register(Resident, _serialize)
dask_serialize.register(np.ndarray, _serialize_numpy)
cuda_serialize.register(Resident, _serialize_on_device)
cuda_deserialize.register(Resident, _deserialize_on_device)
# It goes to a device when an op there reads it, and not before: then it is placed like any other.
dask_deserialize.register(Resident, deserialize_numpy_ndarray)
