"""Steal protocol: requests to victims and their answers, on top of distributed's stealing.

A task that a victim has given up is never lost.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.stealing import WorkStealing

from ferroflow_dask.policy.events import Event, StealConfirmed, StealRefused
from ferroflow_dask.policy.instructions import Reason, StealTask, in_words
from ferroflow_dask.scheduler import _distributed

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.task_view import TaskViews

#: Logger of distributed's stealing.
stealing_logger = logging.getLogger("distributed.stealing")

#: Why a steal is not requested.
RESTRICTED = "the policy chose this thief, but the task's restrictions exclude it"


class StealProtocol:
    """Carries out steals.

    Parameters
    ----------
    core : Core
    stealing : distributed.stealing.WorkStealing
        Keeps the steals in flight, sends the requests, and has the metrics and the log.
    task_views : TaskViews
    """

    def __init__(self, core: Core, stealing: WorkStealing, task_views: TaskViews) -> None:
        #: Requests, and how they ended: given up by the victim, refused by it, or aborted because the task
        #: finished, was released, or the thief left.
        self.counts = {"asked": 0, "confirmed": 0, "refused": 0, "aborted": 0}
        #: Confirmed steals by victim and thief, of present workers.
        self.flows: Counter[tuple[str, str]] = Counter()
        self._scheduler = core.scheduler
        self.stealing = stealing
        self._view = core.view
        self._clock = core.clock
        self._decisions = core.decisions
        self._hooks = core.hooks
        self._task_views = task_views

    def request(self, steal: StealTask) -> tuple[Any, ...] | None:
        """Ask a victim for a task.

        Returns the request in the form of the dashboard's stealing page; None if it is too late, or if
        restrictions exclude the thief.
        """
        ts = self._scheduler.tasks[steal.key]
        victim, thief = self._scheduler.workers[steal.victim], self._scheduler.workers[steal.thief]
        is_late = ts in self.stealing.in_flight or ts.processing_on is not victim
        if is_late or thief not in self._scheduler.running:
            return None
        task = self._view.assigned[steal.key][0]
        if not (task.may_run_on(steal.thief) and _distributed.may_run_on(self._scheduler, ts, thief)):
            self.declined(steal.key, steal.victim, steal.thief, RESTRICTED)
            return None
        now = self._clock()
        cost_s = task.cost_s + self._view.transfer_s(task, thief.address)
        # Backlogs before the move. Dask's occupancy takes as long to compute as all else.
        busy_s, idle_s = (self._view.workers[ws.address].backlog_s for ws in (victim, thief))
        if not _distributed.begin_steal(self.stealing, ts, victim, thief):
            self._view.assign(task, victim.address, now)
            return None
        task.is_movable = False  # until the answer arrives
        self._view.assign(task, thief.address, now)
        self.counts["asked"] += 1
        self._decisions.note(steal.key, "steal asked", steal.thief, steal.reason)
        metrics = self.stealing.metrics
        metrics["request_count_total"][0] += 1
        metrics["request_cost_total"][0] += cost_s
        # The dashboard reads the first eight items.
        story = (now, 0, steal.key, cost_s, victim.address, busy_s, thief.address, idle_s)
        return (*story, in_words(steal.reason))

    def log_requests(self, requests: list[tuple[Any, ...]]) -> None:
        """Publish requests under the topic of distributed's stealing."""
        self.stealing.log(("request", requests))
        self.stealing.count += 1

    def place_again(self, key: Key, state: str, worker: str, stimulus_id: str) -> None:
        """Place a task again if a victim has given it up after the plugin failed: no worker has it."""
        if state not in _distributed.GIVEN_UP:
            return
        ts = self._scheduler.tasks.get(key)
        if ts is not None:
            _distributed.end_steal(self.stealing, ts)
        _distributed.reschedule_from(self._scheduler, key, worker, stimulus_id)

    def answered(
        self, key: Key, state: str, stimulus_id: str, worker: str | None
    ) -> tuple[bool, Event | None]:
        """Take a worker's answer; return whether a steal has ended by it, and the policy's event, if any."""
        ts = self._scheduler.tasks.get(key)
        if ts is None:
            stealing_logger.debug("Key released between request and confirm: %s", key)
            return False, None
        pending = self.stealing.in_flight.get(ts)
        # An earlier extension may have used the same stimulus id.
        is_other = pending is not None and worker not in (None, pending["victim"].address)
        if pending is None or is_other or pending["stimulus_id"] != stimulus_id:
            reason = "already-aborted" if pending is None else "stale-response"
            self.stealing.log((reason, key, state, worker, stimulus_id))
            return False, None
        _distributed.end_steal(self.stealing, ts)
        victim, thief = pending["victim"], pending["thief"]
        if ts.processing_on is not victim:
            self._ended(key, "aborted", thief, "the task was placed again meanwhile")
            return False, None
        event = self._complete(ts, state, victim, thief, stimulus_id)
        _distributed.slots_may_have_opened(self._scheduler, victim, thief, stimulus_id=stimulus_id)
        return True, event

    def _complete(
        self, ts: TaskState, state: str, victim: WorkerState, thief: WorkerState, stimulus_id: str
    ) -> Event | None:
        key = ts.key
        story = (key, state, victim.address, thief.address, stimulus_id)
        is_there = self._scheduler.workers.get(thief.address) is thief
        if state in _distributed.GIVEN_UP and is_there and _distributed.can_run(self._scheduler, ts, thief):
            for hook in self._hooks.task_moved:
                hook(key)
            _distributed.hand_over(self._scheduler, ts, victim, thief)
            self._view.set_movable(key)
            self._ended(key, "confirmed", thief, ("{} gave it up", victim.address))
            self.flows[victim.address, thief.address] += 1
            self.stealing.log(("confirm", *story))
            return StealConfirmed(key, victim.address, thief.address)
        if state in _distributed.STARTED:
            self._ended(key, "refused", victim, f"it is {state} there")
            self.stealing.log(("already-computing", *story))
            self._return_to(ts, victim)
            return StealRefused(key, victim.address, thief.address)
        reason = f"{victim.address} does not have it, or {thief.address} cannot take it"
        self._ended(key, "aborted", thief, reason)
        self.stealing.log(("reschedule", not is_there, *story))
        _distributed.reschedule(self._scheduler, ts, stimulus_id)
        return None

    def overtaken(self, ts: TaskState, victim: WorkerState) -> None:
        """Abort the steal of a task that left processing before the answer arrived."""
        self._ended(ts.key, "aborted", victim, "the task ended before the answer arrived")
        self._return_to(ts, victim)

    def declined(self, key: Key, victim: str, thief: str, reason: Reason) -> None:
        """Note a steal that the policy decided against, with its reason."""
        told = (
            (f"from {{}}: {reason[0]}", *reason[1:]) if isinstance(reason, tuple) else ("from {}: {}", reason)
        )
        self._decisions.note(key, "steal declined", thief, (told[0], victim, *told[1:]))

    def worker_left(self, address: str) -> None:
        """Forget the flows from and to a worker."""
        for pair in [pair for pair in self.flows if address in pair]:
            del self.flows[pair]
        if not self.stealing.in_flight:
            self.stealing.in_flight_tasks.clear()

    def restarted(self) -> None:
        """Forget all steals in flight: the cluster restarts."""
        for ts in list(self.stealing.in_flight):
            _distributed.end_steal(self.stealing, ts)

    def _ended(self, key: Key, outcome: str, ws: WorkerState, reason: Reason) -> None:
        self.counts[outcome] += 1
        self._decisions.note(key, f"steal {outcome}", ws.address, reason)

    def _return_to(self, ts: TaskState, victim: WorkerState) -> None:
        if victim.address not in self._view.workers or ts in victim.long_running:
            return
        entry = self._view.assigned.get(ts.key)
        task = entry[0] if entry is not None else self._task_views(ts)
        task.is_movable = False
        self._view.assign(task, victim.address, self._clock())
        self._view.set_started(ts.key)
