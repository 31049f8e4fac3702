"""Where tasks go: the policy is asked, and its instructions become assignments, requests and priorities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferroflow_dask.plugin import seams
from ferroflow_dask.plugin.polled import Polled
from ferroflow_dask.plugin.steals import RESTRICTED
from ferroflow_dask.plugin.tracking import Tracking
from ferroflow_dask.policy import Policy, TaskView
from ferroflow_dask.policy.events import Event, TaskReady
from ferroflow_dask.policy.instructions import AssignTask, DeclineSteal, SetPriority, StealTask

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState


class Placing(Tracking):
    """The part of the shell that asks the policy; `FerroflowStealing` makes what it needs."""

    policy: Policy
    error: BaseException | None
    _is_closed: bool
    _polled: Polled

    def _passes_queue(self, ts: TaskState) -> bool:
        # Restrictions already keep a task out of Dask's queue.
        if self._is_closed:  # who overrides what we had overridden may still ask
            return False
        return bool(
            self._guarded(self.messages.successors.worker_of, ts) or self._guarded(self._bypass.admits, ts)
        )

    def _decide_worker(self, ts: TaskState) -> WorkerState | None:
        # Actors and preferences ("loose" restrictions) are Dask's to place.
        address = None if ts.actor or ts.loose_restrictions else self._guarded(self._place, ts)
        ws = self.scheduler.workers.get(address) if address is not None else None
        return ws if ws is not None else seams.stock_decision(self.scheduler, ts)

    def _place(self, ts: TaskState) -> str | None:
        planned = self._planned.pop(ts.key, None)
        if planned is not None and self._is_running(planned):
            if seams.may_run_on(self.scheduler, ts, self.scheduler.workers[planned]):
                return planned
            self.view.release(ts.key)  # it was restricted after it was planned
        task = self._describe(ts)
        if (ahead := self.messages.successors.worker_of(ts)) is not None:
            self.view.assign(task, ahead, self.clock())
            self.journal.note(
                self.clock(), ts.key, "placed", ahead, "sent ahead with those that make its inputs"
            )
            return ahead
        if task.allowed is not None and not task.allowed:
            return None
        self._polled.see_candidates(task, self.clock())
        self._tell(TaskReady(task), [task])
        chosen = self._planned.pop(ts.key, None)
        return chosen if chosen is not None and self._is_running(chosen) else None

    def _is_running(self, address: str) -> bool:
        ws = self.scheduler.workers.get(address)
        return ws is not None and ws in self.scheduler.running

    def _tell(self, event: Event, tasks: list[TaskView] | None = None) -> None:
        """Hand an event to the policy and carry out each instruction before it gives the next."""
        if self.error is not None:
            return
        now = self.clock()
        by_key = {task.key: task for task in tasks or ()}
        requests = []
        for instruction in self.policy.handle(event, self.view, now):
            match instruction:
                case AssignTask(key, worker) if not by_key[key].may_run_on(worker):
                    self.journal.note(now, key, "placement declined", worker, RESTRICTED)
                case AssignTask(key, worker, reason):
                    self.view.assign(by_key[key], worker, now)
                    self._planned[key] = worker
                    self.journal.note(now, key, "placed", worker, reason)
                case DeclineSteal(key, victim, thief, reason):
                    self._steal_declined(key, victim, thief, reason)
                case SetPriority(key, order):
                    ts = self.scheduler.tasks[key]
                    ts.priority = (*(ts.priority or ())[:-1], order)
                    self.view.set_priority(by_key[key], ts.priority)
                case StealTask():
                    request = self.ask_for(instruction)
                    if request is not None:
                        requests.append(request)
        if requests:
            self.log(("request", requests))
            self.count += 1
