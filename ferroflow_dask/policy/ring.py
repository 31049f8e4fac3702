"""ferroflow's own rule, as it was: round robin, then stealing one task from the next worker that has some.

Kept to compare with. It knows neither costs nor data, and its threshold is a ratchet: an attempt that
finds nothing counts as a failure, so that the end of every run raises it (`policy.stealing` has neither).
"""

from __future__ import annotations

from collections.abc import Iterator

from ferroflow_dask.policy.events import Event, StealConfirmed, StealRefused, WorkerIdle, WorkerLeft
from ferroflow_dask.policy.instructions import DeclineSteal, Instruction, StealTask
from ferroflow_dask.policy.queues import WorkerKey, WorkerView
from ferroflow_dask.policy.static import StaticPolicy
from ferroflow_dask.policy.threshold import AdaptiveThreshold
from ferroflow_dask.policy.view import ClusterView

#: ferroflow starts at this part of the number of workers.
_PART_OF_WORKERS = 8


class RingPolicy(StaticPolicy):
    """Place round robin; an idle worker asks the others in ring order for one task; O(P) a decision."""

    def __init__(self) -> None:
        self._thresholds: dict[WorkerKey, AdaptiveThreshold] = {}

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        """Place, steal, and count attempts."""
        match event:
            case WorkerIdle(worker):
                yield from self._steal(view.workers[worker], view)
            case StealConfirmed(_, _, thief) | StealRefused(_, _, thief) if thief in view.workers:
                self._of(thief, view).record(isinstance(event, StealConfirmed), len(view.workers))
            case WorkerLeft(worker):
                self._thresholds.pop(worker, None)
            case _:
                yield from super().handle(event, view, now)

    def _of(self, worker: WorkerKey, view: ClusterView) -> AdaptiveThreshold:
        if worker not in self._thresholds:
            initial = max(1, len(view.workers) // _PART_OF_WORKERS)
            self._thresholds[worker] = AdaptiveThreshold(initial)
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
