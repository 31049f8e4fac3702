"""Give workers their devices: those that have the resource `GPU`, now and when they join."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from distributed import Client, WorkerPlugin
from tornado.ioloop import PeriodicCallback

from ferroflow_dask.clients import ask_workers, check_synchronous, workers_of
from ferroflow_dask.device_reports import (
    ATTACHED_RESOURCE,
    DEVICE_METRIC,
    DEVICES_TOPIC,
    GPU_RESOURCE,
    DeviceUsage,
)
from ferroflow_dask.devices import Device, DeviceRunner, attach, attached, detach, usage_here
from ferroflow_dask.devices.cuda import check_precision
from ferroflow_dask.exceptions import ClusterError

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("ferroflow_dask")

#: How often workers look for what has ended on a device [ms], and how often after it has failed until they
#: end: errors have to reach the scheduler before.
_LOOK_MS, _LOOKS_UNTIL_END = 100, 20
#: Between two looks at what others spill [s].
_SPILL_S = 1e-3
_NAME = "ferroflow-devices"
#: Of this process among those of all hosts.
_PROCESS = uuid.uuid4().hex


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
    """Lets the ops of graphs run on the device of each worker that has the resource `GPU`.

    A worker that joins later and has no device runs them on its CPU: nothing can refuse it then.
    """

    name = _NAME

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec

    async def setup(self, worker: Worker) -> None:
        """Attach the device, and say so to the scheduler."""
        if not worker.state.total_resources.get(GPU_RESOURCE):
            return
        try:
            device = self._spec.make()
        except ClusterError:
            if self._spec.is_optional:
                return
            raise
        runner = DeviceRunner(device, _spilling(worker), _telling(worker))
        attach(worker.id, runner)
        worker.metrics[DEVICE_METRIC] = _report(runner)
        await worker.set_resources(**{ATTACHED_RESOURCE: 1})
        worker.log_event(DEVICES_TOPIC, {})  # distributed adds the worker
        callback = PeriodicCallback(_Lookout(worker, runner).look, _LOOK_MS)
        worker.periodic_callbacks[_NAME] = callback
        callback.start()

    async def teardown(self, worker: Worker) -> None:
        """Detach the device."""
        callback = worker.periodic_callbacks.pop(_NAME, None)
        if callback is not None:
            callback.stop()
            worker.metrics.pop(DEVICE_METRIC, None)
            await worker.set_resources(**{ATTACHED_RESOURCE: 0})
            detach(worker.id)
            worker.log_event(DEVICES_TOPIC, {})  # distributed adds the worker


class _Lookout:
    """Finishes what has ended on a device, and ends a worker whose device has failed."""

    def __init__(self, worker: Worker, runner: DeviceRunner) -> None:
        self._worker = worker
        self._runner = runner
        self._n_broken = 0

    async def look(self) -> None:
        if not self._runner.is_broken:
            self._runner.reap()
            return
        self._n_broken += 1
        if self._n_broken == _LOOKS_UNTIL_END:
            # After an error of its own a CUDA context is of no use: with another process there is another.
            logger.error("%s: its device has failed; it ends, for its nanny to start another", self._worker)
            await self._worker.close(nanny=False, reason="ferroflow-device-failed")


def _report(runner: DeviceRunner) -> Callable[[Worker], dict[str, Any]]:
    """Return the metric that reports a device: `DeviceUsage` by name, total memory [B] and an id.

    The id stands for this device and these counters: after a restart of the worker, both are new.
    """
    name = uuid.uuid4().hex

    def report(_: Worker) -> dict[str, Any]:
        return {"id": name, "total_nbytes": runner.device.total_nbytes(), **asdict(runner.usage())}

    return report


def _spilling(worker: Worker) -> Callable[[], bool]:
    def spill() -> bool:
        # dask-cuda's name for what it keeps on the device; it goes to the host by dask-cuda's own means.
        on_device = getattr(getattr(worker.data, "device_buffer", None), "fast", None)
        if not on_device:
            return False
        try:
            for key in list(on_device.order):  # the one that was read longest ago first
                with suppress(KeyError):  # it is gone
                    if on_device.evict(key)[0] is not None:
                        return True
        except Exception:
            logger.exception("a result could not be spilled from the device")
            return False
        time.sleep(_SPILL_S)  # others spill what is left
        return bool(on_device)

    return spill


def _telling(worker: Worker) -> Callable[[str, float], None]:
    def tell(kind: str, seconds: float) -> None:
        if kind:
            worker.log_event(DEVICES_TOPIC, {"kind": kind, "seconds": seconds})

    return tell


def use_devices(client: Client, spec: DeviceSpec) -> None:
    """Let the workers of a cluster that have the resource `GPU` use devices; the rest is as `use_gpus`."""
    check_synchronous(client, "use_gpus")
    client.register_plugin(Devices(spec))


def use_gpus(client: Client, precision: str = "fp32") -> None:
    """Let the workers that have the resource `GPU` run ops on their GPUs, now and when they join.

    Parameters
    ----------
    client : distributed.Client
        Of workers started by dask-cuda, by `dask cuda worker ADDRESS --resources GPU=1`, say. All workers
        must have this package, those that join later too. Synchronous.
    precision : str, optional
        Of products of single-precision matrices: `fp32`, `tf32`, `fp16` or `bf16`.

    Raises
    ------
    ClusterError
        A worker that has the resource has no device, or no CuPy.
    UnknownNameError
        There is no such precision.
    UsageError
        The client is asynchronous.
    """
    check_precision(precision)
    use_devices(client, DeviceSpec("cuda", {"precision": precision}))


def gpu_workers(client: Client) -> list[str]:
    """Return the workers that have the resource `GPU`, without asking them."""
    check_synchronous(client, "gpu_workers")
    return [
        address for address, worker in workers_of(client).items() if worker["resources"].get(GPU_RESOURCE)
    ]


def _usage() -> tuple[str, DeviceUsage | None]:
    return _PROCESS, None if attached() is None else usage_here()


def device_usage(client: Client) -> DeviceUsage | None:
    """Return what was done on the devices of a cluster; None if it has none."""
    gpus = gpu_workers(client)
    # Workers may share a process, and with it what was counted.
    by_process = dict(ask_workers(client, _usage, workers=gpus).values()) if gpus else {}
    found = [usage for usage in by_process.values() if usage is not None]
    return reduce(DeviceUsage.plus, found) if found else None
