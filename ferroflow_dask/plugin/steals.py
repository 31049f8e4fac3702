"""Ask workers for tasks, and take their answers: the protocol of distributed's stealing, made safe.

The handler of the answers never raises, since that would cost the worker its connection, and a task that
was given up is never lost, whatever else happened meanwhile.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from itertools import islice
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.stealing import WorkStealing

from ferroflow_dask.plugin import seams
from ferroflow_dask.plugin.bypass import Bypass
from ferroflow_dask.plugin.describe import TaskDescriber
from ferroflow_dask.plugin.journal import Journal
from ferroflow_dask.plugin.messages import Messages
from ferroflow_dask.plugin.passes import Passes
from ferroflow_dask.policy import ClusterView
from ferroflow_dask.policy.events import Event, StealConfirmed, StealRefused
from ferroflow_dask.policy.instructions import StealTask

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

#: Where Dask's stealing tells its story, for those who listen there.
stealing_logger = logging.getLogger("distributed.stealing")

#: Why a policy, which may be anybody's, does not get what it asks for.
RESTRICTED = "the policy asked for it, but the task's restrictions exclude this worker"


class Steals(WorkStealing):
    """The part of the shell that carries out steals; `FerroflowStealing` makes what it needs."""

    view: ClusterView
    journal: Journal
    clock: Callable[[], float]
    #: Steals that were asked for, and how they ended: given up by the victim, refused by it, or
    #: overtaken by events (the task ended or was released, the thief left).
    steals: dict[str, int]
    #: Tasks that one worker (the first) has given up to another, of workers that are there.
    flows: Counter[tuple[str, str]]
    _bypass: Bypass
    _describe: TaskDescriber
    _passes: Passes
    messages: Messages

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Give up: from now on Dask decides, as without us."""

    @abstractmethod
    def _tell(self, event: Event) -> None:
        """Hand an event to the policy."""

    def ask_for(self, steal: StealTask) -> tuple[Any, ...] | None:
        """Ask a worker for a task; return the request as the dashboard reads it.

        None if it is too late, or the task may not run there.
        """
        ts = self.scheduler.tasks[steal.key]
        victim, thief = self.scheduler.workers[steal.victim], self.scheduler.workers[steal.thief]
        if ts in self.in_flight or ts.processing_on is not victim or thief not in self.scheduler.running:
            return None
        task = self.view.assigned[steal.key][0]
        if not (task.may_run_on(steal.thief) and seams.may_run_on(self.scheduler, ts, thief)):
            self._steal_declined(steal.key, steal.victim, steal.thief, RESTRICTED)
            return None
        now = self.clock()
        cost_s = task.cost_s + self.view.transfer_s(task, thief.address)
        # What each has to do, of both before the move: Dask's occupancy takes as long to ask for as all else.
        busy_s, idle_s = (self.view.workers[ws.address].backlog_s for ws in (victim, thief))
        if not self.move_task_request(ts, victim, thief).startswith("steal-"):
            self.view.assign(task, victim.address, now)
            return None
        task.is_movable = False  # until the answer is here
        task.asked_at = now
        task.n_asked += 1
        self._bypass.sent(task)  # the request has taken it off, as what becomes long-running is
        self.view.assign(task, thief.address, now)
        self.steals["asked"] += 1
        self.journal.note(now, steal.key, "steal asked", steal.thief, steal.reason)
        self.metrics["request_count_total"][0] += 1
        self.metrics["request_cost_total"][0] += cost_s
        # The form that the dashboard's stealing page reads; the reason comes after what it reads.
        story = (now, 0, steal.key, cost_s, victim.address, busy_s, thief.address, idle_s)
        return (*story, steal.reason)

    def move_task_confirm(self, *, key: str, state: str, stimulus_id: str, worker: str | None = None) -> None:
        """Take a worker's answer to a steal request; never raises."""
        try:
            self._answered(key, state, stimulus_id, worker)
        except Exception as error:  # noqa: BLE001 -- raising here would close the worker's stream
            self.fail(error)
            if state in seams.GIVEN_UP and worker is not None:  # nobody has the task now
                seams.reschedule_from(self.scheduler, key, worker, stimulus_id)

    def _answered(self, key: Key, state: str, stimulus_id: str, worker: str | None) -> None:
        ts = self.scheduler.tasks.get(key)
        if ts is None:
            stealing_logger.debug("Key released between request and confirm: %s", key)
            return
        pending = self.in_flight.get(ts)
        # Of one that was asked before us, by another of our kind, the number may be the same.
        is_other = pending is not None and worker not in (None, pending["victim"].address)
        if pending is None or is_other or pending["stimulus_id"] != stimulus_id:
            reason = "already-aborted" if pending is None else "stale-response"
            self.log((reason, key, state, worker, stimulus_id))
            return
        self._remove_from_in_flight(ts)
        self.view.observe_answer(key, self.clock())
        victim, thief = pending["victim"], pending["thief"]
        if ts.processing_on is not victim:
            self._steal_ended(key, "aborted", thief, "the task was placed anew meanwhile")
            return
        story = (key, state, victim.address, thief.address, stimulus_id)
        is_there = self.scheduler.workers.get(thief.address) is thief
        event: Event | None = None
        if state in seams.GIVEN_UP and is_there and seams.can_run(self.scheduler, ts, thief):
            self.messages.successors.moved(key)
            seams.hand_over(self.scheduler, ts, victim, thief)
            self.view.set_movable(key)
            self._steal_ended(key, "confirmed", thief, f"{victim.address} gave it up")
            self.flows[victim.address, thief.address] += 1
            self.log(("confirm", *story))
            event = StealConfirmed(key, victim.address, thief.address)
        elif state in seams.STARTED:
            self._steal_ended(key, "refused", victim, f"it is {state} there")
            self.log(("already-computing", *story))
            self._return_to(ts, victim)
            event = StealRefused(key, victim.address, thief.address)
        else:
            reason = f"{victim.address} does not have it, or {thief.address} cannot take it"
            self._steal_ended(key, "aborted", thief, reason)
            self.log(("reschedule", not is_there, *story))
            seams.reschedule(self.scheduler, ts, stimulus_id)
        seams.slots_may_have_opened(self.scheduler, victim, thief, stimulus_id=stimulus_id)
        if event is not None:
            self._tell(event)
        self._passes.ask()

    def _take_blame_back(self, address: str, blamed: Collection[Key]) -> None:
        # Dask suspects all that a dead worker had, which from its queue are few: one task more than there are
        # threads. As many of what we sent may have run, and of what need not wait for data as many.
        worker = self.view.workers[address]
        n = worker.nthreads + 1
        may_have_run = {*islice(worker.queue, n)}
        may_have_run.update(islice((task for task in worker.queue if not task.missing_bytes(address)), n))
        waited = [task.key for task in worker.queue if not (task.has_started or task in may_have_run)]
        waited += [ts.key for ts, steal in self.in_flight.items() if steal["victim"].address == address]
        for key in waited:
            if key in blamed:
                seams.take_blame_back(self.scheduler, key)

    def _steal_declined(self, key: Key, victim: str, thief: str, reason: str) -> None:
        self.journal.note(self.clock(), key, "steal declined", thief, ("from {}: {}", victim, reason))

    def _steal_ended(self, key: Key, outcome: str, ws: WorkerState, reason: str) -> None:
        self.steals[outcome] += 1
        self.journal.note(self.clock(), key, f"steal {outcome}", ws.address, reason)

    def _return_to(self, ts: TaskState, victim: WorkerState) -> None:
        if victim.address not in self.view.workers or ts in victim.long_running:
            return
        entry = self.view.assigned.get(ts.key)
        task = entry[0] if entry is not None else self._describe(ts)
        task.is_movable = False
        self.view.assign(task, victim.address, self.clock())
        self.view.set_started(ts.key)
