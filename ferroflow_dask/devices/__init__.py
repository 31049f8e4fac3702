"""Arrays that stay on a device, and ops that run there: what a device is, and the work that is sent to it."""

import ferroflow_dask.devices.transport  # noqa: F401 -- registers
from ferroflow_dask.device_reports import DeviceUsage
from ferroflow_dask.devices.attached import attach, attached, detach, drain, usage_here
from ferroflow_dask.devices.device import Device
from ferroflow_dask.devices.resident import Resident, host_value
from ferroflow_dask.devices.runner import DeviceRunner
from ferroflow_dask.devices.spilling import is_on_device, register_spilled

__all__ = [
    "Device",
    "DeviceRunner",
    "DeviceUsage",
    "Resident",
    "attach",
    "attached",
    "detach",
    "drain",
    "host_value",
    "is_on_device",
    "register_spilled",
    "usage_here",
]
