"""Queue depth: how many queued root tasks each worker gets beyond those that its threads run.

Dask sends a worker a fixed number of tasks per thread (`distributed.scheduler.worker-saturation`). A thread
that has finished waits a round trip for its next task, which for short tasks is most of the time. So each
thread gets as many tasks as run in one round trip; for long tasks that is Dask's number. Dask's queue saves
memory, and still does: only tasks whose results stay in memory anyway are sent early, up to a number of
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.cost_model import Learned

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: Dask's default of `distributed.scheduler.worker-saturation`.
_DASKS = 1.1
#: Bounds of a round trip [s]; a worker with a longer one was paused.
_SHORTEST_S, _LONGEST_S = 1e-4, 0.05
#: Time of a worker between two tasks that it has [s].
_BETWEEN_TASKS_S = 5e-4
#: Weight of a new sample in the mean round trip.
_WEIGHT = 0.1
#: Most tasks per thread that are sent beyond the running one, and most bytes of their results [B].
_MOST_AHEAD = 32
_MOST_AHEAD_NBYTES = 2**24


class QueueDepth:
    """Sets the number of queued tasks that each worker gets, by the duration of the next one.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    learned : Learned
        Durations, sizes and the round trip; the latter is learned here.
    guess_s : float
        The round trip until one is measured [s].
    suspects : collection of Key
        While there are any, the number is Dask's: see `Deaths`.
    """

    def __init__(
        self, scheduler: Scheduler, learned: Learned, guess_s: float, suspects: Collection[Key]
    ) -> None:
        self._scheduler = scheduler
        self._suspects = suspects
        self._learned = learned
        self._configured = self._set = scheduler.WORKER_SATURATION
        # A configured number is the user's decision.
        self._is_ours = self._configured == _DASKS
        self._guess_s = guess_s
        #: Whether the number is higher than Dask's.
        self.is_raised = False
        # The end of each thread's last task, by the worker's clock.
        self._stopped_s: dict[tuple[str, int], float] = {}

    @property
    def round_trip_s(self) -> float:
        """Time from the end of a task to the start of the next one that is sent for it [s]."""
        known_s = self._learned.round_trip_s
        return self._guess_s if known_s is None else known_s

    def finished(
        self, ts: TaskState, thread: tuple[str, int], start_s: float, stop_s: float, has_waited: bool = True
    ) -> None:
        """Learn the round trip from a task that finished.

        Parameters
        ----------
        ts : distributed.scheduler.TaskState
        thread : tuple of str and int
            A worker and its thread.
        start_s, stop_s : float
            By the worker's clock [s].
        has_waited : bool, optional
            Whether the task was sent after the thread had finished the one before.
        """
        stopped_s = self._stopped_s.get(thread)
        self._stopped_s[thread] = stop_s
        if stopped_s is None or not has_waited or not self._scheduler.queued:
            return
        gap_s = start_s - stopped_s - _BETWEEN_TASKS_S
        if gap_s <= _BETWEEN_TASKS_S:
            return
        # The thread ran the tasks that it had during a part of the round trip, and waited for the rest.
        sample_s = gap_s + self._n_ahead(thread[0]) * max(0.0, ts.prefix.duration_average)
        if sample_s <= _LONGEST_S:
            before_s = self.round_trip_s
            self._learned.round_trip_s = max(before_s + _WEIGHT * (sample_s - before_s), _SHORTEST_S)

    def _n_ahead(self, worker: str) -> float:
        """Return the mean number of tasks per thread of a worker beyond the running one."""
        ws = self._scheduler.workers.get(worker)
        return math.ceil(self._set * ws.nthreads) / ws.nthreads - 1 if ws is not None else 0.0

    def left(self, worker: str) -> None:
        """Forget a worker."""
        for thread in [thread for thread in self._stopped_s if thread[0] == worker]:
            del self._stopped_s[thread]

    @property
    def is_wrong(self) -> bool:
        """Whether `adapt` would change the number."""
        if not self._is_ours:
            return False
        queued = self._scheduler.queued
        if queued:
            # Long tasks, which are most, need no further look.
            round_trip_s = self._learned.round_trip_s
            longest_s = self._guess_s if round_trip_s is None else round_trip_s
            if 0 <= queued.peek().prefix.duration_average <= longest_s:
                return self._wanted() != self._set
        return self.is_raised

    def adapt(self, now: float) -> None:
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
            stimulus_id = f"ferroflow-slots-{now}"
            _distributed.slots_may_have_opened(
                scheduler, *scheduler.workers.values(), stimulus_id=stimulus_id
            )

    def _wanted(self) -> float:
        scheduler = self._scheduler
        ahead = self._ahead(scheduler.queued.peek()) if scheduler.queued and not self._suspects else 0
        return max(self._configured, 1 + ahead) if ahead else self._configured

    def _ahead(self, ts: TaskState) -> int:
        # A task behind a long one cannot run elsewhere at once.
        duration_s = ts.prefix.duration_average
        if duration_s < 0 or duration_s > self.round_trip_s:
            return 0
        # Whole tasks, so that small changes of the mean change nothing.
        ahead = min(_MOST_AHEAD, math.ceil(self.round_trip_s / max(duration_s, _SHORTEST_S)))
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
