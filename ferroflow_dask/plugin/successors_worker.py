"""The workers' end of `successors`: tasks that came before their inputs were made, and start with them.

The worker's state machine is told of such a task once all its inputs are in memory there, by the very
message that the scheduler would have sent; so to the state machine it only came early. What is here is sent
to workers by value and must not need this package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed import WorkerPlugin
from distributed.worker_state_machine import ComputeTaskEvent, FreeKeysEvent, StateMachineEvent

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.worker_state_machine import WorkerState

#: What the scheduler sends: a task before its inputs are made, that it is placed there as was foreseen, or
#: that it is not.
SEND, CONFIRM, WITHDRAW = "ferroflow-send", "ferroflow-confirm", "ferroflow-withdraw"
#: States of a task that runs, will run, or has run and told the scheduler so.
TAKEN_ON = frozenset({"waiting", "ready", "constrained", "executing", "long-running", "memory", "error"})
#: Under which workers tell that they understand it.
TOPIC = "ferroflow-successors"


class Held:
    """Tasks that wait on a worker for their inputs to be made there.

    Parameters
    ----------
    state : distributed.worker_state_machine.WorkerState
    handle : callable
        Hands an event to the state machine and carries out what it answers.
    soon : callable
        Calls a function with arguments once the state machine is done with the present event.
    send : callable
        Sends the scheduler a message.
    """

    def __init__(
        self,
        state: WorkerState,
        handle: Callable[[StateMachineEvent], None],
        soon: Callable[..., object],
        send: Callable[[dict[str, Any]], object],
    ) -> None:
        self._state = state
        self._handle = handle
        self._soon = soon
        self._send = send
        self._messages: dict[Key, dict[str, Any]] = {}
        # The runs that a task waits for, and by each of them the tasks that do.
        self._awaited: dict[Key, dict[Key, int]] = {}
        self._waiting: dict[Key, dict[Key, None]] = {}

    @property
    def handlers(self) -> dict[str, Callable[..., None]]:
        """What takes each kind of message."""
        return {SEND: self.take, CONFIRM: self.confirm, WITHDRAW: self.withdraw}

    def __len__(self) -> int:
        return len(self._messages)

    def take(self, awaits: Collection[tuple[Key, int]], **message: Any) -> None:
        """Keep a task until its inputs are there.

        Parameters
        ----------
        awaits : pairs of key and int
            The inputs that are still to be made, each with the number of its run: a copy of what an earlier
            run has made is about to go.
        **message
            What the task is computed by.
        """
        key: Key = message["key"]
        self._forget(key)
        self._messages[key] = message
        self._awaited[key] = {needed: run for needed, run in awaits if not self._has(needed, run)}
        for needed in self._awaited[key]:
            self._waiting.setdefault(needed, {})[key] = None
        if not self._awaited[key]:
            self._start(key)

    def confirm(self, key: Key, run_id: int, stimulus_id: str) -> None:
        """Start a task that is still kept; ask the scheduler to place it anew if it does not run here."""
        if key in self._messages:
            self._tell(self._messages[key])
        elif (ts := self._state.tasks.get(key)) is None or ts.run_id != run_id or ts.state not in TAKEN_ON:
            self._send({"op": "reschedule", "key": key, "stimulus_id": stimulus_id})

    def withdraw(self, runs: Collection[tuple[Key, int]], stimulus_id: str) -> None:
        """Forget tasks, whether they have started or not; each by its key and the number of its run."""
        for key, run_id in runs:
            if key in self._messages:
                self._forget(key)
            elif (ts := self._state.tasks.get(key)) is not None and ts.run_id == run_id:
                self._handle(FreeKeysEvent(keys=[key], stimulus_id=stimulus_id))

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Note what has become of a task; called by the state machine in the middle of its work."""
        if finish != "memory" or key not in self._waiting:
            return
        complete = []
        for successor in list(self._waiting[key]):
            awaited = self._awaited[successor]
            if self._has(key, awaited[key]):
                self._no_longer_awaits(successor, key)
                if not awaited:
                    complete.append(successor)
        for successor in sorted(complete, key=lambda one: tuple(self._messages[one]["priority"])):
            self._soon(self._start, successor)

    def _has(self, key: Key, run_id: int) -> bool:
        ts = self._state.tasks.get(key)
        return ts is not None and ts.state == "memory" and ts.run_id == run_id

    def _start(self, key: Key) -> None:
        message = self._messages.get(key)
        # Else it was withdrawn or confirmed since; or an input is gone, and it waits to be confirmed.
        if message is not None and all(needed in self._state.data for needed in message["nbytes"]):
            self._tell(message)

    def _tell(self, message: dict[str, Any]) -> None:
        self._forget(message["key"])
        self._handle(ComputeTaskEvent(**message))

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


class WorkerSuccessors(WorkerPlugin):
    """Keeps tasks for a worker."""

    def setup(self, worker: Worker) -> None:
        """Listen to what the scheduler sends early; called by distributed on each worker."""
        # What was sent to one that was here before is withdrawn or confirmed only now.
        earlier = getattr(worker.stream_handlers.get(SEND), "__self__", None)
        self._held: Held = earlier or Held(
            worker.state,
            worker.handle_stimulus,
            worker.loop.asyncio_loop.call_soon,  # type: ignore[attr-defined]
            worker.batched_send,
        )
        worker.stream_handlers.update(self._held.handlers)
        worker.log_event(TOPIC, {})  # distributed adds the worker

    def teardown(self, worker: Worker) -> None:
        """Start nothing early any more; messages that are on their way still find who takes them."""

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Start what waited for a task's result."""
        self._held.transition(key, start, finish)
