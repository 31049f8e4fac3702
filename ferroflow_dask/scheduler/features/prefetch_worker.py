"""Worker's end of prefetch: keeps tasks until their inputs exist on this worker, then starts them.

The worker's state machine gets such a task by the message that the scheduler would have sent, once all inputs
are in memory; for the state machine, the task only comes early. This module is sent to workers by value and
must not import this package, except `remote_worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.worker_state_machine import ComputeTaskEvent, FreeKeysEvent

from ferroflow_dask.scheduler.remote_worker import WorkerEnd

if TYPE_CHECKING:
    from distributed import Worker

#: Operations in messages of the scheduler: a task before its inputs exist, its confirmation, its withdrawal.
SEND, CONFIRM, WITHDRAW = "ferroflow-send", "ferroflow-confirm", "ferroflow-withdraw"
#: States of a task that will run, runs, or has run and was reported.
TAKEN_ON = frozenset({"waiting", "ready", "constrained", "executing", "long-running", "memory", "error"})


class PrefetchedTasks(WorkerEnd):
    """Tasks that wait on a worker until their inputs exist there."""

    name = "prefetch"

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._state = worker.state
        # Each with the handler that it had when it came: the handler may be removed before it is called.
        self._messages: dict[Key, tuple[Callable[..., object], dict[str, Any]]] = {}
        # For each task the run ids of the inputs that it waits for; for each input the tasks that wait.
        self._awaited: dict[Key, dict[Key, int]] = {}
        self._waiting: dict[Key, dict[Key, None]] = {}

    def handlers(self) -> dict[str, Callable[..., object]]:
        """Return the handlers of tasks, confirmations and withdrawals."""
        return {SEND: self.take, CONFIRM: self.confirm, WITHDRAW: self.withdraw}

    def __len__(self) -> int:
        return len(self._messages)

    def take(self, awaits: Collection[tuple[Key, int]], starts_by: str, **message: Any) -> None:
        """Keep a task until its inputs exist.

        Parameters
        ----------
        awaits : pairs of key and int
            The inputs that do not exist yet, each with its run id: the result of an earlier run is about to
            be dropped.
        starts_by : str
            The operation of the message that computes the task.
        **message
            The other fields of that message.
        """
        key: Key = message["key"]
        self._forget(key)
        self._messages[key] = self.worker.stream_handlers.get(starts_by, self._compute), message
        self._awaited[key] = {needed: run for needed, run in awaits if not self._has(needed, run)}
        for needed in self._awaited[key]:
            self._waiting.setdefault(needed, {})[key] = None
        if not self._awaited[key]:
            self._start(key)

    def confirm(self, key: Key, run_id: int, stimulus_id: str) -> None:
        """Start a task that is kept; ask the scheduler to place it again if it is not on this worker."""
        if key in self._messages:
            self._begin(key)
        elif (ts := self._state.tasks.get(key)) is None or ts.run_id != run_id or ts.state not in TAKEN_ON:
            self.worker.batched_send({"op": "reschedule", "key": key, "stimulus_id": stimulus_id})

    def withdraw(self, runs: Collection[tuple[Key, int]], stimulus_id: str) -> None:
        """Drop tasks, started or not; each by its key and run id."""
        for key, run_id in runs:
            if key in self._messages:
                self._forget(key)
            elif (ts := self._state.tasks.get(key)) is not None and ts.run_id == run_id:
                self.worker.handle_stimulus(FreeKeysEvent(keys=[key], stimulus_id=stimulus_id))

    def closed(self) -> None:
        """Forget all tasks."""
        for key in list(self._messages):
            self._forget(key)

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Follow a task's transition; called by the state machine in the middle of its work."""
        if finish != "memory" or key not in self._waiting:
            return
        complete = []
        for successor in list(self._waiting[key]):
            awaited = self._awaited[successor]
            if self._has(key, awaited[key]):
                self._no_longer_awaits(successor, key)
                if not awaited:
                    complete.append(successor)
        # After this event of the state machine.
        soon = self.worker.loop.asyncio_loop.call_soon  # type: ignore[attr-defined]
        for successor in sorted(complete, key=lambda one: tuple(self._messages[one][1]["priority"])):
            soon(self._start, successor)

    def _has(self, key: Key, run_id: int) -> bool:
        ts = self._state.tasks.get(key)
        return ts is not None and ts.state == "memory" and ts.run_id == run_id

    def _start(self, key: Key) -> None:
        _, message = self._messages.get(key, (None, None))
        # Else it was withdrawn or confirmed since, or an input was dropped and the confirmation starts it.
        if message is not None and all(needed in self._state.data for needed in message["nbytes"]):
            self._begin(key)

    def _begin(self, key: Key) -> None:
        compute, message = self._messages[key]
        self._forget(key)
        compute(**message)

    def _compute(self, **message: Any) -> None:
        self.worker.handle_stimulus(ComputeTaskEvent(**message))

    def _forget(self, key: Key) -> None:
        self._messages.pop(key, None)
        for needed in list(self._awaited.get(key, ())):
            self._no_longer_awaits(key, needed)
        self._awaited.pop(key, None)

    def _no_longer_awaits(self, key: Key, needed: Key) -> None:
        del self._awaited[key][needed]
        del self._waiting[needed][key]
        if not self._waiting[needed]:
            del self._waiting[needed]
