"""The shell around a policy: stands where Dask's stealing extension stood.

Scheduler transitions are translated into changes of the view and into events; the policy's
instructions into assignments, steal requests and priorities. Nothing is decided here.

Three rules keep the scheduler safe. Steals are never asked for inside a transition, which is
re-entrant: an event only asks for a pass, which the event loop runs once the transitions are done.
The handler of workers' answers never raises, since that would cost the worker its connection. And
whatever goes wrong, `fail` is called once and Dask is left as it was without us.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.metrics import time
from distributed.stealing import WorkStealing

from ferroflow_dask import config
from ferroflow_dask.plugin import seams
from ferroflow_dask.plugin.describe import TaskDescriber, declared_cost
from ferroflow_dask.plugin.settings import configured_policy
from ferroflow_dask.policy import ClusterView, Policy, TaskView
from ferroflow_dask.policy.events import (
    Event,
    GraphArrived,
    StealConfirmed,
    StealRefused,
    TaskFinished,
    TaskReady,
    WorkerIdle,
    WorkerJoined,
    WorkerLeft,
)
from ferroflow_dask.policy.instructions import AssignTask, SetPriority, StealTask

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger("ferroflow_dask")

#: How soon idle workers look for tasks that overrun, at first and at last [s].
_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 0.64

#: Idle workers served in one pass: it bounds how long the scheduler's event loop waits for us.
_IDLE_PER_PASS = 16


class FerroflowStealing(WorkStealing):
    """Replacement of distributed's `WorkStealing` that asks a policy.

    A subclass, so that the dashboard, the metrics and the cluster dump find all that they read. It may
    also stand in `distributed.scheduler.DEFAULT_EXTENSIONS["stealing"]`.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    policy : Policy, optional
        `ferroflow.policy` from the configuration if left out.
    on_failure : callable, optional
        Called once with the exception when the policy or this shell fails.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Policy | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.policy = policy if policy is not None else configured_policy()
        self.view = ClusterView(latency_s=config.get_seconds("latency"))
        #: Steals that were asked for, given up by the victim, and refused by it.
        self.steals = {"asked": 0, "confirmed": 0, "refused": 0}
        self.error: BaseException | None = None
        self._on_failure = on_failure
        self._planned: dict[Key, str] = {}
        self._pass_is_due = False
        self._look_is_due = False
        self._next_look_s = _FIRST_LOOK_S
        self._describe = TaskDescriber(scheduler)
        super().__init__(scheduler)
        for ws in scheduler.workers.values():
            for ts in ws.processing:
                if ts not in ws.long_running:
                    self.view.assign(self._describe(ts), ws.address, time())
        seams.override_placement(scheduler, self._decide_worker, self._is_ours)

    # Life cycle

    def teardown(self) -> None:
        """Leave the scheduler as it was before; called when it closes, and by `uninstall`."""
        super().teardown()
        seams.restore_placement(self.scheduler)

    def fail(self, error: BaseException) -> None:
        """Give up: from now on Dask decides, as without us."""
        if self.error is not None:
            return
        self.error = error
        self.teardown()
        logger.warning("ferroflow: %r; Dask's own scheduling takes over", error, exc_info=error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call, unless we failed before; any exception is a failure of ours, never of the scheduler."""
        if self.error is not None:
            return None
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 -- whatever it is, Dask must go on
            self.fail(error)
            return None

    # Hooks of SchedulerPlugin: the scheduler's events become changes of the view

    def add_worker(self, scheduler: Any = None, worker: Any = None) -> None:
        """Note a worker that joined."""
        super().add_worker(scheduler, worker)
        self._guarded(self._worker_joined, worker)

    def _worker_joined(self, address: str) -> None:
        self.view.add_worker(address, self.scheduler.workers[address].nthreads)
        self._sync_running()  # a worker may join before it is ready to run anything
        self._renew_restrictions()
        self._tell(WorkerJoined(address))
        self._ask_for_pass()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Note a worker that left."""
        super().remove_worker(scheduler, worker, **kwargs)
        self._guarded(self._worker_left, worker)

    def _worker_left(self, address: str) -> None:
        if address in self.view.workers:
            self.view.remove_worker(address)
            self._tell(WorkerLeft(address))

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **kwargs: Any) -> None:
        """Let the policy order a new graph and place what can start at once."""
        self._guarded(self._graph_arrived, tasks)

    def _graph_arrived(self, keys: list[Key]) -> None:
        states = [self.scheduler.tasks[key] for key in keys]
        costed = [ts for ts in states if ts.state == "released" and declared_cost(ts) is not None]
        views = [self._describe(ts) for ts in costed]
        ready = frozenset(ts.key for ts in costed if all(dep.state == "memory" for dep in ts.dependencies))
        self._tell(GraphArrived(tuple(sorted(views, key=lambda task: task.priority)), ready), views)
        if self._planned:
            self._ask_for_pass()

    def transition(
        self,
        key: Key,
        start: Any,
        finish: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Keep the view up to date with a task's state."""
        if start == "processing":
            self._guarded(self._left_processing, self.scheduler.tasks[key], finish, kwargs)
        if finish == "processing":
            self._guarded(self._entered_processing, self.scheduler.tasks[key])

    def _left_processing(self, ts: TaskState, finish: str, details: dict[str, Any]) -> None:
        self._remove_from_in_flight(ts)
        entry = self.view.assigned.get(ts.key)
        self.view.finish(ts.key, time())
        if finish == "memory":
            self._reprice(ts)
            if entry is not None:
                spent = (s["stop"] - s["start"] for s in details["startstops"] if s["action"] == "compute")
                self._tell(TaskFinished(ts.key, entry[1].key, sum(spent), details["nbytes"]))
        self._ask_for_pass()

    def _entered_processing(self, ts: TaskState) -> None:
        ws = ts.processing_on
        assert ws is not None
        entry = self.view.assigned.get(ts.key)
        if entry is None or entry[1].key != ws.address:  # placed by Dask, not by the policy
            self.view.assign(self._describe(ts), ws.address, time())
        if seams.is_duration_unknown(ts):
            self.unknown_durations.setdefault(ts.prefix.name, set()).add(ts)
        self._ask_for_pass()

    def _reprice(self, finished: TaskState) -> None:
        # The first duration of a prefix replaces the guesses about the others of its kind.
        for ts in self.unknown_durations.pop(finished.prefix.name, ()):
            if ts.processing_on and declared_cost(ts) is None:
                self.view.reprice(ts.key, seams.prefix_duration(self.scheduler, ts))

    def log_event(self, topic: str, msg: Any) -> None:
        """Look again when a worker starts, pauses or resumes; there is no other hook for it."""
        if isinstance(msg, dict) and msg.get("action") == "worker-status-change":
            self._guarded(self._ask_for_pass)

    def restart(self, scheduler: Any) -> None:
        """Forget all tasks: the cluster restarts."""
        super().restart(scheduler)
        for key in list(self.view.assigned):
            self.view.release(key)
        self._planned.clear()

    # What the scheduler and distributed's own stealing call by name

    def remove_key_from_stealable(self, ts: TaskState) -> None:
        """Note that a task left its worker's slots (it became long-running)."""
        self._guarded(self.view.release, ts.key)

    def put_key_in_stealable(self, ts: TaskState) -> None:
        """Do nothing: the view's queues take the place of the stock tables."""

    def balance(self) -> None:
        """Look at all idle workers; the periodic callback calls it in case an event was missed."""
        self._guarded(self._pass)

    # Placement

    def _is_ours(self, ts: TaskState) -> bool:
        # Restrictions already keep a task out of Dask's queue. What Dask would queue is ours only where
        # the policy says so, or where a declared cost tells more than the queue's turn would.
        return self.policy.places_queued or declared_cost(ts) is not None

    def _decide_worker(self, ts: TaskState) -> WorkerState | None:
        # Actors and preferences ("loose" restrictions) are Dask's to place.
        address = None if ts.actor or ts.loose_restrictions else self._guarded(self._place, ts)
        ws = self.scheduler.workers.get(address) if address is not None else None
        return ws if ws is not None else seams.stock_decision(self.scheduler, ts)

    def _place(self, ts: TaskState) -> str | None:
        planned = self._planned.pop(ts.key, None)
        if planned is not None and self._is_running(planned):
            return planned
        self._sync_running()
        task = self._describe(ts)
        if task.allowed is not None and not task.allowed:
            return None
        self._tell(TaskReady(task), [task])
        chosen = self._planned.pop(ts.key, None)
        return chosen if chosen is not None and self._is_running(chosen) else None

    def _is_running(self, address: str) -> bool:
        ws = self.scheduler.workers.get(address)
        return ws is not None and ws in self.scheduler.running

    def _sync_running(self) -> None:
        # The scheduler tells of a change before it makes it. Comparing counts finds all but a swap within
        # one turn of the event loop, which `_is_running` then catches.
        if self.view.n_running != len(self.scheduler.running):
            for address, ws in self.scheduler.workers.items():
                is_running = ws in self.scheduler.running
                if address in self.view.workers and self.view.workers[address].is_running != is_running:
                    self.view.set_running(address, is_running)
            self._renew_restrictions()

    def _renew_restrictions(self) -> None:
        # Where restricted tasks may run depends on which workers there are.
        for task, _ in self.view.assigned.values():
            if task.allowed is not None:
                task.allowed = self._describe.allowed(self.scheduler.tasks[task.key])

    # Steals

    def _ask_for_pass(self) -> None:
        if not self._pass_is_due:
            self._pass_is_due = True
            self.scheduler.loop.add_callback(self._run_pass)

    def _run_pass(self) -> None:
        self._pass_is_due = False
        self._next_look_s = _FIRST_LOOK_S
        self._guarded(self._pass)
        self._look_again_later()

    def _look_again_later(self) -> None:
        # That a task runs longer than expected is no event. While workers idle beside others that have
        # tasks waiting, time is let pass and looked at, ever more rarely until something happens.
        if self._look_is_due or not (self.view.idle and self.view.has_crowded) or not self._is_started:
            return
        self._look_is_due = True
        self.scheduler.loop.call_later(self._next_look_s, self._look)
        self._next_look_s = min(2 * self._next_look_s, _LAST_LOOK_S)

    def _look(self) -> None:
        self._look_is_due = False
        self._guarded(self._pass)
        self._look_again_later()

    def _pass(self) -> None:
        for key in list(self._planned):  # planned, and then not wanted after all
            del self._planned[key]
            self.view.release(key)
        self._sync_running()
        if not self.view.has_crowded or self.scheduler.queued or not self._is_started:
            return
        idle = self.view.idle
        asked_before = self.steals["asked"]
        for address in idle[:_IDLE_PER_PASS]:
            self._tell(WorkerIdle(address))
        if len(idle) > _IDLE_PER_PASS and self.steals["asked"] > asked_before:
            self._ask_for_pass()

    @property
    def _is_started(self) -> bool:
        return "stealing" in self.scheduler.periodic_callbacks

    def move_task_confirm(self, *, key: str, state: str, stimulus_id: str, worker: str | None = None) -> None:
        """Take a worker's answer to a steal request; never raises."""
        try:
            self._answered(key, state, stimulus_id, worker)
        except Exception as error:  # noqa: BLE001 -- raising here would close the worker's stream
            self.fail(error)

    def _answered(self, key: Key, state: str, stimulus_id: str, worker: str | None) -> None:
        ts = self.scheduler.tasks.get(key)
        if ts is None:
            logger.debug("The task of a steal's answer is gone: %s", key)
            return
        pending = self.in_flight.get(ts)
        if pending is None or pending["stimulus_id"] != stimulus_id:
            self.log(
                ("already-aborted" if pending is None else "stale-response", key, state, worker, stimulus_id)
            )
            return
        self._remove_from_in_flight(ts)
        victim, thief = pending["victim"], pending["thief"]
        story = (key, state, victim.address, thief.address, stimulus_id)
        is_thief_there = (
            self.scheduler.workers.get(thief.address) is thief and thief in self.scheduler.running
        )
        if state in seams.GIVEN_UP and is_thief_there:
            seams.hand_over(self.scheduler, ts, victim, thief)
            self.steals["confirmed"] += 1
            self.log(("confirm", *story))
            self._tell(StealConfirmed(key, victim.address, thief.address))
        elif state in seams.STARTED:
            self.steals["refused"] += 1
            self.log(("already-computing", *story))
            self._return_to(ts, victim)
            self._tell(StealRefused(key, victim.address, thief.address))
        else:
            self.log(("reschedule", not is_thief_there, *story))
            seams.reschedule(self.scheduler, ts, stimulus_id)
        seams.slots_may_have_opened(self.scheduler, victim, thief, stimulus_id=stimulus_id)
        self._ask_for_pass()

    def _return_to(self, ts: TaskState, victim: WorkerState) -> None:
        entry = self.view.assigned.get(ts.key)
        if entry is not None and victim.address in self.view.workers:
            task = entry[0]
            task.is_movable = False  # it has started
            self.view.assign(task, victim.address, time())

    # The policy's answers

    def _tell(self, event: Event, tasks: list[TaskView] | None = None) -> None:
        """Hand an event to the policy and carry out each instruction before it gives the next."""
        if self.error is not None:
            return
        self.view.bandwidth = self.scheduler.bandwidth
        by_key = {task.key: task for task in tasks or ()}
        requests = []
        for instruction in self.policy.handle(event, self.view, time()):
            match instruction:
                case AssignTask(key, worker):
                    self.view.assign(by_key[key], worker, time())
                    self._planned[key] = worker
                case SetPriority(key, order):
                    ts = self.scheduler.tasks[key]
                    ts.priority = by_key[key].priority = (*(ts.priority or ())[:-1], order)
                case StealTask():
                    request = self._request(instruction)
                    if request is not None:
                        requests.append(request)
        if requests:
            self.log(("request", requests))
            self.count += 1

    def _request(self, steal: StealTask) -> tuple[Any, ...] | None:
        ts = self.scheduler.tasks[steal.key]
        victim, thief = self.scheduler.workers[steal.victim], self.scheduler.workers[steal.thief]
        if ts in self.in_flight or ts.processing_on is not victim or thief not in self.scheduler.running:
            return None
        task = self.view.assigned[steal.key][0]
        if not self.move_task_request(ts, victim, thief).startswith("steal-"):
            return None
        self.view.assign(task, thief.address, time())
        self.steals["asked"] += 1
        cost_s = task.cost_s + self.view.transfer_s(task, thief.address)
        self.metrics["request_count_total"][0] += 1
        self.metrics["request_cost_total"][0] += cost_s
        # The form that the dashboard's stealing page reads; the reason comes after what it reads.
        return (
            *(time(), 0, steal.key, cost_s),
            *(victim.address, victim.occupancy),
            *(thief.address, thief.occupancy),
            steal.reason,
        )
