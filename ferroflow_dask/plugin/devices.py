"""Give workers their devices: those that have the resource `GPU`, now and when they join."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from distributed import Client, WorkerPlugin

from ferroflow_dask.devices import Device, DeviceRunner, DeviceUsage, attach, attached, detach, usage_here
from ferroflow_dask.devices.cuda import check_precision
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.lowering import CPU, GPU

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.scheduler import WorkerState

#: The resource that workers with GPUs have; Dask's documentation calls it so.
GPU_RESOURCE = "GPU"
#: Under which workers tell how long tasks took on devices.
DURATIONS_TOPIC = "ferroflow-device-durations"
_NAME = "ferroflow-devices"


def kind_of_worker(ws: WorkerState) -> str:
    """Return what a worker is: `gpu` if it has the resource, `cpu` otherwise."""
    return GPU if ws.resources.get(GPU_RESOURCE) else CPU


@dataclass(frozen=True)
class DeviceSpec:
    """What a worker makes its device from.

    Parameters
    ----------
    kind : str
        `cuda` or `emulated`.
    options : dict
        Arguments of `CudaDevice` or `EmulatedDevice`.
    is_optional : bool
        Whether a worker that has none, or lacks CuPy, runs ops on its CPU instead of refusing to.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    is_optional: bool = False

    def make(self) -> Device:
        """Return the device; called on the worker."""
        if self.kind == "emulated":
            from ferroflow_dask.devices.emulated import EmulatedDevice

            return EmulatedDevice(**self.options)
        from ferroflow_dask.devices.cuda import CudaDevice

        return CudaDevice(**self.options)


class Devices(WorkerPlugin):
    """Lets the ops of graphs run on the device of each worker that has the resource `GPU`."""

    name = _NAME

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec

    def setup(self, worker: Worker) -> None:
        """Attach the device."""
        if not worker.state.total_resources.get(GPU_RESOURCE):
            return
        try:
            device = self._spec.make()
        except ClusterError:
            if self._spec.is_optional:
                return
            raise
        attach(worker.id, DeviceRunner(device, _spilling(worker), _telling(worker)))

    def teardown(self, worker: Worker) -> None:
        """Detach the device."""
        detach(worker.id)


def _spilling(worker: Worker) -> Callable[[], bool]:
    def spill() -> bool:
        # dask-cuda's name for what it keeps on the device; it goes to the host by dask-cuda's own means.
        on_device = getattr(getattr(worker.data, "device_buffer", None), "fast", None)
        if not on_device:
            return False
        on_device.evict()
        return True

    return spill


def _telling(worker: Worker) -> Callable[[str, float], None]:
    def tell(kind: str, seconds: float) -> None:
        if kind:
            worker.log_event(DURATIONS_TOPIC, {"kind": kind, "seconds": seconds})

    return tell


def use_devices(client: Client, spec: DeviceSpec) -> None:
    """Let the workers of a cluster that have the resource `GPU` use devices; the rest is as `use_gpus`."""
    client.register_plugin(Devices(spec))


def use_gpus(client: Client, precision: str = "fp32") -> None:
    """Let the workers that have the resource `GPU` run ops on their GPUs, now and when they join.

    Parameters
    ----------
    client : distributed.Client
        Of workers started by dask-cuda, by `dask cuda worker ADDRESS --resources GPU=1`, say.
    precision : str, optional
        Of products of single-precision matrices: `fp32`, `tf32`, `fp16` or `bf16`.

    Raises
    ------
    ClusterError
        A worker that has the resource has no device, or no CuPy.
    UnknownNameError
        There is no such precision.
    """
    check_precision(precision)
    use_devices(client, DeviceSpec("cuda", {"precision": precision}))


def _usage() -> tuple[int, DeviceUsage | None]:
    return os.getpid(), None if attached() is None else usage_here()


def device_usage(client: Client) -> DeviceUsage | None:
    """Return what was done on the devices of a cluster; None if it has none."""
    by_process = dict(client.run(_usage).values())  # workers may share one
    found = [usage for usage in by_process.values() if usage is not None]
    return reduce(DeviceUsage.plus, found) if found else None
