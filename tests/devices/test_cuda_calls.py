"""What is asked of CUDA's libraries, where there are none: stand-ins note it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, PropertyMock

import pytest

from ferroflow_dask.deploy.cuda import _device_cluster
from ferroflow_dask.devices.cuda import CudaDevice
from ferroflow_dask.exceptions import ClusterError

DEFAULT_MATH, TF32_MATH = 0, 3


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    cupy = MagicMock()
    cupy.cuda.runtime.getDeviceCount.return_value = 1
    cupy.cuda.Device.return_value.mem_info = (1, 1)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_a_use_within_a_use_leaves_the_precision_of_products(cupy: MagicMock, precision: str) -> None:
    mode = [DEFAULT_MATH]
    cupy.cuda.cublas.getMathMode.side_effect = lambda _handle: mode[-1]
    cupy.cuda.cublas.setMathMode.side_effect = lambda _handle, value: mode.append(value)
    device = CudaDevice(precision=precision)
    with device.use():
        with device.use():
            assert mode[-1] == TF32_MATH
        assert mode[-1] == TF32_MATH
    assert mode[-1] == DEFAULT_MATH


@pytest.mark.parametrize(("precision", "computes"), [("fp32", True), ("tf32", False)])
def test_full_precision_and_reading_take_no_handle(cupy: MagicMock, precision: str, computes: bool) -> None:
    del cupy.cuda.Device.return_value.cublas_handle  # a look at it would raise
    with CudaDevice(precision=precision).use(computes=computes):
        pass
    cupy.cuda.cublas.setMathMode.assert_not_called()


def test_what_is_read_from_other_libraries_is_ordered_after_them(cupy: MagicMock) -> None:
    with CudaDevice().use():
        pass
    (call,) = cupy.cuda.Stream.mock_calls[:1]
    assert not call.kwargs.get("non_blocking"), "CUDA would not order it with the default stream"


def test_full_precision_is_not_asked_for_where_cupy_would_round(
    cupy: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_TF32", "1")
    with pytest.raises(ClusterError, match=r"CUPY_TF32=1 lets CuPy round.* unset it, or ask for tf32"):
        CudaDevice()
    assert CudaDevice(precision="tf32").mode == "tf32"
    assert cupy.cuda.Device.call_count == 1


def test_a_device_that_cannot_be_used_is_told_in_a_line(cupy: MagicMock) -> None:
    busy = PropertyMock(side_effect=RuntimeError("cudaErrorDevicesUnavailable: busy"))
    type(cupy.cuda.Device.return_value).mem_info = busy
    with pytest.raises(ClusterError, match=r"cuda:0 cannot be used: .*busy"):
        CudaDevice()


class CUBLASError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status


class CUDARuntimeError(CUBLASError):
    pass


@pytest.mark.parametrize(
    ("error", "lacks_memory"),
    [
        (MemoryError(), True),
        (CUBLASError(1), True),
        (CUBLASError(3), True),
        (CUBLASError(13), False),
        (CUDARuntimeError(2), True),
        (CUDARuntimeError(700), False),
        (RuntimeError("BFCArena: Failed to allocate memory for requested buffer of size 8"), True),
        (ValueError(), False),
    ],
    ids=repr,
)
def test_errors_that_tell_of_a_lack_of_memory(cupy: MagicMock, error: Exception, lacks_memory: bool) -> None:
    assert CudaDevice().lacks_memory(error) is lacks_memory
    assert cupy.mock_calls


@pytest.mark.parametrize(("status", "is_well"), [(0, True), (600, True), (700, False), (719, False)])
def test_a_broken_context_is_found_out(cupy: MagicMock, status: int, is_well: bool) -> None:
    cupy.cuda.runtime.streamQuery.return_value = status
    cupy.cuda.runtime.check_status.side_effect = CUDARuntimeError(status)
    device = CudaDevice()
    with nullcontext() if is_well else pytest.raises(CUDARuntimeError):
        device.check()


@pytest.mark.parametrize(
    ("has_cpus", "installed", "protocol"),
    [
        (False, {"distributed_ucxx", "numba"}, "ucx"),
        (False, {"distributed_ucxx"}, None),
        (False, {"numba"}, None),
        (True, {"distributed_ucxx", "numba"}, None),
    ],
)
def test_ucx_is_for_gpus_alone_and_needs_what_sends_their_arrays(
    monkeypatch: pytest.MonkeyPatch, has_cpus: bool, installed: set[str], protocol: str | None
) -> None:
    dask_cuda = MagicMock()
    monkeypatch.setitem(sys.modules, "dask_cuda", dask_cuda)
    found = {*installed, "rmm"}
    monkeypatch.setattr(
        "ferroflow_dask.deploy.cuda.find_spec", lambda name: object() if name in found else None
    )
    _device_cluster([0], has_cpus)
    assert dask_cuda.LocalCUDACluster.call_args.kwargs["protocol"] == protocol
    assert dask_cuda.LocalCUDACluster.call_args.kwargs["rmm_track_allocations"] is True


class Resource:
    """One of RMM's memory resources, by the names that its stubs give."""

    def __init__(self, upstream_mr: Resource | None = None, **told: Any) -> None:
        if upstream_mr is not None:
            self.upstream_mr = upstream_mr
        self.told = told


class Pool(Resource):
    def pool_size(self) -> int:
        size: int = self.told["size"]
        return size


class Tracking(Resource):
    def get_allocated_bytes(self) -> int:
        used: int = self.told["used"]
        return used


class Statistics(Resource):
    @property
    def allocation_counts(self) -> SimpleNamespace:
        return SimpleNamespace(current_bytes=self.told["used"])


CUDA = Resource()


@pytest.mark.parametrize(
    ("resource", "used_nbytes"),
    [
        pytest.param(None, 800, id="no RMM"),
        pytest.param(Pool(CUDA, size=500), 800, id="a pool of which nobody counts what is used"),
        pytest.param(Tracking(Pool(CUDA, size=500), used=100), 400, id="a pool that is tracked"),
        pytest.param(Statistics(Pool(CUDA, size=500), used=300), 600, id="a pool with statistics"),
        pytest.param(Resource(Tracking(Resource(Pool(CUDA, size=500)), used=100)), 400, id="within others"),
        pytest.param(Pool(Tracking(CUDA, used=500), size=500), 800, id="what the pool has taken is tracked"),
        pytest.param(Statistics(Pool(CUDA, size=500), used=-100), 300, id="statistics that were begun late"),
        pytest.param(Tracking(Pool(CUDA, size=500), used=700), 800, id="more than the pool has"),
    ],
)
def test_what_a_pool_keeps_for_later_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, cupy: MagicMock, resource: Resource | None, used_nbytes: int
) -> None:
    cupy.cuda.Device.return_value.mem_info = (200, 1000)
    cupy.get_default_memory_pool.return_value.free_bytes.return_value = 0
    if resource is not None:
        mr = SimpleNamespace(
            PoolMemoryResource=Pool,
            TrackingResourceAdaptor=Tracking,
            StatisticsResourceAdaptor=Statistics,
            get_per_device_resource={0: resource}.__getitem__,
        )
        monkeypatch.setitem(sys.modules, "rmm.mr", mr)  # type: ignore[arg-type]
    assert CudaDevice().used_nbytes() == used_nbytes


def test_what_cupys_pool_keeps_for_later_is_not_taken(cupy: MagicMock) -> None:
    cupy.cuda.Device.return_value.mem_info = (200, 1000)
    device = cupy.cuda.Device.return_value
    entered: list[int] = []

    def free_bytes() -> int:
        entered.append(device.__enter__.call_count - device.__exit__.call_count)
        return 300

    cupy.get_default_memory_pool.return_value.free_bytes.side_effect = free_bytes
    assert CudaDevice().used_nbytes() == 500
    assert entered == [1], "of the device that was asked for"
