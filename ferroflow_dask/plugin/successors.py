"""Tasks go to a worker together with those that make their inputs, and start as soon as these end.

Dask sends a task once the scheduler knows that its inputs are there. Between two tasks of a chain lies a
round trip, in which the worker has nothing to do. But where all inputs of a task are, or are being made, on
one worker that has no other tasks waiting, it will run there anyway: so it is sent ahead, as the successor
of the task that runs, and the successor's own successor with it.

To the scheduler it stays a task that waits for its inputs. When they are there, it is placed as was
foreseen, and instead of the task a confirmation is sent; or, if anything has come between, it is withdrawn,
though it may have run by then. What the worker does early it tells after the ends of the inputs, in the same
stream, so that the scheduler does not hear of a task before its turn. (Whoever asks the scheduler by another
way, as the tasks of a shuffle do, might come before; those are not sent ahead.) The numbers of runs that
distributed gives to tasks keep apart what was withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.plugin import seams
from ferroflow_dask.plugin.inlining import Inlining
from ferroflow_dask.plugin.successors_worker import CONFIRM, SEND, WITHDRAW

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

#: Tasks in a row that are sent ahead: more than run in a round trip.
_MOST_AHEAD = 8
#: Inputs of a task, and tasks that need one result, that are looked at.
_MOST_LINKS = 16


@dataclass(frozen=True)
class _Ahead:
    """A task that was sent ahead: where to, and the number of its run."""

    worker: str
    run_id: int


class Successors:
    """Sends tasks ahead, from `open` to `close`; O(links of a task) for each change.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    is_usual : callable
        Returns whether a worker, by its address, is as fast as others, so that a task whose inputs are
        there can end nowhere sooner.
    ask : callable
        Asks for a call of `send` once the present transitions are done.
    was_withdrawn : callable
        Told the key of a task that was sent ahead in vain, and the worker's address.
    inlining : Inlining
        Sends small inputs along.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        is_usual: Callable[[str], bool],
        ask: Callable[[], None],
        was_withdrawn: Callable[[Key, str], None],
        inlining: Inlining,
    ) -> None:
        self._scheduler = scheduler
        self._is_usual = is_usual
        self._ask = ask
        self._was_withdrawn = was_withdrawn
        self._inlining = inlining
        self.is_open = False
        self._listening: set[str] = set()
        self._ahead: dict[Key, _Ahead] = {}
        # On workers, and to be looked at for what may follow them, in order.
        self._new: dict[Key, None] = {}
        #: Tasks on workers that were there before their inputs.
        self.early: set[Key] = set()
        # Sent ahead to workers that left: they may have ended them, and whoever leads would be blamed.
        self._doubtful: set[Key] = set()
        #: What was sent ahead, by what became of it: placed there, placed elsewhere, or lost with its worker.
        self.outcomes = {"confirmed": 0, "withdrawn": 0, "lost": 0}

    def open(self) -> None:
        """Send ahead from now on, to the workers that tell that they listen."""
        self.is_open = True

    def close(self) -> None:
        """Withdraw all that was sent ahead and is not confirmed."""
        for key in list(self._ahead):
            self._withdraw(key)
        self.clear()
        self._listening.clear()
        self.is_open = False

    def clear(self) -> None:
        """Forget all tasks."""
        self.outcomes["lost"] += len(self._ahead)
        self._ahead.clear()
        self._new.clear()
        self.early.clear()
        self._doubtful.clear()

    def listens(self, address: str) -> None:
        """Note that a worker understands what is sent ahead."""
        if self.is_open and address in self._scheduler.workers:
            self._listening.add(address)
            for ts in self._scheduler.workers[address].processing:
                self._look_after(ts.key)

    def left(self, address: str) -> None:
        """Forget a worker, and what it had."""
        self._listening.discard(address)
        for key in [key for key, ahead in self._ahead.items() if ahead.worker == address]:
            self._withdraw(key)

    @property
    def n_ahead(self) -> int:
        """Tasks that were sent ahead and are not placed yet."""
        return len(self._ahead)

    def keys(self) -> list[Key]:
        """Return the tasks that were sent ahead, and that are on workers because they were."""
        return [*self._ahead, *self.early]

    # What happens to tasks

    def changed(self, key: Key, start: str, finish: str) -> None:
        """Note a task's transition, whatever it is."""
        if self._listening and finish == "processing":
            self._look_after(key)
        elif self._listening and finish == "waiting":
            waiting_on = self._scheduler.tasks[key].waiting_on or ()
            for needed in waiting_on if len(waiting_on) <= _MOST_LINKS else ():
                if needed.state == "processing":
                    self._look_after(needed.key)
        ahead = self._ahead.get(key) if start == "waiting" else None
        if ahead is not None:
            ts = self._scheduler.tasks.get(key)
            ws = ts.processing_on if ts is not None else None
            if finish == "processing" and ws is not None and ws.address == ahead.worker:
                del self._ahead[key]
                self.early.add(key)
                self.outcomes["confirmed"] += 1
            else:
                self._withdraw(key)
        elif start == "processing":
            self.early.discard(key)
        if finish in ("released", "waiting", "erred"):
            self.moved(key)
        if finish in ("memory", "erred", "forgotten"):
            self._doubtful.discard(key)

    def _look_after(self, key: Key) -> None:
        self._new[key] = None
        self._ask()

    def moved(self, key: Key) -> None:
        """Note that a task does not end where it was: what was sent there to follow it is withdrawn."""
        for dependent in self._ahead_of(key):
            self._withdraw(dependent)

    def worker_of(self, ts: TaskState) -> str | None:
        """Return where a task whose inputs are there was sent ahead, if it can run there."""
        ahead = self._ahead.get(ts.key)
        ws = self._scheduler.workers.get(ahead.worker) if ahead is not None else None
        if ws is None or ws not in self._scheduler.running:
            return None
        return ws.address if seams.may_run_on(self._scheduler, ts, ws) else None

    def send(self) -> None:
        """Send ahead what may follow the tasks on workers, by what is new; not within a transition."""
        new, self._new = self._new, {}
        for key in new:
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ts.state == "processing" and self._has_time(ts):
                self._send_after(ts)

    # Sending

    def _has_time(self, ts: TaskState) -> bool:
        ws = ts.processing_on
        assert ws is not None
        return (
            ws.address in self._listening
            and ws in self._scheduler.running
            and len(ws.processing) <= ws.nthreads
            and self._is_usual(ws.address)
        )

    def _send_after(self, ts: TaskState) -> None:
        ws = ts.processing_on
        assert ws is not None
        for _ in range(_MOST_AHEAD):
            # Were a worker to die of what was sent ahead, the one that leads would be blamed for once.
            if len(ts.dependents) > _MOST_LINKS or not self._scheduler.allowed_failures:
                return
            sent = [other for other in ts.dependents if other.key in self._ahead]
            following = sent or [other for other in ts.dependents if self._follows(other, ws)]
            if not following:
                return
            ts = min(following, key=lambda other: other.priority or ())
            if not sent:
                self._send(ts, ws)

    def _follows(self, ts: TaskState, ws: WorkerState) -> bool:
        return (
            ts.state == "waiting"
            and ts.key not in self._doubtful
            and len(ts.dependencies) <= _MOST_LINKS
            and len(ts.dependents) <= _MOST_LINKS
            and not seams.is_restricted(ts)
            and all(map(seams.is_plain, (ts, *ts.dependents)))
            and all(self._will_be_on(ws, needed) for needed in ts.dependencies)
        )

    def _will_be_on(self, ws: WorkerState, needed: TaskState) -> bool:
        if needed.state == "memory":
            return ws in (needed.who_has or ()) or self._inlining.comes_to(ws, needed.key)
        if needed.state == "processing":
            return needed.processing_on is ws and seams.is_plain(needed)
        ahead = self._ahead.get(needed.key)
        return ahead is not None and ahead.worker == ws.address

    def _send(self, ts: TaskState, ws: WorkerState) -> None:
        message = seams.early_message(self._scheduler, ts, ws)
        awaits = [
            (needed.key, self._run_of(needed)) for needed in ts.dependencies if needed.state != "memory"
        ]
        self._ahead[ts.key] = _Ahead(ws.address, message["run_id"])
        self._inlining.before(ts, ws)
        self._scheduler.worker_send(ws.address, message | {"op": SEND, "awaits": awaits})

    def _run_of(self, ts: TaskState) -> int | None:
        return self._ahead[ts.key].run_id if ts.key in self._ahead else ts.run_id

    def message(self, ts: TaskState) -> dict[str, Any] | None:
        """Return what is sent in place of a task that its worker has already, if it has."""
        ahead = self._ahead.get(ts.key)
        if ahead is None or ts.processing_on is None or ts.processing_on.address != ahead.worker:
            return None
        ts.run_id = ahead.run_id
        return {"op": CONFIRM, "key": ts.key, "run_id": ahead.run_id, "stimulus_id": "ferroflow-confirm"}

    def may_drop(self, key: Key, address: str) -> bool:
        """Return whether a worker can do without its copy of a result, for tasks that it may run early."""
        return all(self._ahead[dependent].worker != address for dependent in self._ahead_of(key))

    def _ahead_of(self, key: Key) -> list[Key]:
        """Return what needs a task's result and was sent ahead."""
        ts = self._scheduler.tasks.get(key) if self._ahead else None
        return [other.key for other in ts.dependents if other.key in self._ahead] if ts is not None else []

    def _withdraw(self, key: Key) -> None:
        if key not in self._ahead:
            return
        address = self._ahead[key].worker
        runs = self._take_back(key)
        for withdrawn, _ in runs:
            self._was_withdrawn(withdrawn, address)
        if address not in self._scheduler.stream_comms:
            self.outcomes["lost"] += len(runs)
            self._doubtful.update(key for key, _ in runs)
            return
        self.outcomes["withdrawn"] += len(runs)
        message = {"op": WITHDRAW, "runs": runs, "stimulus_id": "ferroflow-withdraw"}
        self._scheduler.worker_send(address, message)
        for withdrawn, _ in runs:
            self._inlining.took_back(withdrawn, address)

    def _take_back(self, key: Key) -> list[tuple[Key, int]]:
        """Forget a task that was sent ahead, and what was sent there to follow it, which comes first."""
        ahead = self._ahead.pop(key)
        runs = []
        for dependent in self._ahead_of(key):
            if dependent in self._ahead:  # else it followed another of them
                runs += self._take_back(dependent)
        return [*runs, (key, ahead.run_id)]
