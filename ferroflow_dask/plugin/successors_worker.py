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
        self._awaited: dict[Key, set[Key]] = {}
        self._waiting: dict[Key, set[Key]] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def take(self, **message: Any) -> None:
        """Keep a task until its inputs are there; `message` is what it is computed by."""
        key: Key = message["key"]
        self._forget(key)
        self._messages[key] = message
        awaited = {needed for needed in message["nbytes"] if not self._has(needed)}
        self._awaited[key] = awaited
        for needed in awaited:
            self._waiting.setdefault(needed, set()).add(key)
        if not awaited:
            self._start(key)

    def confirm(self, key: Key, run_id: int, stimulus_id: str) -> None:
        """Start a task that is still kept; ask the scheduler to place it anew if nobody knows of it."""
        if key in self._messages:
            self._start(key)
        elif (ts := self._state.tasks.get(key)) is None or ts.run_id != run_id:
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
        if finish == "memory":
            for successor in self._waiting.pop(key, ()):
                awaited = self._awaited[successor]
                awaited.discard(key)
                if not awaited:
                    self._soon(self._start, successor)

    def _has(self, key: Key) -> bool:
        ts = self._state.tasks.get(key)
        return ts is not None and ts.state == "memory"

    def _start(self, key: Key) -> None:
        message = self._messages.get(key)
        if message is not None:  # else it was withdrawn, or confirmed, since
            self._forget(key)
            self._handle(ComputeTaskEvent(**message))

    def _forget(self, key: Key) -> None:
        self._messages.pop(key, None)
        for needed in self._awaited.pop(key, ()):
            waiting = self._waiting[needed]
            waiting.discard(key)
            if not waiting:
                del self._waiting[needed]


class WorkerSuccessors(WorkerPlugin):
    """Keeps tasks for a worker."""

    def setup(self, worker: Worker) -> None:
        """Listen to what the scheduler sends early; called by distributed on each worker."""
        self._held = Held(
            worker.state,
            worker.handle_stimulus,
            worker.loop.asyncio_loop.call_soon,  # type: ignore[attr-defined]
            worker.batched_send,
        )
        worker.stream_handlers[SEND] = self._held.take
        worker.stream_handlers[CONFIRM] = self._held.confirm
        worker.stream_handlers[WITHDRAW] = self._held.withdraw
        worker.log_event(TOPIC, {})  # distributed adds the worker

    def teardown(self, worker: Worker) -> None:
        """Start nothing early any more; messages that are on their way still find who takes them."""

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Start what waited for a task's result."""
        self._held.transition(key, start, finish)
