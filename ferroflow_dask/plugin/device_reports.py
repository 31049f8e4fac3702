"""What workers tell of their devices with each heartbeat: written there, and read on the scheduler."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from ferroflow_dask.devices import DeviceRunner, DeviceUsage

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.scheduler import WorkerState

#: Among the metrics of a worker, as long as it has its device.
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
_NAMES = tuple(field.name for field in fields(DeviceUsage))

#: Devices that are gone and known one by one, and the name of all the others.
_GONE = 64
_LONG_GONE = ""

#: Like those of the shell: what each name means, and its value.
Shown = dict[str, tuple[str, float]]


def reporting(runner: DeviceRunner) -> Callable[[Worker], dict[str, Any]]:
    """Return what tells a worker's heartbeats of its device.

    That is `DeviceUsage` by name, `total_nbytes`, the memory that there is [B], and `id`, which stands for
    this device and these counts: after a restart, both are others.
    """
    name = uuid.uuid4().hex

    def report(_: Worker) -> dict[str, Any]:
        return {"id": name, "total_nbytes": runner.device.total_nbytes(), **asdict(runner.usage())}

    return report


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

    def of(self, workers: Iterable[WorkerState]) -> tuple[Shown, Shown]:
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
        gauges: Shown = {
            "device_memory_used_bytes": ("Memory of devices that is taken", total.used_nbytes),
            "device_memory_bytes": ("Memory of devices that there is", there_is),
            "device_mean_batch_ops": ("Ops in a call that computed several products", total.mean_batch),
        }
        return counters, gauges
