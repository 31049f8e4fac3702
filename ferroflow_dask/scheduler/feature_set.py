"""Feature set: the features of one installation, which are on and why others are off."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from dask.typing import Key

from ferroflow_dask import config
from ferroflow_dask.scheduler.changes import FAILURES, Change, Changes
from ferroflow_dask.scheduler.core import Core, Counts, Gauge
from ferroflow_dask.scheduler.features import BUILT_IN, features_on
from ferroflow_dask.scheduler.features.base import Feature

logger = logging.getLogger("ferroflow_dask")


class FeatureSet:
    """Makes the features of an installation, and installs those that are on.

    Parameters
    ----------
    core : Core
    kinds : iterable of type of Feature, optional
        In the order of installation; all if left out.
    states : mapping of str to object, optional
        States of features in the installation before, by name.
    without : collection of str, optional
        Names of features that are off, besides those that the settings switch off.
    """

    def __init__(
        self,
        core: Core,
        kinds: Iterable[type[Feature]] | None = None,
        states: Mapping[str, object] | None = None,
        without: Collection[str] = (),
    ) -> None:
        self._core = core
        self._without = without
        #: Those that are installed; before `install`, all.
        self.features = features_on(core, kinds)
        #: Reasons why others are off, by name.
        self.off: dict[str, str] = {}
        for feature in list(self.features):
            if (state := (states or {}).get(feature.name)) is not None:
                try:
                    feature.inherit(state)
                except FAILURES as error:
                    self._leave_out(feature, error)

    def states(self) -> dict[str, object]:
        """Return the states for the features of the next installation, by name."""
        found: dict[str, object] = {}
        for feature in self.features:
            try:
                found[feature.name] = feature.state()
            except FAILURES:
                logger.warning("ferroflow: the state of %s is lost", feature.name, exc_info=True)
        return found

    def install(self, changes: Changes) -> None:
        """Make the changes of the features that are on, and let them hear of events."""
        for feature in list(self.features):
            try:
                reason = self._reason_off(feature)
                if reason:
                    self._switch_off(feature, reason)
                else:
                    _install(feature, changes)
                    self._core.on.add(feature.name)
            except FAILURES as error:
                self._leave_out(feature, error)
        self._core.hooks.connect(self.features, Feature)

    def _leave_out(self, feature: Feature, error: BaseException) -> None:
        """Switch off a feature of another package that has failed; raise the error of a built-in one."""
        if type(feature) in BUILT_IN:
            raise error
        logger.warning("ferroflow: %s is not available", feature.name, exc_info=error)
        self._switch_off(feature, f"it has failed: {error!r}")

    def _switch_off(self, feature: Feature, reason: str) -> None:
        self.features.remove(feature)
        self.off[feature.name] = reason

    def _reason_off(self, feature: Feature) -> str:
        if feature.name in self._without:
            return "it was installed without"
        if not config.is_on(feature.name):
            return f"the setting ferroflow.features.{feature.name} is false"
        for needed in feature.needs:
            if needed in self.off:
                return f"it needs {needed}, which is off"
        return feature.unavailable()

    def counts(self) -> dict[str, Counts]:
        """Return the counts of the features, by name."""
        found = {one.name: Counts(one.summary, "what", one.counts()) for one in self.features}
        return {name: counts for name, counts in found.items() if counts.values}

    def gauges(self) -> dict[str, Gauge]:
        """Return the learned values of the features, by name."""
        return {name: gauge for one in self.features for name, gauge in one.gauges().items()}

    def pending(self) -> list[Key]:
        """Return the tasks that features keep account of."""
        return [key for one in self.features for key in one.pending()]


def _install(feature: Feature, changes: Changes) -> None:
    made: list[Change] = []
    try:
        tuple(feature.watches()), feature.placed  # `Hooks` reads them, where a failure concerns all features
        for change in feature.changes():
            changes.make(change)
            made.append(change)
    except FAILURES:
        for change in reversed(made):
            changes.undo(change)
        raise
