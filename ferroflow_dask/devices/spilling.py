"""What dask-cuda has to know of values: which are on a device, to be spilled from there.

Of a type that it does not know it asks for the interface to CUDA, of every result and in the worker's event
loop; but who is given that of a resident array has waited for what computes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ferroflow_dask.devices.resident import Resident

_Asks = Callable[[Any], bool]


def is_on_device(value: Any) -> bool:
    """Return whether a value is an array on a device, ours or another library's; does not wait."""
    return isinstance(value, Resident) or hasattr(value, "__cuda_array_interface__")


_asks: dict[type, _Asks] = {Resident: is_on_device}


def register_spilled(kind: type, asks: _Asks) -> None:
    """Say how to know of a type's values whether they are on a device."""
    _asks[kind] = asks
    tell_dask_cuda()


def tell_dask_cuda() -> None:
    """Let dask-cuda know, if it is in this process; it is before a worker of its has results."""
    module = sys.modules.get("dask_cuda.is_device_object")
    dispatch = getattr(module, "is_device_object", None)
    if dispatch is not None:
        for kind, asks in _asks.items():
            dispatch.register(kind, asks)
