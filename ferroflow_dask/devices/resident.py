"""An array that may be on a device, and that may still be computed there.

It is what a task on a worker with a device yields. It crosses to the host when somebody there reads it, or
when Dask sends or spills it, and once at most each way.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ferroflow_dask.devices.device import Event, HostArray

if TYPE_CHECKING:
    from ferroflow_dask.devices.runner import DeviceRunner


class Resident:
    """An array on a device, on the host, or on both.

    Parameters
    ----------
    array : numpy.ndarray, optional
        On the host.
    on_device : tuple of (DeviceRunner, array, Event), optional
        On a device, once the event has come.
    """

    __slots__ = ("__weakref__", "_host", "_lock", "_on_device", "dtype", "nbytes", "shape")

    def __init__(
        self, array: HostArray | None = None, on_device: tuple[DeviceRunner, Any, Event] | None = None
    ) -> None:
        self._host = array
        self._on_device = on_device
        like = array if on_device is None else on_device[1]
        assert like is not None
        self.shape: tuple[int, ...] = tuple(like.shape)
        self.dtype: np.dtype[Any] = np.dtype(like.dtype)
        self.nbytes = int(like.nbytes)
        self._lock = threading.Lock()

    def on(self, runner: DeviceRunner) -> Any:
        """Return the device's array, for work that the calling thread enqueues in `runner.device.use()`."""
        with self._lock:
            if self._on_device is None or self._on_device[0] is not runner:
                placed = runner.to_device(self._host_array())
                self._on_device = (runner, placed, runner.device.record())
            _, array, event = self._on_device
            runner.device.wait(event)
            return array

    def to_host(self) -> HostArray:
        """Return the array on the host; waits for what computes it."""
        with self._lock:
            return self._host_array()

    def _host_array(self) -> HostArray:
        if self._host is None:
            assert self._on_device is not None
            runner, array, event = self._on_device
            self._host = runner.to_host(array, event)
        return self._host

    def finished(self) -> Any:
        """Return the device's array once it is computed, for others than its stream; None if it is not there.

        Raises
        ------
        KernelError
            What computes it has failed.
        """
        with self._lock:
            if self._on_device is None:
                return None
            runner, array, event = self._on_device
            runner.wait_for(event)
            return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        return np.array(self.to_host(), dtype=dtype, copy=copy)

    def __reduce__(self) -> tuple[Any, ...]:
        # Inside something else that is sent or spilled.
        return np.asarray, (self.to_host(),)

    @property
    def __cuda_array_interface__(self) -> Any:
        # dask-cuda knows by it what to spill from a device; there is none where the array is emulated.
        if self._on_device is None:
            raise AttributeError("__cuda_array_interface__")
        return self._on_device[1].__cuda_array_interface__

    def __repr__(self) -> str:
        where = "the host" if self._on_device is None else self._on_device[0].device.name
        return f"<Resident: {self.dtype}{list(self.shape)} on {where}>"


def host_value(value: Any) -> Any:
    """Return a value as the host has it."""
    return value.to_host() if isinstance(value, Resident) else value
