"""Placement: asks the policy, and turns its instructions into assignments, steal requests and priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.policy import ClusterView, Policy, TaskView
from ferroflow_dask.policy.events import Event, GraphArrived, TaskReady
from ferroflow_dask.policy.instructions import AssignTask, DeclineSteal, SetPriority, StealTask
from ferroflow_dask.scheduler import _distributed

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from ferroflow_dask.scheduler.decisions import DecisionLog
    from ferroflow_dask.scheduler.network import NetworkView
    from ferroflow_dask.scheduler.prefetch.scheduler import Prefetch
    from ferroflow_dask.scheduler.queue_bypass import QueueBypass
    from ferroflow_dask.scheduler.steal_protocol import StealProtocol
    from ferroflow_dask.scheduler.task_view import TaskViews

#: Why an instruction of a policy is not carried out.
RESTRICTED = "the policy chose this worker, but the task's restrictions exclude it"


class Placement:
    """Places tasks by a policy.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    policy : Policy
    view : ClusterView
    clock : callable
        Returns the time [s].
    decisions : DecisionLog
    task_views : TaskViews
    network : NetworkView
    prefetch : Prefetch
    queue_bypass : QueueBypass
    steals : StealProtocol
    """

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Policy,
        view: ClusterView,
        *,
        clock: Callable[[], float],
        decisions: DecisionLog,
        task_views: TaskViews,
        network: NetworkView,
        prefetch: Prefetch,
        queue_bypass: QueueBypass,
        steals: StealProtocol,
    ) -> None:
        self.policy = policy
        self.task_views = task_views
        #: Workers of tasks that the policy has assigned and that are not processing yet.
        self.planned: dict[Key, str] = {}
        self._scheduler = scheduler
        self._view = view
        self._clock = clock
        self._decisions = decisions
        self._network = network
        self._prefetch = prefetch
        self._queue_bypass = queue_bypass
        self._steals = steals

    def passes_queue(self, ts: TaskState) -> bool:
        """Return whether a task is placed at once, though Dask would queue it."""
        return bool(self._prefetch.worker_of(ts) or self._queue_bypass.admits(ts))

    def worker_of(self, ts: TaskState) -> str | None:
        """Return the worker for a ready task, by its address; None leaves the decision to Dask."""
        planned = self.planned.pop(ts.key, None)
        if planned is not None and self._is_running(planned):
            if _distributed.may_run_on(self._scheduler, ts, self._scheduler.workers[planned]):
                return planned
            self._view.release(ts.key)  # it was restricted after it was planned
        task = self.task_views(ts)
        if (prefetched := self._prefetch.worker_of(ts)) is not None:
            self._view.assign(task, prefetched, self._clock())
            self._decisions.note(
                ts.key, "placed", prefetched, "prefetched with the tasks that make its inputs"
            )
            return prefetched
        if task.allowed is not None and not task.allowed:
            return None
        self._network.update_candidates(task, self._clock())
        self.handle(TaskReady(task), [task])
        chosen = self.planned.pop(ts.key, None)
        return chosen if chosen is not None and self._is_running(chosen) else None

    def graph_arrived(self, states: list[TaskState]) -> None:
        """Let the policy order a new graph and place the tasks that can start at once."""
        ordered = [ts for ts in states if ts.state == "released" and self.task_views.has_rank(ts)]
        if not ordered:
            return
        views = [self.task_views(ts) for ts in ordered]
        for ts, view in zip(ordered, views, strict=True):
            view.dependencies = tuple(dependency.key for dependency in ts.dependencies)
        ready = self._queue_bypass.at_arrival(ts for ts in states if ts.state == "released")
        self._network.update_workers(self._view.workers, self._clock())
        self.handle(GraphArrived(tuple(sorted(views, key=lambda task: task.priority)), ready), views)

    def discard_planned(self) -> None:
        """Release the tasks that were assigned but were not sent after all."""
        for key in list(self.planned):
            del self.planned[key]
            self._view.release(key)

    def _is_running(self, address: str) -> bool:
        ws = self._scheduler.workers.get(address)
        return ws is not None and ws in self._scheduler.running

    def handle(self, event: Event, tasks: list[TaskView] | None = None) -> None:
        """Hand an event to the policy; carry out each instruction before the policy yields the next."""
        now = self._clock()
        by_key = {task.key: task for task in tasks or ()}
        requests = []
        for instruction in self.policy.handle(event, self._view, now):
            match instruction:
                case AssignTask(key, worker) if not by_key[key].may_run_on(worker):
                    self._decisions.note(key, "placement declined", worker, RESTRICTED)
                case AssignTask(key, worker, reason):
                    self._view.assign(by_key[key], worker, now)
                    self.planned[key] = worker
                    self._decisions.note(key, "placed", worker, reason)
                case DeclineSteal(key, victim, thief, reason):
                    self._steals.declined(key, victim, thief, reason)
                case SetPriority(key, order):
                    ts = self._scheduler.tasks[key]
                    ts.priority = (*(ts.priority or ())[:-1], order)
                    self._view.set_priority(by_key[key], ts.priority)
                case StealTask():
                    request = self._steals.request(instruction)
                    if request is not None:
                        requests.append(request)
        if requests:
            self._steals.log_requests(requests)
