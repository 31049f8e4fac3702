"""Features of the plugin: the list, in the order in which they are installed."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points

from ferroflow_dask.scheduler.changes import FAILURES
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.features.low_latency_messages import LowLatencyMessages
from ferroflow_dask.scheduler.features.metrics import Metrics
from ferroflow_dask.scheduler.features.scattered_replicas import ScatteredReplicas

logger = logging.getLogger("ferroflow_dask")

#: Entry points through which other packages, and our dashboard, add features. Each is a class.
ENTRY_POINT_GROUP = "ferroflow_dask.features"

BUILT_IN: tuple[type[Feature], ...] = (LowLatencyMessages, ScatteredReplicas, Metrics)


def features_on(core: Core) -> list[Feature]:
    """Return the built-in features, and those of other packages that can be made."""
    features = [feature(core) for feature in BUILT_IN]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            kind = point.load()
            if not (isinstance(kind, type) and issubclass(kind, Feature)):
                raise TypeError(f"{point.name} must be a class derived from Feature, got {kind!r}")
            features.append(kind(core))
        except FAILURES:
            logger.warning("ferroflow: %s is not available", point.name, exc_info=True)
    return features
