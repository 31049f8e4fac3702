"""Recordings of the dashboard."""

from __future__ import annotations

from collections import Counter

from ferroflow_dask.dashboard.progress import GraphProgress
from ferroflow_dask.dashboard.recording import Recording

EMPTY = Recording([], 0, [], [], Counter(), GraphProgress(lambda _: 0.0), 0, {}, frozenset(), None)
