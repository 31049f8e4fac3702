"""Placement: asks the policy, and turns its instructions into assignments, steal requests and priorities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.policy import TaskView
from ferroflow_dask.policy.events import Event, GraphArrived, TaskReady, WorkerIdle
from ferroflow_dask.policy.instructions import (
    AssignTask,
    DeclineSteal,
    DivideTask,
    Instruction,
    SetPriority,
    StealTask,
    in_words,
)
from ferroflow_dask.scheduler.queue_time import TOKEN, QueueTime

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.network import NetworkView
    from ferroflow_dask.scheduler.steal_protocol import StealProtocol
    from ferroflow_dask.scheduler.task_view import TaskViews

#: Reasons why an instruction of a policy is not carried out.
RESTRICTED = "the policy chose this worker, but the task's restrictions exclude it"
NOT_READY = "the policy may assign a task in answer to its TaskReady event only"


class Placement:
    """Places tasks by a policy.

    Parameters
    ----------
    core : Core
    task_views : TaskViews
    network : NetworkView
    steals : StealProtocol
    divide : callable
        Asks a worker for steps of a bundle: its key, the share of the steps and the reason.
    """

    def __init__(
        self,
        core: Core,
        *,
        task_views: TaskViews,
        network: NetworkView,
        steals: StealProtocol,
        divide: Callable[[Key, str, str], object],
    ) -> None:
        self.policy = core.policy
        self.task_views = task_views
        self._scheduler = core.scheduler
        self._view = core.view
        self._clock = core.clock
        self._calls = core.policy_calls
        self._hooks = core.hooks
        self._decisions = core.decisions
        self._ask_pass = core.passes.ask
        self._network = network
        self._steals = steals
        self._divide = divide
        self._queue_time = QueueTime(core.scheduler)

    def worker_of(self, ts: TaskState) -> str | None:
        """Return the worker for a ready task, by its address; None leaves the decision to Dask."""
        task = self.task_views(ts)
        for placed, place in self._hooks.place:
            if placed and (answer := place(ts)) is not None:
                address: str
                address, reason = answer
                self._view.assign(task, address, self._clock())
                self._decisions.note(ts.key, "placed", address, reason)
                return address
        if task.allowed is not None and not task.allowed:
            return None
        now = self._clock()
        if now >= self._network.reads_memory_at:  # most tasks need no call
            self._network.update_memory(now)
        if task.input_bytes or task.output_bytes or task.allowed is not None:
            self._network.update_candidates(task, now)
        if ts.key in self._view.assigned:
            self._view.release(ts.key)
        if task.held:
            name = ts.group.name  # any first part of a key; those without a token need no call
            has_token = isinstance(name, str) and len(name) - len(ts.prefix.name) > TOKEN
            self._view.queue_s = self._queue_time(ts) if has_token and self._scheduler.queued else 0.0
        self._ready(task, now)
        self._view.queue_s = 0.0
        _, chosen = self._view.assigned.get(ts.key, (None, None))
        if chosen is None or self._scheduler.workers.get(chosen.key) in self._scheduler.running:
            return None if chosen is None else chosen.key
        self._view.release(ts.key)
        return None

    def _ready(self, task: TaskView, now: float) -> None:
        event = self._calls.event = TaskReady(task)
        start_s = monotonic()
        for instruction in self.policy.handle(event, self._view, now):
            if isinstance(instruction, AssignTask) and instruction.key == task.key:
                self._assign(task, instruction, now)
            elif request := self._carry_out(instruction, event, {task.key: task}, now):
                self._steals.log_requests([request])
        self._calls.event = None
        self._calls.n += 1
        if (taken_s := monotonic() - start_s) > self._calls.limit_s:
            for hook in self._hooks.policy_took:
                hook(event, taken_s)

    def _assign(self, task: TaskView, instruction: AssignTask, now: float) -> None:
        key, worker = task.key, instruction.worker
        if task.allowed is not None and not task.may_run_on(worker):
            self._decisions.note(key, "placement declined", worker, RESTRICTED)
        else:
            self._view.assign(task, worker, now)
            self._decisions.note(key, "placed", worker, instruction.reason)

    def graph_arrived(self, states: list[TaskState]) -> None:
        """Let the policy order a new graph."""
        ordered = [ts for ts in states if ts.state == "released" and self.task_views.has_rank(ts)]
        if not ordered:
            return
        views = [self.task_views(ts) for ts in ordered]
        for ts, view in zip(ordered, views, strict=True):
            view.dependencies = tuple(dependency.key for dependency in ts.dependencies)
        self.handle(GraphArrived(tuple(sorted(views, key=lambda task: task.priority))), views)

    def worker_idle(self, address: str) -> None:
        """Ask the policy for work for an idle worker."""
        self._network.update_workers([address], self._clock())
        self.handle(WorkerIdle(address))

    def steal_answered(self, key: Key, state: str, stimulus_id: str, worker: str | None) -> None:
        """Take a worker's answer to a steal request."""
        has_ended, event = self._steals.answered(key, state, stimulus_id, worker)
        if event is not None:
            self.handle(event)
        if has_ended:
            self._ask_pass()

    def handle(self, event: Event, tasks: Iterable[TaskView] = ()) -> None:
        """Hand an event to the policy; carry out each instruction before the policy yields the next."""
        now = self._clock()
        by_key = {task.key: task for task in tasks}
        requests = []
        self._calls.event, start_s = event, monotonic()
        for instruction in self.policy.handle(event, self._view, now):
            request = self._carry_out(instruction, event, by_key, now)
            if request is not None:
                requests.append(request)
        self._calls.event = None
        self._calls.n += 1
        if (taken_s := monotonic() - start_s) > self._calls.limit_s:
            for hook in self._hooks.policy_took:
                hook(event, taken_s)
        if requests:
            self._steals.log_requests(requests)

    def _carry_out(
        self, instruction: Instruction, event: Event, by_key: Mapping[Key, TaskView], now: float
    ) -> tuple[Any, ...] | None:
        """Carry out an instruction; return the request if it is one to steal."""
        match instruction:
            case AssignTask(key, worker):
                self._decisions.note(key, "placement declined", worker, NOT_READY)
            case DeclineSteal(key, victim, thief, reason):
                self._steals.declined(key, victim, thief, reason)
            case SetPriority(key, order):
                ts = self._scheduler.tasks[key]
                ts.priority = (*(ts.priority or ())[:-1], order)
                self._view.set_priority(by_key[key], ts.priority)
            case DivideTask(key, _, _, share, reason):
                self._divide(key, share, in_words(reason))
            case StealTask():
                return self._steals.request(instruction)
        return None
