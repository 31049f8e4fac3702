"""Sharing: a graph reads values inside the bundles of earlier graphs, which then return them, too.

`ferroflow_dask.bundling.sharing` finds them when a graph is planned. Without it such a task runs again.
"""

from __future__ import annotations

from ferroflow_dask.scheduler.features.base import Feature


class Sharing(Feature):
    """Switch of a step of `rewrite`."""

    name = "sharing"
    summary = "Graphs read values inside the bundles of earlier graphs"
    reason = "a task that two graphs have runs once, as in Dask: `tests/scheduler/test_shared_bundles.py`"
    parts = ("bundling/sharing",)
    needs = ("bundles",)
