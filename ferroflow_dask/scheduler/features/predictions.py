"""Predictions: the duration that each graph was cut for is compared with the real one.

The real durations are learned, too: if the same graph comes again and again, they choose its cut. The mean
ratio of real and predicted durations corrects later predictions; it is the same for all cuts.

A graph counts if it has the cluster for itself from the creation of its tasks to its last result.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from dask.typing import Key
from dask.utils import format_time, key_split

from ferroflow_dask.bundling.predict import Prediction
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.hooks import Watch

logger = logging.getLogger("ferroflow_dask")

#: The log says so once if graphs take so many times as long as predicted in the mean.
_LONG = 2.0
#: Shorter graphs do not count: messages are a large part of them [s].
_SHORTEST_S = 0.2
#: Bounds of the predicted divided by the real duration, and the names of the classes between them.
_BOUNDS = (0.5, 0.7, 1.4, 2.0)
_CLASSES = ("below_0.5", "0.5_to_0.7", "0.7_to_1.4", "1.4_to_2", "above_2")
#: Prefixes that the log names.
_PREFIXES = 3
#: States in which a client waits for a task no longer.
_HAS_RUN = frozenset({"memory", "erred"})
_ENDED = _HAS_RUN | {"released", "forgotten"}


@dataclass(slots=True, eq=False)
class _Run:
    """A graph whose results do not all exist yet.

    Parameters
    ----------
    key : Key
        One of its results.
    prediction : Prediction
        Corrected.
    start_s : float
        When its tasks were created [s].
    missing : set of Key
        The results that do not exist yet.
    counts : bool
        Whether it has had the cluster for itself, and no result was lost.
    prefixes : tuple of str
        Those with most tasks, for the log; none if it says no more.
    """

    key: Key
    prediction: Prediction
    start_s: float
    missing: set[Key]
    counts: bool
    prefixes: tuple[str, ...]


class Predictions(Feature):
    """Counts the graphs by the ratio of predicted and real duration."""

    name = "predictions"
    summary = "Predicted durations of graphs are compared with real ones"
    reason = "shows whether graphs are cut by true numbers: `tests/scheduler/test_predictions.py`"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._scheduler = core.scheduler
        self._runs: dict[Key, _Run] = {}
        self._counts = dict.fromkeys(_CLASSES, 0)
        self._has_warned = False

    def watches(self) -> Iterable[Watch]:
        """Return the results that do not exist yet."""
        return (Watch(self._runs, by_key=True, changed=self._changed),)

    def counts(self) -> Mapping[str, int]:
        """Return the number of graphs in each class."""
        return self._counts

    def pending(self) -> Collection[Key]:
        """Return the results that do not exist yet."""
        return self._runs.keys()

    def restart(self) -> None:
        """Forget all graphs."""
        self._runs.clear()

    def update_graph(self) -> None:
        """Begin with a graph, if it has the cluster for itself."""
        for run in {*self._runs.values()}:
            run.counts = False
        plan = self.core.parts().graphs.planned()
        if plan is None or plan.prediction is None:
            return
        self.core.learned.repeats.started(plan.prediction.shape, plan.prediction.cut)
        scheduler, wanted = self._scheduler, plan.graph.wanted
        known = ((key, scheduler.tasks.get(key)) for key in wanted)
        missing = {key for key, ts in known if ts is not None and ts.state not in _HAS_RUN}
        if not missing:
            return
        is_busy = bool(scheduler.queued) or any(ws.processing for ws in scheduler.workers.values())
        corrected_s = plan.prediction.makespan_s * self.core.learned.excess
        prediction = replace(plan.prediction, makespan_s=corrected_s)
        prefixes = () if self._has_warned else _main_prefixes(plan.graph.tasks)
        run = _Run(min(missing, key=str), prediction, self.core.clock(), missing, not is_busy, prefixes)
        self._runs |= dict.fromkeys(missing, run)

    def _changed(self, key: Key, _: str, finish: str) -> None:
        if finish not in _ENDED:
            return
        run = self._runs.pop(key)
        run.missing.discard(key)
        run.counts &= finish == "memory"
        if not run.missing and run.counts:
            self._ended(run)

    def _ended(self, run: _Run) -> None:
        taken_s, predicted_s = self.core.clock() - run.start_s, run.prediction.makespan_s
        repeats, shape = self.core.learned.repeats, run.prediction.shape
        if taken_s >= _SHORTEST_S or shape in repeats:
            repeats.record(shape, run.prediction.cut, taken_s)
        if taken_s >= _SHORTEST_S:
            self._counts[_CLASSES[bisect(_BOUNDS, predicted_s / taken_s)]] += 1
            if predicted_s > 0:
                self._learn(taken_s / predicted_s, run.prefixes)
        n, predicted, taken = run.prediction.n_tasks, format_time(predicted_s), format_time(taken_s)
        reason = f"{predicted} in {n} tasks ({run.prediction.cut}); its graph took {taken}"
        self.core.decisions.note(run.key, "predicted", "", reason)

    def _learn(self, excess: float, prefixes: tuple[str, ...]) -> None:
        learned = self.core.learned
        learned.record_excess(excess)
        if learned.excess > _LONG and not self._has_warned:
            self._has_warned = True
            message = "ferroflow: graphs take %.1f times as long as predicted; the last one has tasks of %s"
            logger.warning(message, learned.excess, ", ".join(prefixes))


def _main_prefixes(keys: Iterable[Key]) -> tuple[str, ...]:
    """Return the prefixes of most tasks."""
    return tuple(name for name, _ in Counter(map(key_split, keys)).most_common(_PREFIXES))
