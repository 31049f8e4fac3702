"""Bundles: the short tasks of a graph that arrives run together in one task.

The scheduler's part is `ferroflow_dask.scheduler.graphs`. It belongs to the core of the plugin, since other
features use it, too. Without this feature nothing of it is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ferroflow_dask.scheduler.changes import Change
from ferroflow_dask.scheduler.features.base import Feature


class Bundles(Feature):
    """Bundles the graphs of all clients."""

    name = "bundles"
    summary = "Short tasks of a graph run together in one task"
    parts = ("bundling", "scheduler/graphs")

    def changes(self) -> Iterable[Change]:
        """Bundle graphs from now on."""
        return self.core.parts().graphs.changes()

    def counts(self) -> Mapping[str, int]:
        """Return the numbers of bundles by outcome."""
        return self.core.parts().graphs.bundles.counts
