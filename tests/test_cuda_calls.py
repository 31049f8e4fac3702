"""What is asked of CUDA's libraries, where there are none: stand-ins note it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from ferroflow_dask.deploy.cuda import _device_cluster
from ferroflow_dask.devices.cuda import CudaDevice

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


def test_full_precision_takes_no_handle(cupy: MagicMock) -> None:
    del cupy.cuda.Device.return_value.cublas_handle  # a look at it would raise
    with CudaDevice().use():
        pass
    cupy.cuda.cublas.setMathMode.assert_not_called()


@pytest.mark.parametrize(("has_cpus", "protocol"), [(False, "ucx"), (True, None)])
def test_cpu_workers_have_no_part_in_ucx(
    monkeypatch: pytest.MonkeyPatch, has_cpus: bool, protocol: str | None
) -> None:
    dask_cuda = MagicMock()
    monkeypatch.setitem(sys.modules, "dask_cuda", dask_cuda)
    monkeypatch.setattr("ferroflow_dask.deploy.cuda.find_spec", lambda _name: object())
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
        pytest.param(CUDA, 800, id="no pool"),
        pytest.param(Pool(CUDA, size=500), 800, id="a pool of which nobody counts what is used"),
        pytest.param(Tracking(Pool(CUDA, size=500), used=100), 400, id="a pool that is tracked"),
        pytest.param(Statistics(Pool(CUDA, size=500), used=300), 600, id="a pool with statistics"),
        pytest.param(Resource(Tracking(Resource(Pool(CUDA, size=500)), used=100)), 400, id="within others"),
        pytest.param(Pool(Tracking(CUDA, used=500), size=500), 800, id="what the pool has taken is tracked"),
        pytest.param(Tracking(CUDA, used=100), 800, id="tracked, and no pool"),
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
