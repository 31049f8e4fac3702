"""Local clusters whose workers have devices: dask-cuda's workers, with CPU workers beside them.

A worker has one kind of device: Dask counts slots by worker, so one that had both would leave the one idle
while the other is busy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from dask.typing import Key
from distributed import Client, LocalCluster, Nanny
from distributed.protocol.serialize import deserialize, serialize
from zict import Buffer, Func

from ferroflow_dask.bundling.results import Results
from ferroflow_dask.deploy.interrupts import closed_undisturbed, interrupts_deferred
from ferroflow_dask.deploy.local import CLUSTER_OPTIONS, check_main, worker_environment
from ferroflow_dask.device_reports import GPU_RESOURCE
from ferroflow_dask.devices import Resident
from ferroflow_dask.devices.cuda import check_precision, count_devices
from ferroflow_dask.devices.workers import DeviceSpec, use_devices
from ferroflow_dask.exceptions import ClusterError, UsageError

_DEVICES = "cpu, cuda, cuda:N (the GPU with that number), auto, emulated"
_EMULATED_NBYTES = 2**31


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Which devices a cluster is to use.

    Parameters
    ----------
    kind : str
        `cuda`, `auto` (CUDA devices if there are any, and CPU workers beside them) or `emulated`.
    ordinal : int or None
        The only CUDA device to use; all if None.
    precision : str
        Of products of single-precision matrices; see `CudaDevice`.
    """

    kind: str
    ordinal: int | None = None
    precision: str = "fp32"

    @classmethod
    def parse(cls, device: str, precision: str = "fp32") -> DeviceChoice | None:
        """Return what a device's name asks for; None for `cpu`.

        Raises
        ------
        UsageError
            It makes no sense.
        """
        check_precision(precision)
        if device == "emulated" and precision != "fp32":
            raise UsageError(f"an emulated device computes in fp32 only, not in {precision}")
        if device == "cpu":
            return None
        kind, colon, ordinal = device.partition(":")
        if kind == "cuda" and colon and ordinal.isdecimal():
            return cls(kind, int(ordinal), precision)
        if device in ("cuda", "auto", "emulated"):
            return cls(device, None, precision)
        raise UsageError(f"--device {device!r} is not available; choose one of: {_DEVICES}")

    @property
    def spec(self) -> DeviceSpec:
        """What workers make their device from."""
        if self.kind == "emulated":
            return DeviceSpec("emulated", {"memory_nbytes": _EMULATED_NBYTES})
        return DeviceSpec("cuda", {"precision": self.precision}, is_optional=self.kind == "auto")

    def ordinals(self) -> list[int]:
        """Return the GPUs of this machine to use; none where `auto` finds none.

        Raises
        ------
        ClusterError
            There is no GPU, not that one, or a package is missing.
        """
        if self.kind == "auto":
            if find_spec("dask_cuda") is None:
                return []
            try:
                return list(range(count_devices()))
            except ClusterError:  # no CuPy
                return []
        n = count_devices()
        if not n:
            raise ClusterError(
                f"--device {self}: CuPy finds no GPU or no driver on this machine (nvidia-smi tells more); "
                "run with --device cpu"
            )
        if self.ordinal is not None and self.ordinal >= n:
            raise ClusterError(f"--device {self}: this machine has {n}, cuda:0 to cuda:{n - 1}")
        if find_spec("dask_cuda") is None:
            raise ClusterError(
                f"--device {self} needs dask-cuda, which is missing; run in the clone: pip install "
                "'.[gpu]' for CUDA 13, '.[gpu12]' for CUDA 12"
            )
        return list(range(n)) if self.ordinal is None else [self.ordinal]

    def __str__(self) -> str:
        return self.kind if self.ordinal is None else f"{self.kind}:{self.ordinal}"


class EmulatedStore(Buffer[Key, Any]):
    """What dask-cuda keeps on a GPU and spills to the host, for emulated devices.

    Parameters
    ----------
    device_memory_limit : int
        Of results on the device [B].
    """

    def __init__(self, device_memory_limit: int) -> None:
        spilled: Func[Key, Any, Any] = Func(_to_host, _to_device, {})
        super().__init__({}, spilled, device_memory_limit, weight=lambda _, value: _device_nbytes(value))
        #: dask-cuda's name for it.
        self.device_buffer = self


def _device_nbytes(value: Any) -> int:
    # Of several results, a tuple where they are those of one op.
    values = value.values if isinstance(value, Results) else value if isinstance(value, tuple) else (value,)
    return sum(item.nbytes for item in values if isinstance(item, Resident))


class _Spilled(NamedTuple):
    header: Any
    frames: Any


# As dask-cuda does it.
def _to_host(value: Any) -> Any:
    if not _device_nbytes(value):
        return value
    return _Spilled(*serialize(value, serializers=("dask", "pickle"), on_error="raise"))


def _to_device(value: Any) -> Any:
    return deserialize(*value) if isinstance(value, _Spilled) else value


@contextmanager
def device_client(
    choice: DeviceChoice, workers: int, threads: int = 1, *, emulated: Mapping[str, Any] | None = None
) -> Iterator[Client]:
    """Start a worker for each device, and CPU workers beside them, and yield a client of them.

    Where distributed-ucxx and numba are installed and there are no CPU workers, arrays go from GPU to GPU.

    Parameters
    ----------
    choice : DeviceChoice
    workers : int
        CPU workers, each a process; may be none where there are devices.
    threads : int, optional
        Of each CPU worker.
    emulated : mapping, optional
        Arguments of `EmulatedDevice`.

    Raises
    ------
    ClusterError
        As `DeviceChoice.ordinals`.
    UsageError
        Worker processes cannot import `__main__`.
    """
    check_main()
    spec = choice.spec
    if choice.kind == "emulated":
        spec = DeviceSpec("emulated", {**spec.options, **(emulated or {})})
    ordinals = [] if choice.kind == "emulated" else choice.ordinals()
    with closed_undisturbed() as stack:
        stack.enter_context(worker_environment())
        with interrupts_deferred():
            cluster = stack.enter_context(_device_cluster(ordinals, bool(workers)))
            if not workers and not ordinals and choice.kind != "emulated":
                raise ClusterError("there is no GPU here, and no CPU workers were asked for")
            beside = {f"cpu-{i}": _cpu_worker(cluster, threads) for i in range(workers)}
            if choice.kind == "emulated":
                beside["gpu-0"] = _emulated_worker(cluster, spec)
            cluster.worker_spec.update(beside)
            cluster.sync(_started, cluster)
            client = stack.enter_context(Client(cluster))
        use_devices(client, spec)
        yield client


async def _started(cluster: Any) -> None:
    """Start the workers that are not there yet, and wait for them; raise the error of one that fails."""
    await cluster  # `scale` would lose the error


def _device_cluster(ordinals: list[int], has_cpus: bool) -> Any:
    """Return a cluster of a worker for each GPU."""
    if not ordinals:
        return LocalCluster(n_workers=0, **CLUSTER_OPTIONS)
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(
        CUDA_VISIBLE_DEVICES=as_the_driver_counts(ordinals),
        threads_per_worker=1,
        # From GPU to GPU without the host. It makes a CUDA context in each worker, without which none starts.
        protocol=None if has_cpus or not all(map(find_spec, _FOR_UCX)) else "ucx",
        # A pool, so that an allocation does not wait for the device.
        **({} if find_spec("rmm") is None else _RMM),
        resources={GPU_RESOURCE: 1},
        **CLUSTER_OPTIONS,
    )


#: What takes arrays from GPU to GPU; distributed sends those of CuPy with Numba's help.
_FOR_UCX = ("distributed_ucxx", "numba")
#: It tracks allocations because the pool itself does not tell how much of it is used.
_RMM = {
    "rmm_pool_size": 0.5,
    "rmm_track_allocations": True,
    "rmm_allocator_external_lib_list": ["cupy"],
}


def as_the_driver_counts(ordinals: Sequence[int]) -> list[int | str]:
    """Return the GPUs that this process sees under some numbers as dask-cuda names them: among all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    return [ordinal if names is None else names[ordinal].strip() for ordinal in ordinals]


def _cpu_worker(cluster: Any, threads: int) -> dict[str, Any]:
    return {"cls": Nanny, "options": {**_common(cluster), "nthreads": threads, "env": _NO_GPU}}


def _emulated_worker(cluster: Any, spec: DeviceSpec) -> dict[str, Any]:
    # As dask-cuda does: the rest is for what is computed.
    store = (EmulatedStore, {"device_memory_limit": int(0.8 * spec.options["memory_nbytes"])})
    return {
        "cls": Nanny,
        "options": {
            **_common(cluster),
            "nthreads": 1,
            "resources": {GPU_RESOURCE: 1},
            "data": store,
            "memory_limit": 0,  # what would be on a GPU is on the host too
        },
    }


_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def _common(cluster: Any) -> dict[str, Any]:
    known: dict[str, Any] = cluster.new_spec["options"]
    kept = ("host", "protocol", "interface", "security", "silence_logs", "dashboard_address")
    return {name: known[name] for name in kept if name in known}
