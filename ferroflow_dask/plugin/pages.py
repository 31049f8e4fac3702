"""Our page on the scheduler's dashboard comes and goes with the plugin."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger("ferroflow_dask")

#: Imported by a scheduler that has a dashboard.
_DASHBOARD = "distributed.dashboard.scheduler"


def show(scheduler: Scheduler) -> None:
    """Add the page, where there is a dashboard; whatever goes wrong, scheduling goes on."""
    if _DASHBOARD in sys.modules and hasattr(scheduler, "http_application"):
        try:
            from ferroflow_dask.dashboard.pages import show_pages

            show_pages(scheduler)
        except Exception:
            logger.warning("ferroflow's page is not on the dashboard", exc_info=True)


def hide(scheduler: Scheduler) -> None:
    """Take the page away."""
    if "ferroflow_dask.dashboard.pages" in sys.modules:
        try:
            from ferroflow_dask.dashboard.pages import hide_pages

            hide_pages(scheduler)
        except Exception:
            logger.warning("ferroflow's page stays on the dashboard", exc_info=True)
