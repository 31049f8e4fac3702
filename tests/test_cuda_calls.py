"""What is asked of CUDA's libraries, where there are none: stand-ins note it."""

from __future__ import annotations

import sys
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
