"""Scheduler plugin: connects distributed's scheduler to a policy."""

from ferroflow_dask.scheduler.cost_model import learned_in_this_process, threads_in_this_process
from ferroflow_dask.scheduler.extension import FerroflowStealing, extension_on
from ferroflow_dask.scheduler.installation import (
    check_scheduler,
    check_workers,
    explain,
    install,
    installed,
    learned,
    uninstall,
)
from ferroflow_dask.scheduler.plugin import FerroflowPlugin

__all__ = [
    "FerroflowPlugin",
    "FerroflowStealing",
    "check_scheduler",
    "check_workers",
    "explain",
    "extension_on",
    "install",
    "installed",
    "learned",
    "learned_in_this_process",
    "threads_in_this_process",
    "uninstall",
]
