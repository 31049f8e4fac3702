"""Placement: asks the policy, and turns its instructions into assignments, steal requests and priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ferroflow_dask.policy import ClusterView, Policy, TaskView
from ferroflow_dask.policy.events import Event, GraphArrived, TaskReady
from ferroflow_dask.policy.instructions import AssignTask, DeclineSteal, SetPriority, StealTask

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from ferroflow_dask.scheduler.decisions import DecisionLog
    from ferroflow_dask.scheduler.network import NetworkView
    from ferroflow_dask.scheduler.prefetch.scheduler import Prefetch
    from ferroflow_dask.scheduler.steal_protocol import StealProtocol
    from ferroflow_dask.scheduler.task_view import TaskViews

#: Reasons why an instruction of a policy is not carried out.
RESTRICTED = "the policy chose this worker, but the task's restrictions exclude it"
NOT_READY = "the policy may assign a task in answer to its TaskReady event only"


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
        steals: StealProtocol,
    ) -> None:
        self.policy = policy
        self.task_views = task_views
        self._scheduler = scheduler
        self._view = view
        self._clock = clock
        self._decisions = decisions
        self._network = network
        self._prefetch = prefetch
        self._steals = steals

    def passes_queue(self, ts: TaskState) -> bool:
        """Return whether a task is placed at once, though Dask would queue it."""
        if self.policy.places_queued or self._prefetch.worker_of(ts) is not None:
            return True
        return self.task_views.depends_on_kind(ts)  # Dask's queue knows no kinds of workers

    def worker_of(self, ts: TaskState) -> str | None:
        """Return the worker for a ready task, by its address; None leaves the decision to Dask."""
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
        self._view.release(ts.key)
        self.handle(TaskReady(task), [task])
        _, chosen = self._view.assigned.get(ts.key, (None, None))
        if chosen is None or self._scheduler.workers.get(chosen.key) in self._scheduler.running:
            return None if chosen is None else chosen.key
        self._view.release(ts.key)
        return None

    def graph_arrived(self, states: list[TaskState]) -> None:
        """Let the policy order a new graph."""
        ordered = [ts for ts in states if ts.state == "released" and self.task_views.has_rank(ts)]
        if not ordered:
            return
        views = [self.task_views(ts) for ts in ordered]
        for ts, view in zip(ordered, views, strict=True):
            view.dependencies = tuple(dependency.key for dependency in ts.dependencies)
        self.handle(GraphArrived(tuple(sorted(views, key=lambda task: task.priority))), views)

    def handle(self, event: Event, tasks: list[TaskView] | None = None) -> None:
        """Hand an event to the policy; carry out each instruction before the policy yields the next."""
        now = self._clock()
        by_key = {task.key: task for task in tasks or ()}
        requests = []
        for instruction in self.policy.handle(event, self._view, now):
            match instruction:
                case AssignTask(key, worker) if not isinstance(event, TaskReady) or event.task.key != key:
                    self._decisions.note(key, "placement declined", worker, NOT_READY)
                case AssignTask(key, worker) if not by_key[key].may_run_on(worker):
                    self._decisions.note(key, "placement declined", worker, RESTRICTED)
                case AssignTask(key, worker, reason):
                    self._view.assign(by_key[key], worker, now)
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
