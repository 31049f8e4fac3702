"""Features of the plugin: the list, in the order in which they are installed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import entry_points

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.scheduler.changes import FAILURES
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.features.bundles import Bundles
from ferroflow_dask.scheduler.features.client_plans import ClientPlans
from ferroflow_dask.scheduler.features.inlined_results import InlinedResults
from ferroflow_dask.scheduler.features.kept_numbers import KeptNumbers
from ferroflow_dask.scheduler.features.lean_transitions import LeanTransitions
from ferroflow_dask.scheduler.features.low_latency_messages import LowLatencyMessages
from ferroflow_dask.scheduler.features.metrics import Metrics
from ferroflow_dask.scheduler.features.paused_workers import PausedWorkers
from ferroflow_dask.scheduler.features.plain_shuffles import PlainShuffles
from ferroflow_dask.scheduler.features.policy_watch import PolicyWatch
from ferroflow_dask.scheduler.features.predictions import Predictions
from ferroflow_dask.scheduler.features.prefetch import Prefetch
from ferroflow_dask.scheduler.features.queue_depth import QueueDepth
from ferroflow_dask.scheduler.features.samples import Samples
from ferroflow_dask.scheduler.features.scattered_replicas import ScatteredReplicas
from ferroflow_dask.scheduler.features.sharing import Sharing
from ferroflow_dask.scheduler.features.siblings import Siblings
from ferroflow_dask.scheduler.features.stages import Stages
from ferroflow_dask.scheduler.features.working_sets import WorkingSets

logger = logging.getLogger("ferroflow_dask")

#: Entry points through which other packages, and our dashboard, add features. Each is a class.
ENTRY_POINT_GROUP = "ferroflow_dask.features"

BUILT_IN: tuple[type[Feature], ...] = (
    QueueDepth,
    LeanTransitions,
    Siblings,  # after the lean transitions, which stay off if a function of theirs is changed already
    PolicyWatch,
    InlinedResults,
    Prefetch,
    Bundles,
    PlainShuffles,
    Stages,
    Samples,
    Sharing,
    LowLatencyMessages,
    ClientPlans,
    ScatteredReplicas,
    PausedWorkers,
    WorkingSets,
    Predictions,
    KeptNumbers,
    Metrics,
)
#: Those that work in virtual time, in which a policy takes none.
VIRTUAL: tuple[type[Feature], ...] = (
    QueueDepth,
    LeanTransitions,
    Siblings,
    InlinedResults,
    Prefetch,
    PausedWorkers,
    WorkingSets,
)


def check_names(names: object) -> tuple[str, ...]:
    """Return the names of features that an installation is without, or raise `UsageError`."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise UsageError(
            f"without must be names of features, got {names!r}; install(client, without=['prefetch'])"
        )
    found = tuple(names)
    known = [kind.name for kind in found_features()] if found else []
    for name in found:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"without must name features, got {name!r}; {advice}")
    return found


def found_features() -> list[type[Feature]]:
    """Return the built-in features, and those of other packages that can be loaded."""
    features = list(BUILT_IN)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            kind = point.load()
            if not (isinstance(kind, type) and issubclass(kind, Feature)):
                raise TypeError(f"{point.name} must be a class derived from Feature, got {kind!r}")
            if not all(isinstance(getattr(kind, name, None), str) for name in ("name", "summary")):
                raise TypeError(f"{point.name} must have a name and a summary, which are str")
            features.append(kind)
        except FAILURES:
            logger.warning("ferroflow: %s is not available", point.name, exc_info=True)
    return features


def features_on(core: Core, kinds: Iterable[type[Feature]] | None = None) -> list[Feature]:
    """Return a feature of each kind that can be made; of all that are found if `kinds` is left out."""
    features = []
    for kind in found_features() if kinds is None else kinds:
        try:
            features.append(kind(core))
        except FAILURES:
            if kind in BUILT_IN:
                raise
            logger.warning("ferroflow: %s is not available", kind.name, exc_info=True)
    return features
