"""Paused workers: if all of them stay paused while tasks wait, one is restarted.

A worker pauses above a part of its memory, and resumes below it. Memory that a library has leaked cannot be
spilled and may keep the worker paused for ever. If all workers are paused, Dask waits without a warning
(dask/distributed#5999).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import CallChange, Change, call_later
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

#: How long all workers have been paused before one is restarted [s]: Dask spills for some seconds.
_PATIENCE_S = 30.0
_STIMULUS_ID = "ferroflow-restart-paused-worker"


class PausedWorkers(Feature):
    """Restarts a worker if all of them stay paused."""

    name = "paused_workers"
    summary = "If all workers stay paused while tasks wait, one is restarted"
    reason = "a program ends that would wait for ever: `tests/scheduler/test_paused_workers.py`"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._look_when_due = core.guard(self._look)
        self._is_open = self._is_armed = self._has_warned = False
        self._n_restarted = 0

    def counts(self) -> Mapping[str, int]:
        """Return the number of restarts."""
        return {"restarted": self._n_restarted}

    def changes(self) -> Iterable[Change]:
        """Look from now on."""
        yield CallChange("look at paused workers", self._open, self._close)

    def _open(self) -> None:
        self._is_open = True
        self._look_in(_PATIENCE_S)

    def _close(self) -> None:
        self._is_open = False

    def log_event(self, topic: str, msg: dict[str, Any]) -> None:
        """Look later, after a worker has paused or left: the others may be paused."""
        if not self._is_armed and topic in self.core.view.workers and "action" in msg:
            self._look_in(_PATIENCE_S)

    def _look_in(self, seconds: float) -> None:
        self._is_armed = True
        call_later(self.core.scheduler.loop, seconds, self._due)

    def _due(self) -> None:
        self._look_when_due()

    def _look(self) -> None:
        self._is_armed = False
        workers, now = self.core.scheduler.workers, self.core.clock()
        if not self._is_open or not workers or any(ws.status != Status.paused for ws in workers.values()):
            return
        view = self.core.view.workers
        left_s = _PATIENCE_S - min(now - view[address].stopped_at for address in workers if address in view)
        if left_s > 0:
            self._look_in(left_s)
            return
        # By their heartbeats. A task that runs may free memory.
        if self._tasks_wait() and not any(ws.executing for ws in workers.values()):
            self._restart()
        self._look_in(_PATIENCE_S)

    def _tasks_wait(self) -> bool:
        scheduler = self.core.scheduler
        return bool(scheduler.queued or scheduler.unrunnable) or any(
            ws.processing for ws in scheduler.workers.values()
        )

    def _restart(self) -> None:
        ws = min(self._candidates(), key=lambda one: one.nbytes, default=None)
        if ws is not None:
            self.core.restarted.add(ws.address)
            options: dict[str, Any] = {"wait_for_workers": False, "on_error": "return"}
            restart = partial(
                self.core.scheduler.restart_workers, [ws.address], **options, stimulus_id=_STIMULUS_ID
            )
            self.core.scheduler.loop.add_callback(restart)
            self._n_restarted += 1
        if not self._has_warned:
            self._has_warned = True
            _distributed.warn_clients(
                self.core.scheduler,
                f"ferroflow: all workers have been paused for {_PATIENCE_S:g} s while tasks wait; "
                + (
                    "none can be restarted without a loss of data or of tasks"
                    if ws is None
                    else f"worker {ws.name} is restarted, and its results are computed again"
                ),
            )

    def _candidates(self) -> Iterator[WorkerState]:
        """Yield workers with a nanny that can be restarted without a loss.

        They have no actors, no only replica that cannot be computed again, and no tasks that may run nowhere
        else: a restarted worker has another address.
        """
        tasks = self.core.scheduler.tasks.values()
        for ws in self.core.scheduler.workers.values():
            if not ws.nanny or ws.actors or any(map(_is_irreplaceable, ws.has_what)):
                continue
            if not any(_is_bound_to(ws, ts) for ts in tasks):
                yield ws


def _is_irreplaceable(ts: TaskState) -> bool:
    """Return whether a result has one replica and cannot be computed again.

    It is scattered data, or is computed from scattered data that the client has released.
    """
    return len(ts.who_has or ()) == 1 and (ts.run_spec is None or ts.has_lost_dependencies)


def _is_bound_to(ws: WorkerState, ts: TaskState) -> bool:
    """Return whether a task may run on a worker only, and has no result elsewhere."""
    if ts.worker_restrictions != {ws.address} or ts.loose_restrictions:
        return False
    return not ts.who_has or ts.who_has == {ws}
