"""What workers send each other: arrays of types that Dask does not know, and arrays on devices."""

from __future__ import annotations

import importlib
import pickle
import sys
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dask.utils import Dispatch
from distributed import Client
from distributed.protocol import deserialize, serialize
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize

import ferroflow_dask.lowering  # noqa: F401 -- registers what is sent and spilled
from ferroflow_dask.bundling.results import Results
from ferroflow_dask.devices import DeviceRunner, Resident, attach, detach
from ferroflow_dask.devices.emulated import EmulatedArray, EmulatedDevice, UnplannedAccessError
from ferroflow_dask.exceptions import KernelError, UsageError

LOW_PRECISION = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e5m2fnuz", "int4")


def as_sent(value: Any) -> Any:
    return deserialize(*serialize(value, serializers=("dask", "pickle"), on_error="raise"))


@pytest.mark.cluster
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_low_precision_from_worker_to_worker(process_client: Client, name: str) -> None:
    process_client.run(importlib.import_module, "ferroflow_dask.lowering")  # as ops of ours do
    here, there = list(process_client.nthreads())[:2]
    array = np.arange(6).astype(getattr(ml_dtypes, name)).reshape(2, 3)
    made = process_client.submit(np.array, array, workers=[here])
    found = process_client.submit(np.array, made, workers=[there]).result(timeout=30)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found.astype(float), array.astype(float))


@pytest.mark.parametrize("dtype", ["<f2", ">f4", "f8", "?", "c16", "U3", "O", "M8[s]", "i4,f8"])
def test_all_else_is_sent_as_dask_does(dtype: str) -> None:
    array = np.zeros(3, dtype)
    assert serialize(array)[0]["serializer"] == "dask"
    assert as_sent(array).dtype == array.dtype


def on_a_device(values: Any) -> Resident:
    device = EmulatedDevice()
    return Resident(DeviceRunner(device), device.to_device(np.asarray(values)), device.record())


@pytest.fixture
def resident() -> Resident:
    return on_a_device(np.float32([1, 2, 3]))


def test_a_resident_array_arrives_as_one_of_numpys(resident: Resident) -> None:
    for found in (as_sent(resident), pickle.loads(pickle.dumps(resident)), as_sent([resident])[0]):
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, np.float32([1, 2, 3]))


def test_from_device_to_device_nothing_crosses_where_the_link_can(
    resident: Resident, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = ("cuda", "dask", "pickle")
    assert serialize(resident, serializers=families)[0]["serializer"] == "dask", "of an unknown library"
    lookups = cuda_serialize._lookup, cuda_deserialize._lookup
    cuda_serialize.register(EmulatedArray, lambda array: ({}, [array]))
    cuda_deserialize.register(EmulatedArray, lambda _, frames: frames[0])
    runner = resident._runner
    before = runner.usage()
    attach("a worker", runner)
    try:
        header, frames = serialize(resident, serializers=families)
        assert header["serializer"] == "cuda"
        found = deserialize(header, frames)
        assert isinstance(found, Resident)
        assert runner.usage() == before
        np.testing.assert_array_equal(found, np.float32([1, 2, 3]))
        detach("a worker")
        monkeypatch.setattr(EmulatedArray, "get", lambda array: array._data, raising=False)  # as CuPy's have
        found = deserialize(header, frames)
        assert type(found) is np.ndarray, "a client has no device"
        np.testing.assert_array_equal(found, np.float32([1, 2, 3]))
    finally:
        detach("a worker")
        for lookup in lookups:
            del lookup[EmulatedArray]


def test_where_the_link_lacks_a_package_it_goes_through_the_host(resident: Resident) -> None:
    def lacks_numba(_: EmulatedArray) -> Any:
        raise ModuleNotFoundError("No module named 'numba'")

    lookup = cuda_serialize._lookup
    cuda_serialize.register(EmulatedArray, lacks_numba)
    try:
        header, frames = serialize(resident, serializers=("cuda", "dask", "pickle"))
    finally:
        del lookup[EmulatedArray]
    assert header["serializer"] == "dask"
    np.testing.assert_array_equal(deserialize(header, frames), np.float32([1, 2, 3]))


def test_where_there_is_a_device_it_goes_there_when_it_is_read(resident: Resident) -> None:
    runner = DeviceRunner(EmulatedDevice())
    attach("a worker", runner)
    try:
        found = as_sent(resident)
        assert runner.usage().to_device == 0
        for _ in range(2):
            runner.on_device(found)
        assert runner.usage().to_device == 1
    finally:
        detach("a worker")


def test_to_others_a_resident_array_is_an_array(resident: Resident) -> None:
    array = np.float32([1, 2, 3])
    same = np.testing.assert_array_equal
    same(resident + 1, array + 1)
    same(1 + resident, 1 + array)
    same(np.multiply(resident, resident), array**2)
    same(np.concatenate([resident, array]), [1, 2, 3, 1, 2, 3])
    same(resident[1:], array[1:])
    same(resident.reshape(3, 1), array.reshape(3, 1))
    assert (len(resident), resident.ndim, resident.size, resident.mean()) == (3, 1, 3, 2)
    assert list(resident) == [1, 2, 3]
    assert not hasattr(resident, "nothing")
    where, out = on_a_device([True, False, True]), np.zeros(3, np.float32)
    same(np.add(resident, 1, where=where, out=out), [2, 0, 4])


def test_to_others_a_resident_number_is_a_number() -> None:
    two = on_a_device(2)
    assert (bool(two), float(two), int(two), range(3)[two], f"{two:03}") == (True, 2.0, 2, 2, "002")
    assert not on_a_device([0.0]), "as true as its only element"


@pytest.mark.parametrize(
    "write",
    [
        lambda array: array.__iadd__(1),
        lambda array: np.add(array, 1, out=array),
        lambda array: np.add.at(array, 0, 1),
        lambda array: np.add.accumulate(array, out=array),
    ],
    ids=["+=", "out", "at", "accumulate"],
)
def test_others_do_not_write_to_a_resident_array(resident: Resident, write: Any) -> None:
    with pytest.raises(UsageError, match=r"add cannot write to an array on a device; .* numpy.array\(it\)"):
        write(resident)
    np.testing.assert_array_equal(resident, [1, 2, 3])


# To CUDA's other users


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a bundle's results"])
def test_other_libraries_read_what_is_finished(resident: Resident, wrapped: bool) -> None:
    with pytest.raises(UnplannedAccessError, match="others may read what stream"):
        _ = resident._array.__cuda_array_interface__
    value = Results((np.zeros(1), resident)) if wrapped else resident
    assert value.__cuda_array_interface__["shape"] == (3,)


def test_other_libraries_are_told_what_failed() -> None:
    device = EmulatedDevice(launch_s=0.05)
    device.pending_error = KernelError("op 'y' failed")
    failed = Resident(DeviceRunner(device), device.to_device(np.zeros(3)), device.record())
    with pytest.raises(KernelError, match="op 'y' failed"):
        _ = failed.__cuda_array_interface__


@pytest.fixture
def dask_cudas(monkeypatch: pytest.MonkeyPatch) -> Dispatch:
    """How dask-cuda asks of each result whether it is on a device."""
    module: Any = ModuleType("dask_cuda.is_device_object")
    module.is_device_object = Dispatch("is_device_object")
    module.is_device_object.register(object, lambda value: hasattr(value, "__cuda_array_interface__"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found: Dispatch = module.is_device_object
    return found


def test_dask_cuda_knows_what_to_spill_and_waits_for_nothing(
    resident: Resident, dask_cudas: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(_: Resident) -> None:
        raise AssertionError("it waits for the device")

    monkeypatch.setattr(Resident, "finished", waits)
    attach("a worker", resident._runner)
    detach("a worker")
    here = np.zeros(3)
    assert dask_cudas(resident)
    assert dask_cudas(Results((here, resident)))
    assert not dask_cudas(Results((here, here)))
    assert not dask_cudas(here)
