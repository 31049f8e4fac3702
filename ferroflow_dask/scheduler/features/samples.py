"""Samples: some tasks of a graph run first if their durations are unknown.

`ferroflow_dask.bundling.rewrite` chooses them. The rest of the graph is planned when they have ended.
"""

from __future__ import annotations

from ferroflow_dask.scheduler.features.base import Feature


class Samples(Feature):
    """Switch of a step of `rewrite`."""

    name = "samples"
    summary = "Some tasks of unknown duration run before their graph is cut"
    parts = ("bundling/sample",)
    needs = ("bundles",)
