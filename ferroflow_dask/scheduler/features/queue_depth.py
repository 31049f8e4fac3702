"""Queue depth: how many queued root tasks each worker gets beyond those that its threads run.

Dask sends a worker a fixed number of tasks per thread (`distributed.scheduler.worker-saturation`). A thread
that has finished waits a round trip for its next task, which for short tasks is most of the time. So each
thread gets as many tasks as run in one round trip; for long tasks that is Dask's number. Dask's queue saves
memory, and still does: only tasks whose results stay in memory anyway are sent early, up to a number of
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import CallChange, Change
from ferroflow_dask.scheduler.core import Core, Gauge
from ferroflow_dask.scheduler.features.base import Feature

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Dask's default of `distributed.scheduler.worker-saturation`.
_DASKS = 1.1
#: No task is shorter [s].
_SHORTEST_S = 1e-4
#: Most tasks per thread that are sent beyond the running one, and most bytes of their results [B].
_MOST_AHEAD = 32
_MOST_AHEAD_NBYTES = 2**24


class QueueDepth(Feature):
    """Sets the number of queued tasks that each worker gets, by the duration of the next one.

    While a worker's death is examined, the number is Dask's: see `Deaths`.
    """

    name = "queue_depth"
    summary = "Each thread gets as many queued tasks as run in one round trip"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._scheduler = core.scheduler
        self._learned = core.learned
        self._configured = self._set = core.scheduler.WORKER_SATURATION
        # A configured number is the user's decision.
        self._is_ours = self._configured == _DASKS
        self._pauses = core.pauses
        #: Whether the number is higher than Dask's.
        self.is_raised = False

    def changes(self) -> Iterable[Change]:
        """Set the number from now on."""
        yield CallChange("Scheduler.WORKER_SATURATION", lambda: None, self.restore)

    def gauges(self) -> Mapping[str, Gauge]:
        """Return the number."""
        return {"slots_per_thread": ("Queued tasks sent to each thread", self._scheduler.WORKER_SATURATION)}

    def wants_pass(self) -> bool:
        """Return whether `adapt` would change the number."""
        if not self._is_ours:
            return False
        queued = self._scheduler.queued
        if queued:
            # Long tasks, which are most, need no further look.
            round_trip_s = self._learned.round_trip_s
            longest_s = self._pauses.guess_s if round_trip_s is None else round_trip_s
            if 0 <= queued.peek().prefix.duration_average <= longest_s:
                return self._wanted() != self._set
        return self.is_raised

    def update_graph(self) -> None:
        """Set the number before the first tasks of a graph are queued."""
        if not self._scheduler.queued:
            self.adapt()

    def in_pass(self) -> None:
        """Set the number by the tasks that are queued now."""
        if self._scheduler.queued or self.is_raised:
            self.adapt()

    def adapt(self) -> None:
        """Set the number by the first task of the queue; must not be called within a transition.

        Without a queue it is Dask's number: the next tasks may be long, or have large results.
        """
        scheduler = self._scheduler
        if self._set != scheduler.WORKER_SATURATION:
            self._is_ours = False  # another plugin has changed it
        if not self._is_ours:
            return
        wanted = self._wanted()
        if wanted != self._set:
            self._set = scheduler.WORKER_SATURATION = wanted
            self.is_raised = wanted != self._configured
            stimulus_id = f"ferroflow-slots-{self.core.clock()}"
            _distributed.slots_may_have_opened(
                scheduler, *scheduler.workers.values(), stimulus_id=stimulus_id
            )

    def _wanted(self) -> float:
        scheduler = self._scheduler
        ahead = self._ahead(scheduler.queued.peek()) if scheduler.queued and not self.core.suspects else 0
        return max(self._configured, 1 + ahead) if ahead else self._configured

    def _ahead(self, ts: TaskState) -> int:
        # A task behind a long one cannot run elsewhere at once.
        duration_s = ts.prefix.duration_average
        if duration_s < 0 or duration_s > self._pauses.round_trip_s:
            return 0
        # Whole tasks, so that small changes of the mean change nothing.
        ahead = min(_MOST_AHEAD, math.ceil(self._pauses.round_trip_s / max(duration_s, _SHORTEST_S)))
        # Results that are read soon must not be made faster than they are read, or they pile up.
        if _distributed.is_used_soon(ts, ahead):
            return 0
        nbytes = self._learned.costs.nbytes(ts)
        return min(ahead, int(_MOST_AHEAD_NBYTES / nbytes)) if nbytes else ahead

    def restore(self) -> None:
        """Set the configured number."""
        scheduler = self._scheduler
        if self._set == scheduler.WORKER_SATURATION != self._configured:
            scheduler.WORKER_SATURATION = self._configured
            # Workers with more tasks than that must leave Dask's set of idle workers.
            for ws in scheduler.workers.values():
                _distributed.check_idle(scheduler, ws)
            scheduler.loop.add_callback(
                lambda: _distributed.slots_may_have_opened(scheduler, stimulus_id="ferroflow-slots-restored")
            )
