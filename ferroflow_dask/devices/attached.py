"""The devices of this process: which of its workers has one."""

from __future__ import annotations

from ferroflow_dask.device_reports import DeviceUsage
from ferroflow_dask.devices.runner import DeviceRunner
from ferroflow_dask.devices.spilling import tell_dask_cuda

#: By the worker's id. A process may have several workers: in tests, and where no processes are asked for.
_runners: dict[str, DeviceRunner] = {}


def attach(worker: str, runner: DeviceRunner) -> None:
    """Let the ops of a worker run on a device."""
    tell_dask_cuda()
    _runners[worker] = runner


def detach(worker: str) -> None:
    """Let the ops of a worker run on the host again."""
    runner = _runners.pop(worker, None)
    if runner is not None:
        runner.close()


def attached(worker: str | None = None) -> DeviceRunner | None:
    """Return the device of a worker, any of this process if none is named; None if there is none."""
    if not _runners:
        return None
    return next(iter(_runners.values())) if worker is None else _runners.get(worker)


def drain() -> None:
    """Wait for all work on this process's devices, and account for it."""
    for runner in list(_runners.values()):
        runner.drain()


def usage_here() -> DeviceUsage:
    """Return what was done on this process's devices."""
    total = DeviceUsage()
    for runner in list(_runners.values()):
        total = total.plus(runner.usage())
    return total
