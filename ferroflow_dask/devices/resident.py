"""An array on a device, that may still be computed there.

It is what a task on a worker with a device yields. It crosses to the host when somebody there reads it, or
when Dask sends or spills it, and then once; to others than our ops it is an array of NumPy's that may only be
read.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ferroflow_dask.devices.device import Event, HostArray
from ferroflow_dask.exceptions import UsageError

if TYPE_CHECKING:
    from ferroflow_dask.devices.runner import DeviceRunner


class Resident(NDArrayOperatorsMixin):
    """An array on a device.

    Parameters
    ----------
    runner : DeviceRunner
    array : array
        The device's.
    event : Event
        After which it is computed.
    """

    def __init__(self, runner: DeviceRunner, array: Any, event: Event) -> None:
        self._runner = runner
        self._array = array
        self._event = event
        self._host: HostArray | None = None
        self._lock = threading.Lock()
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)
        self.nbytes = int(array.nbytes)
        self.ndim, self.size = int(array.ndim), int(array.size)

    def on(self, runner: DeviceRunner) -> Any:
        """Return the device's array, for work that the calling thread enqueues in `runner.device.use()`."""
        if runner is not self._runner:
            return runner.on_device(self.to_host())
        runner.device.wait(self._event)
        return self._array

    def finished(self) -> Any:
        """Return the device's array once it is computed, for others than its stream.

        Raises
        ------
        KernelError
            What computes it has failed.
        """
        self._runner.wait_for(self._event)
        return self._array

    def to_host(self) -> HostArray:
        """Return the array on the host; waits for what computes it.

        Raises
        ------
        KernelError
            What computes it has failed.
        """
        with self._lock:
            if self._host is None:
                self._host = self._runner.to_host(self._array, self._event)
            return self._host

    # To others than our ops it is an array on the host.

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        return np.array(self.to_host(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        written = inputs[:1] if method == "at" else kwargs.get("out", ())
        if any(isinstance(value, Resident) for value in written):
            raise UsageError(
                f"{ufunc.__name__} cannot write to an array on a device; write to a copy: numpy.array(it)"
            )
        options = {name: host_value(value) for name, value in kwargs.items()}
        return getattr(ufunc, method)(*map(host_value, inputs), **options)

    def __bool__(self) -> bool:
        return bool(self.to_host())

    def __float__(self) -> float:
        return float(self.to_host())

    def __int__(self) -> int:
        return int(self.to_host())

    def __index__(self) -> int:
        return operator.index(self.to_host())

    def __format__(self, spec: str) -> str:
        return format(self.to_host(), spec)

    def __len__(self) -> int:
        return len(self.to_host())

    def __getitem__(self, item: Any) -> Any:
        return self.to_host()[item]

    def __getattr__(self, name: str) -> Any:
        if name == "__cuda_array_interface__":  # whose stream reads it knows nothing of ours
            return self.finished().__cuda_array_interface__
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.to_host(), name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Inside something else that is sent or spilled.
        return np.asarray, (self.to_host(),)

    def __repr__(self) -> str:
        return f"<Resident: {self.dtype}{list(self.shape)} on {self._runner.device.name}>"


def host_value(value: Any) -> Any:
    """Return a value as the host has it."""
    return value.to_host() if isinstance(value, Resident) else value
