"""Placing: the functions that Dask's scheduler calls to place a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import FAILURES, Change

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.fixed_values import FixedValues
    from ferroflow_dask.scheduler.placement import Placement
    from ferroflow_dask.scheduler.refusals import Refusals


class Placing:
    """Decides which tasks are placed, and where; Dask decides where this class does not.

    Parameters
    ----------
    core : Core
    placement : Placement
    fixed : FixedValues
    refusals : Refusals
    overtake : callable
        Called with a task that is placed, the worker's address and the time [s], while bundles run that can
        be divided.
    """

    def __init__(
        self,
        core: Core,
        placement: Placement,
        fixed: FixedValues,
        refusals: Refusals,
        overtake: Callable[[TaskState, str, float], object],
    ) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._guard = core.guard
        self._view = core.view
        self._hooks = core.hooks
        self._placement = placement
        self._fixed = fixed
        self._refusals = refusals
        self._overtake = core.guard(overtake)

    def changes(self) -> Iterable[Change]:
        """Return the changes to Dask."""
        return _distributed.placement_changes(
            self._scheduler, self.decide_worker, self.passes_queue, self._core.suspects
        )

    def passes_queue(self, ts: TaskState) -> bool:
        """Return whether a task is placed at once, though Dask would queue it."""
        if self._guard.is_closed or self._guard.error is not None:
            return False
        try:
            if ts.key in self._core.refused or ts.key in self._core.held:
                return True
            if ts.key in self._core.suspects:
                return False
            fixed = self._fixed
            for needed in ts.dependencies:
                if needed.type in fixed.types or (fixed.prefixes and fixed.is_fixed(needed)):
                    return True
            if self._placement.policy.places_queued:
                return True
            for placed, place in self._hooks.place:
                if placed and place(ts) is not None:
                    return True
            # Dask's queue knows no kinds of workers.
            return self._view.has_devices and self._placement.task_views.depends_on_kind(ts)
        except FAILURES as error:
            self._guard.fail(error)
            return False

    def decide_worker(self, ts: TaskState) -> WorkerState | None:
        """Return the worker for a task; None if it must wait for one."""
        ws = None
        # Dask places actors and tasks with preferences ("loose" restrictions).
        guard = self._guard
        if ts.key in self._core.held and not guard.is_closed and guard.error is None:
            return None
        if not (ts.actor or ts.loose_restrictions or guard.is_closed or guard.error is not None):
            try:
                if ts.key in self._core.refused:
                    return self._refusals.decision(ts)
                address = self._placement.worker_of(ts)
                if address is None and self._fixed.must_wait(ts):
                    return None
            except FAILURES as error:
                self._guard.fail(error)
                address = None
            ws = self._scheduler.workers.get(address) if address is not None else None
        if ws is None:
            ws = _distributed.stock_decision(self._scheduler, ts)
        if ws is not None and self._view.divisible and not guard.is_closed:
            self._overtake(ts, ws.address, self._core.clock())
        return ws

    def restrict_assigned(self) -> None:
        """Correct where tasks in queues may run, after values have become fixed or are so no longer."""
        for key, (task, _) in self._view.assigned.items():
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ts.dependencies:
                task.allowed = self._placement.task_views(ts).allowed
