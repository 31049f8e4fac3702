"""Device reports: the names and numbers by which workers report their devices to the scheduler.

Workers write reports into their heartbeats (`ferroflow_dask.devices.workers`); the scheduler reads them. This
module imports neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from ferroflow_dask.annotations import CPU, GPU

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

#: Resource of workers with GPUs, as in Dask's documentation.
GPU_RESOURCE = "GPU"
#: Resource of a worker whose device is attached.
ATTACHED_RESOURCE = "ferroflow-device"
#: Topic under which workers report attached devices and the durations of tasks on them.
DEVICES_TOPIC = "ferroflow-devices"
#: Key of the report among a worker's metrics.
DEVICE_METRIC = "ferroflow-device"

_COUNTED = {
    "ops": ("device_ops", "Ops that ran on devices"),
    "batches": ("device_batches", "Calls that computed several products at once"),
    "batched_ops": ("device_batched_ops", "Ops in these calls"),
    "host_ops": ("device_host_ops", "Ops that ran beside a device, which had no kernel for them"),
    "to_device": ("device_arrays_to_device", "Arrays that crossed to devices"),
    "to_host": ("device_arrays_to_host", "Arrays that crossed to the host"),
    "nbytes_to_device": ("device_bytes_to_device", "Bytes of arrays that crossed to devices"),
    "nbytes_to_host": ("device_bytes_to_host", "Bytes of arrays that crossed to the host"),
}

#: Devices of removed workers that are kept one by one, and the name that stands for all earlier ones.
_GONE = 64
_LONG_GONE = ""

#: Metrics by name: a help text and the value.
Metrics = dict[str, tuple[str, float]]


def has_gpu(ws: WorkerState) -> bool:
    """Return whether a worker has the resource `GPU`."""
    return bool(ws.resources.get(GPU_RESOURCE))


def kind_of_worker(ws: WorkerState) -> str:
    """Return `gpu` if the worker has attached its device, else `cpu`."""
    return GPU if ws.resources.get(ATTACHED_RESOURCE) else CPU


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """Counters of one or several devices.

    Parameters
    ----------
    ops : int
        Ops that ran on devices.
    batches : int
        Calls that computed several products at once.
    batched_ops : int
        Ops in them.
    host_ops : int
        Ops without a kernel for the device, which ran on its host.
    to_device, to_host : int
        Arrays that were copied.
    nbytes_to_device, nbytes_to_host : int
        Their bytes [B].
    used_nbytes : int
        Memory in use [B].
    """

    ops: int = 0
    batches: int = 0
    batched_ops: int = 0
    host_ops: int = 0
    to_device: int = 0
    to_host: int = 0
    nbytes_to_device: int = 0
    nbytes_to_host: int = 0
    used_nbytes: int = 0

    @property
    def mean_batch(self) -> float:
        """Mean number of ops in a batch."""
        return self.batched_ops / self.batches if self.batches else 0.0

    def plus(self, other: DeviceUsage) -> DeviceUsage:
        """Return the sum with another device."""
        return DeviceUsage(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(DeviceUsage)))

    def since(self, before: DeviceUsage) -> DeviceUsage:
        """Return the difference to earlier counters; memory in use is not subtracted."""
        counts = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(DeviceUsage)}
        return DeviceUsage(**{**counts, "used_nbytes": self.used_nbytes})

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return {**asdict(self), "mean_batch": self.mean_batch}


#: Names of the fields of a report.
_NAMES = tuple(field.name for field in fields(DeviceUsage))


def report_of(ws: WorkerState) -> dict[str, Any] | None:
    """Return what a worker's last heartbeat told of its device; None if it has none."""
    found = ws.metrics.get(DEVICE_METRIC)
    return found if isinstance(found, dict) else None


def memory_of(ws: WorkerState) -> tuple[int, int] | None:
    """Return how much of the memory of a worker's device is free, and how much there is [B].

    None if it has no device, or does not tell. As fresh as its last heartbeat.
    """
    report = report_of(ws)
    if report is None:
        return None
    used, total = report.get("used_nbytes"), report.get("total_nbytes")
    return (total - used, total) if isinstance(used, int) and isinstance(total, int) else None


class DeviceTotals:
    """Sums over the devices of a cluster; what those did that are gone stays in the counts."""

    def __init__(self) -> None:
        # Of each device that there was: one may miss a report, and come back. Of many, all that are gone for
        # long are one.
        self._last: dict[str, DeviceUsage] = {}

    def of(self, workers: Iterable[WorkerState]) -> tuple[Metrics, Metrics]:
        """Return counters and gauges by name, each with what it means; none without devices.

        What a device did between the last look at it and its end is not counted.
        """
        reports = [report for report in map(report_of, workers) if report is not None]
        present = {
            str(report.get("id")): DeviceUsage(*(report.get(name, 0) for name in _NAMES))
            for report in reports
        }
        gone = {
            name: replace(usage, used_nbytes=0) for name, usage in self._last.items() if name not in present
        }
        long_gone = [name for name in gone if name != _LONG_GONE][:-_GONE]
        if long_gone:
            summed = [gone.pop(name) for name in (*long_gone, _LONG_GONE) if name in gone]
            gone[_LONG_GONE] = reduce(DeviceUsage.plus, summed)
        self._last = gone | present
        if not self._last:
            return {}, {}
        total = reduce(DeviceUsage.plus, self._last.values())
        counters = {shown: (told, float(getattr(total, name))) for name, (shown, told) in _COUNTED.items()}
        there_is = sum(report.get("total_nbytes", 0) for report in reports)
        gauges: Metrics = {
            "device_memory_used_bytes": ("Memory of devices that is taken", total.used_nbytes),
            "device_memory_bytes": ("Memory of devices that there is", there_is),
            "device_mean_batch_ops": ("Ops in a call that computed several products", total.mean_batch),
        }
        return counters, gauges
