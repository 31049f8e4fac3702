"""The plugin for distributed's scheduler: a shell around a policy."""

from ferroflow_dask.plugin.devices import (
    GPU_RESOURCE,
    DeviceSpec,
    device_usage,
    gpu_workers,
    has_gpu,
    use_devices,
    use_gpus,
)
from ferroflow_dask.plugin.explain import explain
from ferroflow_dask.plugin.install import (
    FerroflowPlugin,
    check_scheduler,
    check_workers,
    install,
    installed,
    learned,
    uninstall,
)
from ferroflow_dask.plugin.knowledge import learned_in_this_process, threads_in_this_process
from ferroflow_dask.plugin.stealing import FerroflowStealing

__all__ = [
    "GPU_RESOURCE",
    "DeviceSpec",
    "FerroflowPlugin",
    "FerroflowStealing",
    "check_scheduler",
    "check_workers",
    "device_usage",
    "explain",
    "gpu_workers",
    "has_gpu",
    "install",
    "installed",
    "learned",
    "learned_in_this_process",
    "threads_in_this_process",
    "uninstall",
    "use_devices",
    "use_gpus",
]
