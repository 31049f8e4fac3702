"""Queue depth: how many queued root tasks each worker gets beyond those that its threads run.

Dask sends a worker a fixed number of tasks per thread (`distributed.scheduler.worker-saturation`). A thread
that has finished waits a round trip for its next task, which for short tasks is most of the time. So each
thread gets as many tasks as run in one round trip; for long tasks that is Dask's number. Dask's queue saves
memory, and still does: only tasks whose results stay in memory anyway are sent early, up to a number of
bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.cost_model import Learned

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: What Dask sends where nothing else is configured.
_DASKS = 1.1
#: Round trips outside of this are no messages' [s]: a worker paused.
_SHORTEST_S, _LONGEST_S = 1e-4, 0.05
#: What a worker takes between two tasks that it has [s].
_BETWEEN_TASKS_S = 5e-4
#: Tasks of a thread that are sent ahead and do no harm, however much too long a round trip is taken for.
_FEW = 2
#: Part of what a round trip was taken for that is tried next, where threads have not waited.
_PROBED = 0.9
#: Part of a new sample in the mean round trip.
_WEIGHT = 0.1
#: Tasks of a thread that are sent ahead at most, and the bytes of their results [B].
_MOST_AHEAD = 32
_MOST_AHEAD_NBYTES = 2**24


class QueueDepth:
    """Sets how many queued tasks each worker is sent, by the length of the tasks at hand.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    learned : Learned
        Durations, sizes and the round trip; the latter is learned here.
    guess_s : float
        The round trip until one is measured [s].
    """

    def __init__(self, scheduler: Scheduler, learned: Learned, guess_s: float) -> None:
        self._scheduler = scheduler
        self._learned = learned
        self._configured = self._set = scheduler.WORKER_SATURATION
        # Another number than Dask's own is somebody's decision.
        self._is_ours = self._configured == _DASKS
        self._guess_s = guess_s
        # When a thread ended its last task, by its worker's clock.
        self._stopped_s: dict[tuple[str, int], float] = {}
        # Tasks of a thread since one has waited.
        self._n_in_a_row: dict[tuple[str, int], int] = {}

    @property
    def round_trip_s(self) -> float:
        """From the end of a task to the start of the next one that is sent for it [s]."""
        known_s = self._learned.round_trip_s
        return self._guess_s if known_s is None else known_s

    def finished(
        self, ts: TaskState, thread: tuple[str, int], start_s: float, stop_s: float, has_waited: bool = True
    ) -> None:
        """Learn from a task that ended.

        Parameters
        ----------
        ts : distributed.scheduler.TaskState
        thread : tuple of str and int
            A worker and its thread.
        start_s, stop_s : float
            By the worker's clock [s].
        has_waited : bool, optional
            Whether the thread was sent the task after it had ended the one before.
        """
        stopped_s = self._stopped_s.get(thread)
        self._stopped_s[thread] = stop_s
        if stopped_s is None or not has_waited or not self._scheduler.queued:
            return
        gap_s = start_s - stopped_s - _BETWEEN_TASKS_S
        n_ahead = self._n_ahead(thread[0])
        if gap_s > _BETWEEN_TASKS_S:
            # What the thread has waited for, beyond the tasks that it had for the time.
            self._n_in_a_row[thread] = 0
            self._learn(gap_s + n_ahead * max(0.0, ts.prefix.duration_average))
            return
        # A thread that has too few tasks ahead waits for one of them, and the others come while that runs.
        # Where it has not waited for long, a round trip may be shorter.
        n_in_a_row = self._n_in_a_row[thread] = self._n_in_a_row.get(thread, 0) + 1
        if n_in_a_row > 2 * (n_ahead + 1) and n_ahead > _FEW:
            self._n_in_a_row[thread] = 0
            self._learn(_PROBED * self.round_trip_s)

    def _learn(self, sample_s: float) -> None:
        if sample_s <= _LONGEST_S:
            before_s = self.round_trip_s
            self._learned.round_trip_s = max(before_s + _WEIGHT * (sample_s - before_s), _SHORTEST_S)

    def _n_ahead(self, worker: str) -> float:
        """Return how many tasks a thread of a worker has beyond the one that it runs, on average."""
        ws = self._scheduler.workers.get(worker)
        return math.ceil(self._set * ws.nthreads) / ws.nthreads - 1 if ws is not None else 0.0

    def left(self, worker: str) -> None:
        """Forget a worker."""
        for thread in [thread for thread in self._stopped_s if thread[0] == worker]:
            del self._stopped_s[thread]
            self._n_in_a_row.pop(thread, None)

    def adapt(self, now: float) -> None:
        """Send as many tasks ahead as the first in the queue asks for; not within a transition.

        Without a queue that is Dask's number, for what comes next may be long, or large.
        """
        scheduler = self._scheduler
        if self._set != scheduler.WORKER_SATURATION:
            self._is_ours = False  # whoever changed it has a reason
        if not self._is_ours:
            return
        ahead = self._ahead(scheduler.queued.peek()) if scheduler.queued else 0
        wanted = max(self._configured, 1 + ahead) if ahead else self._configured
        if wanted != self._set:
            self._set = scheduler.WORKER_SATURATION = wanted
            stimulus_id = f"ferroflow-slots-{now}"
            _distributed.slots_may_have_opened(
                scheduler, *scheduler.workers.values(), stimulus_id=stimulus_id
            )

    def _ahead(self, ts: TaskState) -> int:
        # What waits behind a long task cannot run elsewhere at once.
        duration_s, nbytes = self._learned.costs.longest_but_one(ts) or (_LONGEST_S, 0.0)
        if duration_s > self.round_trip_s:
            return 0
        # Whole tasks, so that a mean that wavers changes nothing most of the time.
        ahead = min(_MOST_AHEAD, math.ceil(self.round_trip_s / max(duration_s, _SHORTEST_S)))
        # What is used soon must not be made faster than it is used, or results pile up.
        if _distributed.is_used_soon(ts, ahead):
            return 0
        return min(ahead, int(_MOST_AHEAD_NBYTES / nbytes)) if nbytes > 0 else ahead

    def restore(self) -> None:
        """Leave the scheduler as it was configured."""
        scheduler = self._scheduler
        if self._set == scheduler.WORKER_SATURATION != self._configured:
            scheduler.WORKER_SATURATION = self._configured
            # Who has more than that now must not be counted among those that can be sent more.
            for ws in scheduler.workers.values():
                _distributed.check_idle(scheduler, ws)
            scheduler.loop.add_callback(
                lambda: _distributed.slots_may_have_opened(scheduler, stimulus_id="ferroflow-slots-restored")
            )
