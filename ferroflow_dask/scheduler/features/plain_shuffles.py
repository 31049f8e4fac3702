"""Plain shuffles: a P2P shuffle of little data becomes plain tasks, which can be bundled.

`ferroflow_dask.bundling.small_shuffles` decides it when a graph is planned.
"""

from __future__ import annotations

from ferroflow_dask.scheduler.features.base import Feature


class PlainShuffles(Feature):
    """Switch of a step of `rewrite`."""

    name = "plain_shuffles"
    summary = "P2P shuffles of little data become plain tasks"
    parts = ("bundling/small_shuffles",)
    needs = ("bundles",)
