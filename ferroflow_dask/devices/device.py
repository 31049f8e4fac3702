"""What a device must offer: a CUDA device through CuPy, or one that is emulated.

Work is enqueued on a stream, in order, and done later; each thread has a stream of its own. An event stands
for the end of all that was enqueued on a stream before it.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from ferroflow_dask.device_reports import DeviceUsage
from ferroflow_dask.kernels import ExecutionProvider

HostArray = np.ndarray[Any, np.dtype[Any]]


class Event(Protocol):
    """The end of what was enqueued before."""

    @property
    def done(self) -> bool:
        """Whether it has come."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Device(Protocol):
    """A device and the streams of this process's threads on it.

    Arrays of a device are those of a library with NumPy's interface; NumPy's functions, called in the context
    of `use()`, enqueue work on them.
    """

    #: Like `cuda:0`.
    name: str
    #: In which precision it multiplies matrices.
    mode: str
    #: Where onnxruntime computes whole models on it; None where it does not.
    execution_provider: ExecutionProvider | None

    def use(self, computes: bool = True) -> AbstractContextManager[object]:
        """Make the calling thread's stream the one that work, and products if so told, are enqueued on."""
        ...

    def to_device(self, array: HostArray) -> Any:
        """Enqueue a copy from the host."""
        ...

    def to_host(self, array: Any) -> HostArray:
        """Enqueue a copy to the host and wait for it."""
        ...

    def record(self) -> Event:
        """Enqueue an event."""
        ...

    def wait(self, event: Event) -> None:
        """Let what is enqueued from now on start after an event, which may be another stream's."""
        ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Return the time between two events of a stream that have come [s]."""
        ...

    def product(self, a: Any, b: Any) -> Any:
        """Enqueue a product of matrices, or of stacks of them, in the precision that was asked for."""
        ...

    def used_nbytes(self) -> int:
        """Return the memory that is taken [B]; not what is kept for later."""
        ...

    def total_nbytes(self) -> int:
        """Return the memory that there is [B]."""
        ...

    def release_free(self) -> None:
        """Give memory back that is kept for later."""
        ...

    def lacks_memory(self, error: Exception) -> bool:
        """Return whether an error says that there is no memory left."""
        ...

    def check(self) -> None:
        """Raise if the device has failed: nothing can be computed on it in this process any more."""
        ...


class Counters:
    """Thread-safe counters of the fields of `DeviceUsage`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((f.name for f in fields(DeviceUsage)), 0)

    def add(self, **counts: int) -> None:
        """Add to some of the counts."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def usage(self, used_nbytes: int) -> DeviceUsage:
        """Return the counts."""
        with self._lock:
            return DeviceUsage(**{**self._counts, "used_nbytes": used_nbytes})
