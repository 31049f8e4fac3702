"""Worker's end of prefetch: keeps tasks until their inputs exist on this worker, then starts them.

The worker's state machine gets such a task by the message that the scheduler would have sent, once all inputs
are in memory; for the state machine, the task only comes early. This module is sent to workers by value and
must not import this package, except `worker_handlers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed import WorkerPlugin
from distributed.worker_state_machine import ComputeTaskEvent, FreeKeysEvent, StateMachineEvent

from ferroflow_dask.scheduler.worker_handlers import StreamHandlers

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.worker_state_machine import WorkerState

#: Operations in messages of the scheduler: a task before its inputs exist, its confirmation, its withdrawal.
SEND, CONFIRM, WITHDRAW = "ferroflow-send", "ferroflow-confirm", "ferroflow-withdraw"
#: Operation of the last message.
CLOSE = "ferroflow-prefetch-close"
#: States of a task that will run, runs, or has run and was reported.
TAKEN_ON = frozenset({"waiting", "ready", "constrained", "executing", "long-running", "memory", "error"})
#: Topic under which workers announce that they support prefetched tasks.
TOPIC = "ferroflow-prefetch"


class PrefetchedTasks:
    """Tasks that wait on a worker until their inputs exist there.

    Parameters
    ----------
    state : distributed.worker_state_machine.WorkerState
    handle : callable
        Hands an event to the state machine and carries out its instructions.
    soon : callable
        Calls a function with arguments after the present event of the state machine.
    send : callable
        Sends a message to the scheduler.
    registry : mapping of str to callable
        The worker's stream handlers.
    """

    def __init__(
        self,
        state: WorkerState,
        handle: Callable[[StateMachineEvent], None],
        soon: Callable[..., object],
        send: Callable[[dict[str, Any]], object],
        registry: Mapping[str, Callable[..., object]],
    ) -> None:
        self._state = state
        self._handle = handle
        self._soon = soon
        self._send = send
        self._registry = registry
        # Each with the handler that it had when it came: the handler may be removed before it is called.
        self._messages: dict[Key, tuple[Callable[..., object], dict[str, Any]]] = {}
        # For each task the run ids of the inputs that it waits for; for each input the tasks that wait.
        self._awaited: dict[Key, dict[Key, int]] = {}
        self._waiting: dict[Key, dict[Key, None]] = {}
        self.handlers = StreamHandlers(
            {SEND: self.take, CONFIRM: self.confirm, WITHDRAW: self.withdraw}, CLOSE, self.clear
        )

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
        self._messages[key] = self._registry.get(starts_by, self._compute), message
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
            self._send({"op": "reschedule", "key": key, "stimulus_id": stimulus_id})

    def withdraw(self, runs: Collection[tuple[Key, int]], stimulus_id: str) -> None:
        """Drop tasks, started or not; each by its key and run id."""
        for key, run_id in runs:
            if key in self._messages:
                self._forget(key)
            elif (ts := self._state.tasks.get(key)) is not None and ts.run_id == run_id:
                self._handle(FreeKeysEvent(keys=[key], stimulus_id=stimulus_id))

    def clear(self) -> None:
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
        for successor in sorted(complete, key=lambda one: tuple(self._messages[one][1]["priority"])):
            self._soon(self._start, successor)

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


class WorkerPrefetch(WorkerPlugin):
    """Keeps the prefetched tasks of a worker."""

    def setup(self, worker: Worker) -> None:
        """Register the handlers; called by distributed on each worker."""
        # Tasks that an earlier plugin of this kind has kept are still confirmed or withdrawn.
        earlier = getattr(worker.stream_handlers.get(SEND), "__self__", None)
        self._tasks: PrefetchedTasks = (
            PrefetchedTasks(
                worker.state,
                worker.handle_stimulus,
                worker.loop.asyncio_loop.call_soon,  # type: ignore[attr-defined]
                worker.batched_send,
                worker.stream_handlers,
            )
            if earlier is None  # one without tasks is false
            else earlier
        )
        number = self._tasks.handlers.add(worker.stream_handlers)
        worker.log_event(TOPIC, {"number": number})  # distributed adds the worker

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Start the tasks that waited for a result."""
        self._tasks.transition(key, start, finish)
