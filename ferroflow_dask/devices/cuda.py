"""A CUDA device through CuPy.

Each thread has a stream of its own; CuPy's allocations are ordered by stream, and events order streams among
each other. CUDA orders them all with the default stream, on which other libraries compute.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ferroflow_dask.devices.device import HostArray
from ferroflow_dask.devices.pools import idle_nbytes
from ferroflow_dask.exceptions import ClusterError, UnknownNameError
from ferroflow_dask.kernels import ExecutionProvider, one_line

#: Of products of single-precision matrices: exact to rounding; by tensor cores with 10 bits of mantissa; or
#: likewise, of operands that were rounded to half precision or to bfloat16.
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
#: cuBLAS's CUBLAS_TF32_TENSOR_OP_MATH, of what handles may do.
_TF32_MATH = 3
#: CuPy's own switch.
_TF32_SWITCH = "CUPY_TF32"
#: Statuses that tell of a lack of memory, by the name of the error that has them, where that is no
#: MemoryError: cuBLAS's handles, kernels and CUDA's own are not from CuPy's pools.
_NO_MEMORY = {"CUBLASError": (1, 3), "CUDARuntimeError": (2,), "CUDADriverError": (2,)}
#: What onnxruntime, whose memory is its own, says of such a lack.
_NO_MEMORY_IN_SESSIONS = "Failed to allocate memory"
#: Statuses of a stream on which all is well: all has ended, or not yet.
_WELL = (0, 600)


class CudaDevice:
    """One GPU of this process.

    Parameters
    ----------
    ordinal : int, optional
        Among those that `CUDA_VISIBLE_DEVICES` shows.
    precision : str, optional
        Of `PRECISIONS`: how products of single-precision matrices are computed.

    Raises
    ------
    ClusterError
        There is no CuPy, or no such device, or it cannot be used; or the environment lets CuPy round what
        must not be rounded.
    """

    def __init__(self, ordinal: int = 0, precision: str = "fp32") -> None:
        check_precision(precision)
        n_devices = count_devices()
        if not 0 <= ordinal < n_devices:
            raise ClusterError(f"there is no device cuda:{ordinal}; this process sees {n_devices}")
        switch = os.environ.get(_TF32_SWITCH, "0")
        if precision == "fp32" and switch != "0":
            raise ClusterError(
                f"{_TF32_SWITCH}={switch} lets CuPy round products to TF32, but fp32 was asked for; "
                "unset it, or ask for tf32"
            )
        import cupy

        self._cupy = cupy
        self._ordinal = ordinal
        self._device = cupy.cuda.Device(ordinal)
        self._precision = precision
        self._local = threading.local()
        self.name = f"cuda:{ordinal}"
        self.mode = precision
        #: Of onnxruntime-gpu, where that stands in onnxruntime's place.
        self.execution_provider: ExecutionProvider | None = (
            "CUDAExecutionProvider",
            {
                "device_id": str(ordinal),
                "use_tf32": "0" if precision == "fp32" else "1",
                "arena_extend_strategy": "kSameAsRequested",  # others need the memory, too
            },
        )
        try:
            self._total_nbytes = int(self._device.mem_info[1])
        except Exception as error:  # another process has it for itself, or has left no memory
            raise ClusterError(f"{self.name} cannot be used: {one_line(error)}") from error

    @contextmanager
    def use(self, computes: bool = True) -> Iterator[None]:
        """Make the calling thread's stream the one that work, and products if so told, are enqueued on."""
        with self._device, self._stream:
            if self._precision == "fp32" or not computes:  # a handle takes memory
                yield
                return
            # Handles are CuPy's, one for each thread and device, and others use them too. The mode is that of
            # all calls, those of stacks included, which CuPy's own switch for TF32 leaves alone.
            cublas, handle = self._cupy.cuda.cublas, self._device.cublas_handle
            before = cublas.getMathMode(handle)  # uses nest: what is read on the host crosses within a task
            cublas.setMathMode(handle, _TF32_MATH)
            try:
                yield
            finally:
                cublas.setMathMode(handle, before)

    @property
    def _stream(self) -> Any:
        stream = getattr(self._local, "stream", None)
        if stream is None:
            with self._device:
                stream = self._local.stream = self._cupy.cuda.Stream()
        return stream

    def to_device(self, array: HostArray) -> Any:
        """Enqueue a copy from the host."""
        # CuPy copies to pinned memory of its own before it returns, so the host may free the array.
        return self._cupy.asarray(np.ascontiguousarray(array)).reshape(array.shape)

    def to_host(self, array: Any) -> HostArray:
        """Enqueue a copy to the host and wait for it."""
        found: HostArray = self._cupy.asnumpy(array)
        return found

    def record(self) -> Any:
        """Enqueue an event."""
        event = self._cupy.cuda.Event(block=True)  # who waits leaves the core to others
        event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        """Let what is enqueued from now on start after an event."""
        self._stream.wait_event(event)

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Return the time between two events of a stream that have come [s]."""
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def product(self, a: Any, b: Any) -> Any:
        """Enqueue a product of matrices, or of stacks of them, in the precision that was asked for."""
        if a.dtype == b.dtype == np.float32 and self._precision in _ROUNDED:
            # TF32 holds numbers of half precision and bfloat16 as they are, and results keep their range.
            a, b = (_ROUNDED[self._precision](array) for array in (a, b))
        return self._cupy.matmul(a, b)

    def used_nbytes(self) -> int:
        """Return the memory that is taken [B], without what pools keep of it for later."""
        free, total = self._device.mem_info
        with self._device:  # CuPy's pool tells of the current one
            idle = self._cupy.get_default_memory_pool().free_bytes() + idle_nbytes(self._ordinal)
        return max(0, int(total - free - idle))

    def total_nbytes(self) -> int:
        """Return the memory that there is [B]."""
        return self._total_nbytes

    def release_free(self) -> None:
        """Give memory back that is kept for later."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        self._cupy.get_default_pinned_memory_pool().free_all_blocks()

    def lacks_memory(self, error: Exception) -> bool:
        """Return whether an error says that there is no memory left."""
        statuses = _NO_MEMORY.get(type(error).__name__, ())
        is_told = isinstance(error, MemoryError) or getattr(error, "status", None) in statuses
        return is_told or _NO_MEMORY_IN_SESSIONS in str(error)

    def check(self) -> None:
        """Raise if the device has failed: nothing can be computed on it in this process any more."""
        # After an error of a kernel each call that looks at the context yields it; a query of an event says
        # no more than that it has not come.
        runtime = self._cupy.cuda.runtime
        with self._device:
            status = runtime.streamQuery(self._stream.ptr)
        if status not in _WELL:
            runtime.check_status(status)


def _as_half(array: Any) -> Any:
    return array.astype(np.float16).astype(np.float32)


def _as_bfloat16(array: Any) -> Any:
    bits = array.view(np.uint32)
    # To the nearest, of two to the even one.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(array), array, rounded.view(np.float32))


_ROUNDED = {"fp16": _as_half, "bf16": _as_bfloat16}


def check_precision(precision: str) -> None:
    """Raise for what is none of `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise UnknownNameError.of("precision", precision, PRECISIONS)


def count_devices() -> int:
    """Return the devices that this process sees; 0 without a driver.

    Raises
    ------
    ClusterError
        There is no CuPy.
    """
    try:
        import cupy
    except ImportError as error:
        raise ClusterError(
            "CUDA devices need CuPy, which is not installed here; run in the clone: pip install '.[gpu]' for "
            "CUDA 13, '.[gpu12]' for CUDA 12"
        ) from error
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # noqa: BLE001 -- no driver, or one that is too old for this CuPy
        return 0
