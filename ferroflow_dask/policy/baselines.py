"""Baseline policies: round robin, random placement, and ferroflow's literal stealing rule."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator

import numpy as np

from ferroflow_dask.counts import checked_count
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.policy.base import Policy
from ferroflow_dask.policy.events import (
    Event,
    StealConfirmed,
    StealRefused,
    TaskReady,
    WorkerIdle,
    WorkerLeft,
)
from ferroflow_dask.policy.instructions import AssignTask, DeclineSteal, Instruction, StealTask
from ferroflow_dask.policy.state import TaskView, WorkerKey, WorkerView
from ferroflow_dask.policy.view import ClusterView

#: ferroflow's initial threshold is the number of workers divided by this, at least 1.
_WORKERS_PER_THRESHOLD = 8
#: Steals after which the threshold is reconsidered, and outcomes that are then averaged (ferroflow's values).
_EVERY = 10
_WINDOW = 20
#: Success rates above and below which the threshold moves (ferroflow's values).
_GOOD = 0.7
_BAD = 0.3


class FixedPlacement(Policy):
    """Base of the baselines: places each ready task once, by `choose`, and never corrects it."""

    places_queued = True

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:  # noqa: ARG002 -- timeless
        """Assign a ready task; ignore all other events."""
        if isinstance(event, TaskReady):
            workers = [worker for worker in view.running if event.task.may_run_on(worker.key)]
            if workers:
                position, reason = self.choose(event.task, len(workers))
                yield AssignTask(event.task.key, workers[position].key, reason)

    @abstractmethod
    def choose(self, task: TaskView, n_workers: int) -> tuple[int, str]:
        """Return the position of the worker that gets a task, and the reason."""


class StaticPolicy(FixedPlacement):
    """Give task i to worker i mod P: ferroflow's static baseline."""

    def choose(self, task: TaskView, n_workers: int) -> tuple[int, str]:
        """Return the task's index modulo the number of workers."""
        return task.index % n_workers, f"task {task.index} mod {n_workers} workers"


class RandomPolicy(FixedPlacement):
    """Give each task to a worker drawn from a seeded generator.

    Parameters
    ----------
    seed : int, optional

    Raises
    ------
    UsageError
        The seed is negative or not an integer.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(checked_count("seed", seed))

    def choose(self, task: TaskView, n_workers: int) -> tuple[int, str]:  # noqa: ARG002 -- any task
        """Return a uniformly drawn position."""
        return int(self._rng.integers(n_workers)), "drawn at random"


class RingPolicy(StaticPolicy):
    """ferroflow's own rule: round robin, then an idle worker steals one task of the next one in the ring.

    The rule knows neither costs nor data. Its adaptive threshold counts an attempt that finds nothing as a
    failure, so the end of every run raises it. O(P) per decision.

    Parameters
    ----------
    threshold : int, optional
        Waiting tasks that a victim must exceed at first; an eighth of the workers, at least 1, if left out.
    adaptive : bool, optional
        Whether the success rate of a thief's steals moves its threshold.

    Raises
    ------
    UsageError
        The threshold is not an integer, or less than 1.
    """

    def __init__(self, threshold: int | None = None, adaptive: bool = True) -> None:
        if threshold is not None and not (isinstance(threshold, int) and threshold >= 1):
            raise UsageError(
                f"threshold must be an integer of at least 1 waiting task, got {threshold!r}; "
                "for example threshold=1"
            )
        self._threshold = threshold
        self._adaptive = adaptive
        self._thresholds: dict[WorkerKey, AdaptiveThreshold] = {}

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        """Place ready tasks, steal for idle workers, and count how steals end."""
        match event:
            case WorkerIdle(worker):
                yield from self._steal(view.workers[worker], view)
            case StealConfirmed(_, _, thief) | StealRefused(_, _, thief) if thief in view.workers:
                self._of(thief, view).record(isinstance(event, StealConfirmed), len(view.workers))
            case WorkerLeft(worker):
                self._thresholds.pop(worker, None)
            case _:
                yield from super().handle(event, view, now)

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return the largest threshold of all thieves."""
        values = [threshold.value for threshold in self._thresholds.values()] or [self._threshold or 1]
        changes = sum(threshold.n_changes for threshold in self._thresholds.values())
        return {
            "steal_threshold": ("Largest threshold of all thieves [waiting tasks]", max(values)),
            "steal_threshold_changes": ("Changes of the thresholds of all thieves", changes),
        }

    def _of(self, worker: WorkerKey, view: ClusterView) -> AdaptiveThreshold:
        if worker not in self._thresholds:
            initial = self._threshold or max(1, len(view.workers) // _WORKERS_PER_THRESHOLD)
            self._thresholds[worker] = AdaptiveThreshold(initial, self._adaptive)
        return self._thresholds[worker]

    def _steal(self, thief: WorkerView, view: ClusterView) -> Iterator[Instruction]:
        threshold = self._of(thief.key, view)
        ring = list(view.workers.values())
        start = ring.index(thief)
        for victim in (*ring[start + 1 :], *ring[:start]):
            if victim.n_waiting <= threshold.value:
                continue
            for task in victim.waiting_from_last():
                if task.is_movable and task.may_run_on(thief.key):
                    reason = f"{victim.n_waiting} tasks wait there, more than {threshold.value}"
                    yield StealTask(task.key, victim.key, thief.key, reason)
                    return
        threshold.record(False, len(view.workers))
        for victim in view.crowded_from_most_loaded():
            reason = f"no worker has more than {threshold.value} tasks waiting that may move"
            yield DeclineSteal(victim.last_waiting.key, victim.key, thief.key, reason)
            return


class AdaptiveThreshold:
    """A thief's threshold, lowered after successful steals and raised after failed ones.

    Parameters
    ----------
    initial : int
        At least 1.
    adaptive : bool
        False keeps `initial`.
    """

    def __init__(self, initial: int = 1, adaptive: bool = True) -> None:
        self._adaptive = adaptive
        self.value = initial
        self.n_changes = 0
        self._outcomes: deque[bool] = deque(maxlen=_WINDOW)
        self._since_change = 0

    def record(self, succeeded: bool, n_workers: int) -> None:
        """Count the end of one attempt; reconsider the threshold every 10 attempts."""
        self._outcomes.append(succeeded)
        self._since_change += 1
        if not self._adaptive or self._since_change < _EVERY:
            return
        self._since_change = 0
        rate = sum(self._outcomes) / len(self._outcomes)
        before = self.value
        if rate > _GOOD:
            self.value = max(1, self.value - 1)
        elif rate < _BAD:
            self.value = min(max(4, n_workers // 4), self.value + 2)
        self.n_changes += self.value != before
