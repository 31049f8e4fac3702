"""Scheduler's end of prefetch: which tasks are sent before their inputs exist, confirmed or withdrawn.

Dask sends a task once the scheduler knows that its inputs exist. Between two tasks of a chain lies a round
trip, in which the worker idles. If all inputs of a task exist or are being made on one worker without other
tasks in its queue, the task will run there anyway. So it is prefetched, and its own successor with it.

For the scheduler it stays a task that waits for its inputs. When they exist, it is placed on that worker, and
a confirmation is sent instead of the task. If the placement has changed, the task is withdrawn, though it may
have run by then. The worker reports a prefetched task after the ends of its inputs, in the same stream, so
messages arrive in the order of the tasks. Tasks that call the scheduler themselves, like those of P2P
shuffles, are not prefetched. distributed's run ids tell withdrawn runs from valid ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import CallChange, Change
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.features.prefetch_worker import CONFIRM, SEND, WITHDRAW, PrefetchedTasks
from ferroflow_dask.scheduler.hooks import Watch
from ferroflow_dask.scheduler.remote import Remote

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

#: Length of a chain that is prefetched: more tasks than run in a round trip.
_MOST_AHEAD = 8
#: Tasks with more inputs or dependents are not prefetched.
_MOST_LINKS = 16
#: Reasons in the log of decisions.
_REASON = "prefetched with the tasks that make its inputs"
_WITHDRAWN = "it was prefetched, and its placement changed"


@dataclass(frozen=True)
class _Ahead:
    """A prefetched task: its worker and its run id."""

    worker: str
    run_id: int


class Prefetch(Feature):
    """Sends tasks before their inputs exist; O(links of a task) for each change."""

    name = "prefetch"
    summary = "Tasks are sent to workers before their inputs exist"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._scheduler = core.scheduler
        #: Its ends on workers.
        self.remote = Remote(core, PrefetchedTasks, joined=self._supports)
        self._supporting = self.remote.supporting
        #: Prefetched tasks that are not placed yet.
        self.ahead: dict[Key, _Ahead] = {}
        self.placed = self.ahead
        #: Tasks on workers whose dependents are to be looked at, in order.
        self.new: dict[Key, None] = {}
        #: Prefetched tasks that are processing.
        self.early = core.sent_early
        #: Tasks that were prefetched to workers that died: they may have ended the worker. The core knows
        #: other tasks that may have, and those that have refused a worker.
        self.doubtful: set[Key] = set()
        # Prefetched tasks by outcome: placed there, placed elsewhere, or lost with the worker.
        self._outcomes = {"confirmed": 0, "withdrawn": 0, "lost": 0}

    def unavailable(self) -> str:
        """Return why no tasks are prefetched."""
        keeps = self.core.policy.keeps_successors
        return "" if keeps else f"{type(self.core.policy).__name__} may move a task away from its inputs"

    def changes(self) -> Iterable[Change]:
        """Prefetch from now on, to workers that announce that they support it."""
        yield self.remote
        yield CallChange("prefetched tasks", lambda: None, self._close)

    def counts(self) -> Mapping[str, int]:
        """Return prefetched tasks by outcome: placed there, placed elsewhere, or lost with the worker."""
        return self._outcomes

    def _close(self) -> None:
        self.failed()  # the workers still have their ends
        self.restart()

    def failed(self) -> None:
        """Withdraw all prefetched tasks that are not confirmed: Dask does not know of them.

        The scheduler sends the confirmations of a transition after it. Workers must still understand them.
        """
        for key in list(self.ahead):
            if not self._is_confirmed(key):
                self._withdraw(key)

    def _is_confirmed(self, key: Key) -> bool:
        # After a failure between the confirmation of a task and the hook that follows, `ahead` still has it.
        ts, ahead = self._scheduler.tasks.get(key), self.ahead.get(key)
        if ts is None or ts.processing_on is None or ahead is None:
            return False
        return (ts.processing_on.address, ts.run_id) == (ahead.worker, ahead.run_id)

    def restart(self) -> None:
        """Forget all tasks."""
        self._outcomes["lost"] += len(self.ahead)
        self.ahead.clear()
        self.new.clear()
        self.early.clear()
        self.doubtful.clear()

    def _supports(self, address: str) -> None:
        for ts in self._scheduler.workers[address].processing:
            self._look_after(ts.key)

    def remove_worker(self, address: str) -> None:
        """Forget the tasks that were prefetched to a worker."""
        for key in [key for key, ahead in self.ahead.items() if ahead.worker == address]:
            self._withdraw(key)

    def pending(self) -> Collection[Key]:
        """Return the prefetched tasks, placed or not."""
        return [*self.ahead, *self.early]

    def task_sent(self, ts: TaskState) -> None:
        """Note that a task with dependents was sent to a worker."""
        if self._supporting:
            self._look_after(ts.key)

    def task_waits(self, ts: TaskState) -> None:
        """Note that a task waits for inputs."""
        waiting_on = ts.waiting_on or ()
        for needed in waiting_on if self._supporting and len(waiting_on) <= _MOST_LINKS else ():
            if needed.state == "processing":
                self._look_after(needed.key)

    def watches(self) -> Iterable[Watch]:
        """Follow all tasks while some are prefetched, and those that were."""
        yield Watch(self.ahead, False, self._changed)
        yield Watch(self.early, True, self._left)
        yield Watch(self.doubtful, True, self._ended)

    def _left(self, key: Key, start: str, finish: str) -> None:
        if start == "processing":
            self.early.discard(key)

    def _ended(self, key: Key, start: str, finish: str) -> None:
        if finish in ("memory", "erred", "forgotten"):
            self.doubtful.discard(key)

    def _changed(self, key: Key, start: str, finish: str) -> None:
        ahead = self.ahead.get(key) if start == "waiting" else None
        if ahead is not None:
            ts = self._scheduler.tasks.get(key)
            ws = ts.processing_on if ts is not None else None
            if finish == "processing" and ws is not None and ws.address == ahead.worker:
                del self.ahead[key]
                self.early.add(key)
                self._outcomes["confirmed"] += 1
            else:
                self._withdraw(key)
        if finish in ("released", "waiting", "erred"):
            self.task_moved(key)

    def _look_after(self, key: Key) -> None:
        if not self.new:
            self.core.passes.ask()
        self.new[key] = None

    def task_moved(self, key: Key) -> None:
        """Note that a task leaves its worker: the tasks prefetched after it are withdrawn."""
        for dependent in self._ahead_of(key):
            self._withdraw(dependent)

    def place(self, ts: TaskState) -> tuple[str, str] | None:
        """Return the worker that a ready task was prefetched to, if the task can run there."""
        ahead = self.ahead.get(ts.key)
        ws = self._scheduler.workers.get(ahead.worker) if ahead is not None else None
        if ws is None or ws not in self._scheduler.running:
            return None
        return (ws.address, _REASON) if _distributed.may_run_on(self._scheduler, ts, ws) else None

    def in_pass(self) -> None:
        """Prefetch the dependents of tasks that started processing."""
        new, self.new = self.new, {}
        for key in new:
            ts = self._scheduler.tasks.get(key)
            if ts is None or ts.state != "processing":
                continue
            ws = ts.processing_on
            assert ws is not None
            has_time = len(ws.processing) <= ws.nthreads and ws in self._scheduler.running
            if has_time and ws.address in self._supporting and self.core.is_usual(ws.address):
                self._send_after(ts)

    def _send_after(self, ts: TaskState) -> None:
        ws = ts.processing_on
        assert ws is not None
        for _ in range(_MOST_AHEAD):
            # If a prefetched task kills the worker, Dask counts that once against the task before it.
            if len(ts.dependents) > _MOST_LINKS or not self._scheduler.allowed_failures:
                return
            sent = [other for other in ts.dependents if other.key in self.ahead]
            following = sent or [other for other in ts.dependents if self._follows(other, ws)]
            if not following:
                return
            ts = min(following, key=lambda other: other.priority or ())
            if not sent:
                self._send(ts, ws)

    def _follows(self, ts: TaskState, ws: WorkerState) -> bool:
        """Return whether a task can be sent to a worker that has or makes all of its inputs."""
        if ts.state != "waiting" or len(ts.dependencies) > _MOST_LINKS or len(ts.dependents) > _MOST_LINKS:
            return False
        for needed in ts.dependencies:  # most tasks end here
            if needed.state == "memory":
                if ws not in (needed.who_has or ()):
                    for brings in self.core.hooks.brings:
                        if brings(ws, needed.key):
                            break
                    else:
                        return False
            elif needed.state == "processing":
                if needed.processing_on is not ws:
                    return False
            else:
                ahead = self.ahead.get(needed.key)
                if ahead is None or ahead.worker != ws.address:
                    return False
        makers = [needed for needed in ts.dependencies if needed.state == "processing"]
        return (
            ts.key not in self.doubtful
            and ts.key not in self.core.suspects
            and ts.key not in self.core.refused
            and not _distributed.is_restricted(ts)
            and all(map(_distributed.is_plain, (ts, *ts.dependents, *makers)))
        )

    def _send(self, ts: TaskState, ws: WorkerState) -> None:
        message = _distributed.early_message(self._scheduler, ts, ws)
        awaits = [(one.key, self._run_of(one)) for one in ts.dependencies if one.state != "memory"]
        self.ahead[ts.key] = _Ahead(ws.address, message["run_id"])
        for is_on, complete in self.core.hooks.message:
            message = complete(ts, ws, message) if is_on else message
        message |= {"op": SEND, "awaits": awaits, "starts_by": message["op"]}
        self._scheduler.worker_send(ws.address, message)

    def _run_of(self, ts: TaskState) -> int | None:
        return self.ahead[ts.key].run_id if ts.key in self.ahead else ts.run_id

    def instead(self, ts: TaskState) -> dict[str, Any] | None:
        """Return the confirmation that replaces the message of a prefetched task; None for other tasks."""
        ahead = self.ahead.get(ts.key)
        if ahead is None or ts.processing_on is None or ts.processing_on.address != ahead.worker:
            return None
        ts.run_id = ahead.run_id
        return {"op": CONFIRM, "key": ts.key, "run_id": ahead.run_id, "stimulus_id": "ferroflow-confirm"}

    def may_drop(self, key: Key, address: str) -> bool:
        """Return whether a worker needs its replica of a key for no prefetched task."""
        return all(self.ahead[dependent].worker != address for dependent in self._ahead_of(key))

    def _ahead_of(self, key: Key) -> list[Key]:
        """Return the prefetched dependents of a task."""
        ts = self._scheduler.tasks.get(key) if self.ahead else None
        return [other.key for other in ts.dependents if other.key in self.ahead] if ts is not None else []

    def task_redefined(self, key: Key) -> None:
        """Withdraw a task that becomes another one."""
        self._withdraw(key)

    def _withdraw(self, key: Key) -> None:
        if key not in self.ahead:
            return
        address = self.ahead[key].worker
        runs = self._take_back(key)
        for withdrawn, _ in runs:
            self.core.decisions.note(withdrawn, "withdrawn", address, _WITHDRAWN)
        if address not in self._scheduler.stream_comms:
            self._outcomes["lost"] += len(runs)
            self.doubtful.update(key for key, _ in runs)
            return
        self._outcomes["withdrawn"] += len(runs)
        message = {"op": WITHDRAW, "runs": runs, "stimulus_id": "ferroflow-withdraw"}
        self._scheduler.worker_send(address, message)

    def _take_back(self, key: Key) -> list[tuple[Key, int]]:
        """Forget a prefetched task and those prefetched after it, which come first in the result."""
        ahead = self.ahead.pop(key)
        runs = []
        for dependent in self._ahead_of(key):
            if dependent in self.ahead:  # else it depends on another one, too
                runs += self._take_back(dependent)
        return [*runs, (key, ahead.run_id)]
