"""Registration of the dashboard page: an entry point that the scheduler plugin loads when it is installed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ferroflow_dask.scheduler.changes import CallChange, Change

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: distributed imports this module on a scheduler that has a dashboard.
_DASHBOARD = "distributed.dashboard.scheduler"


def pages_change(scheduler: Scheduler) -> Change:
    """Return the change that adds the page to a scheduler's dashboard, if it has one."""

    def show() -> None:
        if _DASHBOARD in sys.modules and hasattr(scheduler, "http_application"):
            from ferroflow_dask.dashboard.pages import show_pages

            show_pages(scheduler)

    def hide() -> None:
        if "ferroflow_dask.dashboard.pages" in sys.modules and hasattr(scheduler, "http_application"):
            from ferroflow_dask.dashboard.pages import hide_pages

            hide_pages(scheduler)

    return CallChange("dashboard page", show, hide)
