"""Scheduler plugin: connects distributed's scheduler to a policy."""

from ferroflow_dask.scheduler.extension import extension_on
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
    "check_scheduler",
    "check_workers",
    "explain",
    "extension_on",
    "install",
    "installed",
    "learned",
    "uninstall",
]
