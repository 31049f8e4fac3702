"""A device that is none: NumPy behind the interface of one, as strict as the real thing is treacherous.

It runs everything but CUDA's own calls where there is no GPU. Its arrays refuse to become NumPy arrays
unasked. Work takes a made-up time and ends late. Streams know of each other only what events tell: reading
what another stream may not have finished raises, and so does freeing what another stream may still read,
whatever the timing of the run.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ferroflow_dask.devices.device import HostArray
from ferroflow_dask.kernels import ExecutionProvider

#: Time by stream, in work that was enqueued there.
_Times = dict[int, int]


class UnplannedAccessError(RuntimeError):
    """An array was read where, or before, it may be."""


class EmulatedMemoryError(MemoryError):
    """The device has no room."""


@dataclass(slots=True, eq=False)
class _Stream:
    number: int
    enqueued: int = 0
    # What has ended before anything that is enqueued from now on starts, of other streams.
    knows: _Times = field(default_factory=dict)
    free_at_s: float = 0.0

    def now(self) -> _Times:
        return {**self.knows, self.number: self.enqueued}


class EmulatedEvent:
    """The end of what was enqueued on a stream before."""

    def __init__(self, device: EmulatedDevice, stream: _Stream) -> None:
        self._device = device
        self.times = stream.now()
        self.at_s = max(stream.free_at_s, device.clock())

    @property
    def done(self) -> bool:
        """Whether it has come; it never will where the device has failed."""
        return self._device.clock() >= self.at_s and self._device.failure is None

    def synchronize(self) -> None:
        """Wait for it."""
        while (rest_s := self.at_s - self._device.clock()) > 0:
            self._device.sleep(rest_s)
        self._device.check()
        self._device.learn(self.times)


class _Buffer:
    """Memory of the device; views share it."""

    __slots__ = ("__weakref__", "made", "readers")

    def __init__(self, stream: _Stream) -> None:
        self.made = (stream.number, stream.enqueued)
        self.readers: _Times = {}


class EmulatedArray(NDArrayOperatorsMixin):
    """An array on an emulated device."""

    def __init__(
        self, device: EmulatedDevice, data: HostArray, buffer: _Buffer, base: EmulatedArray | None = None
    ) -> None:
        self.base: EmulatedArray | None = base if base is None or base.base is None else base.base
        self._device = device
        self._data = data
        self._buffer = buffer
        self.shape, self.dtype, self.ndim = data.shape, data.dtype, data.ndim
        self.size, self.nbytes, self.strides = data.size, data.nbytes, data.strides
        self.flags = data.flags

    def __array__(self, *_: Any, **__: Any) -> HostArray:
        raise UnplannedAccessError("an array of the device was turned into a NumPy array unasked")

    def __bool__(self) -> bool:
        raise UnplannedAccessError("the host branched on a value that is on the device")

    __int__ = __float__ = __index__ = __bool__

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return self._device.enqueue(getattr(ufunc, method), inputs, kwargs, is_product=ufunc is np.matmul)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._device.enqueue(function, args, kwargs)

    def __getitem__(self, item: Any) -> Any:
        return self._method("__getitem__", item)

    def __setitem__(self, item: Any, value: Any) -> None:
        self._device.enqueue(lambda array, at, new: array.__setitem__(at, new), (self, item, value), {})

    @property
    def T(self) -> Any:  # noqa: N802 -- NumPy's name
        """The transpose."""
        return self._method("transpose")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What other libraries read it by, on streams of theirs; made up."""
        self._device.check_finished(self)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (0, True), "version": 3}

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        def call(array: HostArray, *args: Any, **kwargs: Any) -> Any:
            return getattr(array, name)(*args, **kwargs)

        return self._device.enqueue(call, (self, *args), kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or not callable(getattr(np.ndarray, name, None)) or name in _TO_HOST:
            raise AttributeError(name)
        return lambda *args, **kwargs: self._method(name, *args, **kwargs)


#: Methods of NumPy's arrays that would bring values to the host.
_TO_HOST = frozenset({"dump", "dumps", "item", "tobytes", "tofile", "tolist"})


class EmulatedDevice:
    """A device of made-up speed.

    Parameters
    ----------
    memory_nbytes : int, optional
        [B]
    flop_rate : float, optional
        Of products of matrices [FLOP/s].
    memory_bandwidth : float, optional
        Of all else, by the bytes of its results [B/s].
    bandwidth : float, optional
        To and from the host [B/s].
    launch_s : float, optional
        What each call takes at least [s].
    execution_provider : ExecutionProvider, optional
        Where onnxruntime computes whole models; nowhere if left out.
    clock, sleep : callable, optional
    """

    name, mode = "emulated", "fp32"

    def __init__(
        self,
        *,
        memory_nbytes: int = 2**31,
        flop_rate: float = 1e11,
        memory_bandwidth: float = 1e11,
        bandwidth: float = 1e10,
        launch_s: float = 1e-5,
        execution_provider: ExecutionProvider | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._memory_nbytes = memory_nbytes
        self._flop_rate, self._memory_bandwidth = flop_rate, memory_bandwidth
        self._bandwidth, self._launch_s = bandwidth, launch_s
        self.execution_provider = execution_provider
        self.clock, self.sleep = clock, sleep
        #: What is enqueued next fails with it, late; from then on each call does.
        self.pending_error: Exception | None = None
        self._fails_at_s: float | None = None
        #: What should not have happened and could not be raised.
        self.violations: list[str] = []
        self.peak_nbytes = 0
        self._used_nbytes = 0
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._local = threading.local()
        self._streams: dict[int, _Stream] = {}
        # What the host has waited for.
        self._host: _Times = {}

    # The protocol

    @contextmanager
    def use(self, computes: bool = True) -> Iterator[None]:  # noqa: ARG002 -- all is computed alike
        """Make the calling thread's stream the one that work is enqueued on."""
        yield

    def to_device(self, array: HostArray) -> EmulatedArray:
        """Enqueue a copy from the host."""
        return self._new(np.array(array), array.nbytes / self._bandwidth)

    def to_host(self, array: EmulatedArray) -> HostArray:
        """Enqueue a copy to the host and wait for it."""
        found = self._read(array).copy()
        self._pass(found.nbytes / self._bandwidth)
        self.record().synchronize()
        return found

    def record(self) -> EmulatedEvent:
        """Enqueue an event."""
        self.check()
        return EmulatedEvent(self, self._stream)

    def wait(self, event: Any) -> None:
        """Let what is enqueued from now on start after an event."""
        self.check()
        stream = self._stream
        _learn(stream.knows, event.times)
        stream.free_at_s = max(stream.free_at_s, event.at_s)

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Return the time between two events of a stream that have come [s]."""
        return float(end.at_s - start.at_s)

    def product(self, a: Any, b: Any) -> Any:
        """Enqueue a product of matrices."""
        return np.matmul(a, b)

    def used_nbytes(self) -> int:
        """Return the memory that is taken [B]."""
        return self._used_nbytes

    def total_nbytes(self) -> int:
        """Return the memory that there is [B]."""
        return self._memory_nbytes

    def release_free(self) -> None:
        """Do nothing: nothing is kept for later."""

    def lacks_memory(self, error: Exception) -> bool:
        """Return whether an error says that there is no memory left."""
        return isinstance(error, MemoryError)

    @property
    def failure(self) -> Exception | None:
        """What the device has failed with, once it has."""
        has_come = self._fails_at_s is not None and self.clock() >= self._fails_at_s
        return self.pending_error if has_come else None

    def check(self) -> None:
        """Raise if the device has failed."""
        if self.failure is not None:
            raise copy(self.failure)  # one that is raised twice would be its own context

    # How it is emulated

    @property
    def _stream(self) -> _Stream:
        found: _Stream | None = getattr(self._local, "stream", None)
        if found is None:
            found = self._local.stream = _Stream(next(self._numbers))
            self._streams[found.number] = found
        return found

    def learn(self, times: _Times) -> None:
        """Note what the host has waited for."""
        with self._lock:
            _learn(self._host, times)

    def check_finished(self, array: EmulatedArray) -> None:
        """Raise if the host has not waited for what computes an array."""
        maker, at = array._buffer.made
        with self._lock:
            if at > self._host.get(maker, 0):
                raise UnplannedAccessError(f"others may read what stream {maker} may not have finished")

    def enqueue(self, call: Callable[..., Any], args: Any, kwargs: Any, is_product: bool = False) -> Any:
        """Compute with NumPy now what a device would later, if the stream may read what it reads."""
        operands: list[EmulatedArray] = []
        plain = self._unwrapped(tuple(args), operands)
        named = {name: self._unwrapped(value, operands) for name, value in kwargs.items()}
        with np.errstate(all="ignore"):
            result = call(*plain, **named)
        if isinstance(result, list | tuple):
            return type(result)([self._wrapped(item, operands, is_product) for item in result])
        return self._wrapped(result, operands, is_product)

    def _unwrapped(self, value: Any, operands: list[EmulatedArray]) -> Any:
        if isinstance(value, EmulatedArray):
            operands.append(value)
            return self._read(value)
        if isinstance(value, list | tuple):
            return type(value)([self._unwrapped(item, operands) for item in value])
        return value

    def _wrapped(self, result: Any, operands: list[EmulatedArray], is_product: bool) -> Any:
        if not isinstance(result, np.ndarray | np.generic):
            return result
        data = np.asarray(result)
        for operand in operands:
            if np.may_share_memory(data, operand._data):
                return EmulatedArray(self, data, operand._buffer, operand)  # a view costs nothing
        seconds = (
            2 * data.size * operands[0].shape[-1] / self._flop_rate
            if is_product
            else data.nbytes / self._memory_bandwidth
        )
        return self._new(data, seconds)

    def _read(self, array: EmulatedArray) -> HostArray:
        self.check()
        stream, (maker, at) = self._stream, array._buffer.made
        if array._device is not self:
            raise UnplannedAccessError("an array of another device was read")
        with self._lock:
            is_done = at <= max(stream.knows.get(maker, 0), self._host.get(maker, 0))
            if maker != stream.number and not is_done:
                raise UnplannedAccessError(
                    f"stream {stream.number} reads what stream {maker} may not have finished"
                )
            array._buffer.readers[stream.number] = stream.enqueued + 1
        return array._data

    def _pass(self, seconds: float) -> None:
        stream = self._stream
        stream.enqueued += 1
        stream.free_at_s = max(stream.free_at_s, self.clock()) + self._launch_s + seconds
        if self.pending_error is not None and self._fails_at_s is None:
            self._fails_at_s = stream.free_at_s

    def _new(self, data: HostArray, seconds: float) -> EmulatedArray:
        self.check()
        with self._lock:
            if self._used_nbytes + data.nbytes > self._memory_nbytes:
                raise EmulatedMemoryError(f"{data.nbytes} B")
            self._used_nbytes += data.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self._used_nbytes)
        self._pass(seconds)
        buffer = _Buffer(self._stream)
        weakref.finalize(buffer, self._free, data.nbytes, buffer.made[0], buffer.readers)
        return EmulatedArray(self, data, buffer)

    def _free(self, nbytes: int, maker: int, readers: _Times) -> None:
        # Memory goes back to the stream that took it, whose next work may overwrite it.
        with self._lock:
            self._used_nbytes -= nbytes
            knows = self._streams[maker].knows
            for stream, at in readers.items():
                if stream != maker and at > max(knows.get(stream, 0), self._host.get(stream, 0)):
                    self.violations.append(f"memory of stream {maker} was freed while {stream} may read it")


def _learn(known: _Times, times: _Times) -> None:
    for stream, at in times.items():
        known[stream] = max(known.get(stream, 0), at)
