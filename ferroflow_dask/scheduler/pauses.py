"""Pauses of threads between two tasks, from which overheads of the cluster are learned.

A worker reports when each task started and stopped. If the next task of the thread was sent by then, and its
inputs were there, the pause is the worker's time for a task. A longer pause is a round trip if the queue of
the scheduler had tasks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from ferroflow_dask.scheduler.learned import Learned

#: One-way messages from the end of a task to the start of the next, at least.
_MESSAGES = 3
#: Bounds of a round trip [s]; a worker with a longer one was paused.
_SHORTEST_S, _LONGEST_S = 1e-4, 0.05
#: Time of a worker between two tasks that it has [s], in a round trip.
_BETWEEN_TASKS_S = 5e-4
#: The mean pause until one is measured [s].
ASSUMED_S = 1e-3
#: Weight of a new pause in its mean.
_WEIGHT = 0.1
#: A pause counts as so many times the mean at most: something else held the worker up.
_DELAYED = 4.0
#: Only tasks of at most so many mean pauses count: processes that compute for long leave others alone.
_SHORT = 10.0


class Pauses:
    """Learns the time of a worker for a task, and the round trip.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    learned : Learned
    latency_s : float
        Of a message, until a round trip is measured [s].
    """

    def __init__(self, scheduler: Scheduler, learned: Learned, latency_s: float) -> None:
        self._scheduler = scheduler
        self._learned = learned
        #: The round trip until one is measured [s].
        self.guess_s = _MESSAGES * latency_s
        # For each worker and thread: the end of the last task by the worker's clock [s], and the turn of the
        # last task that the worker was given by then.
        self._last: dict[str, dict[int, tuple[float, int]]] = {}

    @property
    def round_trip_s(self) -> float:
        """Time from the end of a task to the start of the next one that is sent for it [s]."""
        known_s = self._learned.round_trip_s
        return self.guess_s if known_s is None else known_s

    def task_ran(
        self, ts: TaskState, worker: str, thread: int, span_s: tuple[float, float], turns: tuple[int, int]
    ) -> None:
        """Learn from a task that a thread has finished.

        Parameters
        ----------
        ts : distributed.scheduler.TaskState
        worker : str
        thread : int
        span_s : tuple of float
            Its start and stop by the worker's clock [s].
        turns : tuple of int
            When it was sent, and when the worker was last given a task, as `WorkerView.turn` counts. The
            former is -1 for a task that waited for its inputs, or was sent before they existed.
        """
        ws = self._scheduler.workers.get(worker)
        if ws is None:
            return
        (start_s, stop_s), (sent, given) = span_s, turns
        of_threads = self._last.setdefault(worker, {})
        before = of_threads.get(thread)
        of_threads[thread] = stop_s, given
        if before is None or sent < 0:
            return
        pause_s, duration_s = start_s - before[0], stop_s - start_s
        if sent <= before[1]:
            mean_s = self._learned.pause_s
            if mean_s is None:
                mean_s = ASSUMED_S
            usual_s = ASSUMED_S if mean_s < ASSUMED_S else mean_s
            # No functions are called here: each task comes this way.
            if pause_s >= 0 and duration_s <= _SHORT * usual_s:
                most_s = _DELAYED * usual_s
                self._learned.pause_s = mean_s + _WEIGHT * (
                    (most_s if pause_s > most_s else pause_s) - mean_s
                )
        waited_s = pause_s - _BETWEEN_TASKS_S
        if self._scheduler.queued and waited_s > _BETWEEN_TASKS_S:
            # The thread ran the tasks that it had during a part of the round trip, and waited for the rest.
            n_ahead = math.ceil(self._scheduler.WORKER_SATURATION * ws.nthreads) / ws.nthreads - 1
            sample_s = waited_s + n_ahead * max(0.0, ts.prefix.duration_average)
            if sample_s <= _LONGEST_S:
                before_s = self.round_trip_s
                self._learned.round_trip_s = max(before_s + _WEIGHT * (sample_s - before_s), _SHORTEST_S)

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return what was learned, by name."""
        return {
            "round_trip_seconds": ("From the end of a task to the next one sent", self.round_trip_s),
            "pause_seconds": (
                "From the end of a task to the next one on its worker",
                self._learned.pause_s or 0.0,
            ),
        }

    def remove_worker(self, address: str) -> None:
        """Forget a worker."""
        self._last.pop(address, None)
