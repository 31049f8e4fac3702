"""Registration of the dashboard page: a feature that the scheduler plugin loads by its entry point."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ferroflow_dask.scheduler.changes import CallChange, Change
from ferroflow_dask.scheduler.features.base import Feature

#: distributed imports this module on a scheduler that has a dashboard.
_DASHBOARD = "distributed.dashboard.scheduler"


class Page(Feature):
    """Adds the page to a scheduler's dashboard, if it has one."""

    name = "page"
    summary = "A page of Dask's dashboard shows what the plugin does"
    reason = "shows how the plugin works: `tests/dashboard/test_dashboard.py`"

    def changes(self) -> Iterable[Change]:
        """Show the page."""
        yield CallChange("dashboard page", self._show, self._hide)

    def _show(self) -> None:
        if _DASHBOARD in sys.modules and hasattr(self.core.scheduler, "http_application"):
            from ferroflow_dask.dashboard.pages import show_pages

            show_pages(self.core.scheduler)

    def _hide(self) -> None:
        if "ferroflow_dask.dashboard.pages" in sys.modules and hasattr(
            self.core.scheduler, "http_application"
        ):
            from ferroflow_dask.dashboard.pages import hide_pages

            hide_pages(self.core.scheduler)
