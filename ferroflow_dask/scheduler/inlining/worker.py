"""Worker's end of inlining: sends small results to the scheduler, and takes those that come with tasks.

This module is sent to workers by value and must not import this package, except `worker_handlers`.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed import WorkerPlugin
from distributed.worker_state_machine import StateMachineEvent, UpdateDataEvent

from ferroflow_dask.scheduler.worker_handlers import StreamHandlers

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.worker_state_machine import WorkerState

logger = logging.getLogger("ferroflow_dask")

#: Operations: the scheduler sends results before a task; a worker sends a result before it reports a task.
INLINE, RESULT = "ferroflow-inline", "ferroflow-result"
#: Operations of the last messages of the scheduler, and of a worker in answer.
CLOSE, CLOSED = "ferroflow-inlining-close", "ferroflow-inlining-closed"
#: Topic under which workers announce that they support inlined results.
TOPIC = "ferroflow-inlining"
#: States of a task that may still finish on this worker.
_UNDER_WAY = frozenset({"waiting", "ready", "constrained", "executing", "long-running"})
#: Nesting of containers up to which values are small, and bytes that each item adds [B].
_DEEPEST = 3
_ITEM_NBYTES = 8
_FIXED = frozenset({int, float, complex, bool, type(None)})
_CONTAINERS = frozenset({tuple, list, dict})
#: Result of a bundle: holds a tuple.
_RESULTS = ("ferroflow_dask.bundling.results", "Results")


def is_small(value: object, limit: int) -> bool:
    """Return whether a value is plain host data of at most `limit` bytes, so that a copy can replace it.

    `dask.sizeof` differs from the pickled size, for instance for broadcast arrays and nested lists.
    """
    return _left(value, limit, _DEEPEST) >= 0


def _left(value: Any, limit: int, depth: int) -> int:
    """Return the limit minus a value's size [B]; negative if it is exceeded or the value is no plain data."""
    kind = type(value)
    limit -= _ITEM_NBYTES
    if kind in _FIXED:
        return limit - value.bit_length() // 8 if kind is int else limit
    if kind is str or kind is bytes:
        return limit - len(value)
    if kind.__module__ == "numpy":  # workers need not have it
        is_known = kind.__name__ == "ndarray" or any(base.__name__ == "generic" for base in kind.__mro__)
        return limit - int(value.nbytes) if is_known and not value.dtype.hasobject else -1
    if (kind.__module__, kind.__name__) == _RESULTS:
        value, kind = value.values, tuple
    if not depth or kind not in _CONTAINERS or _ITEM_NBYTES * len(value) > limit:
        return -1
    for item in chain.from_iterable(value.items()) if kind is dict else value:
        limit = _left(item, limit, depth - 1)
        if limit < 0:
            break
    return limit


class InlinedResults:
    """Takes results that come with tasks, and sends those that the scheduler asks for.

    Parameters
    ----------
    state : distributed.worker_state_machine.WorkerState
    handle : callable
        Hands an event to the state machine and carries out its instructions.
    send : callable
        Sends a message to the scheduler.
    may_send : callable, optional
        Returns whether a value is small enough, given the limit [B], and a copy can replace it.
    """

    def __init__(
        self,
        state: WorkerState,
        handle: Callable[[StateMachineEvent], None],
        send: Callable[[dict[str, Any]], object],
        may_send: Callable[[object, int], bool] = is_small,
    ) -> None:
        self._state = state
        self._handle = handle
        self._send = send
        self._may_send = may_send
        # Largest size of the results that the scheduler asks for [B].
        self._asked: dict[Key, int] = {}
        self.handlers = StreamHandlers({INLINE: self.take}, CLOSE, self._closed)

    def __len__(self) -> int:
        return len(self._asked)

    def take(self, key: Key, limit: int, values: Mapping[Key, bytes]) -> None:
        """Store the inputs of the next task; note whether the scheduler asks for its result.

        Parameters
        ----------
        key : Key
            The task.
        limit : int
            Largest size of the task's result that is to be sent, in memory and pickled [B]; 0 for none.
        values : mapping of key to bytes
            Pickled results.
        """
        if limit:
            self._asked[key] = limit
        else:
            self._asked.pop(key, None)
        data = {}
        for needed, pickled in values.items():
            ts = self._state.tasks.get(needed)
            if ts is None or ts.state == "released":
                try:
                    data[needed] = pickle.loads(pickled)
                except Exception:  # the result can still be fetched
                    logger.warning(
                        "ferroflow: result of %r cannot be unpickled on this worker", needed, exc_info=True
                    )
        if data:
            self._handle(UpdateDataEvent(data=data, stimulus_id=INLINE))
            # The state machine does not report them: it takes them for scattered data.
            self._send({"op": "add-keys", "keys": list(data), "stimulus_id": INLINE})

    def _closed(self) -> None:
        self._asked.clear()
        self._send({"op": CLOSED})

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Send the result of a task just before the state machine reports the task."""
        if key not in self._asked or finish in _UNDER_WAY:
            return
        limit = self._asked.pop(key)
        ts = self._state.tasks.get(key)
        if finish == "memory" and ts is not None and (ts.nbytes or 0) <= limit and key in self._state.data:
            value = self._state.data[key]
            if self._may_send(value, limit):
                pickled = pickle.dumps(value, protocol=5)
                if len(pickled) <= limit:
                    self._send({"op": RESULT, "key": key, "run_id": ts.run_id, "value": pickled})


class WorkerInlining(WorkerPlugin):
    """Takes and sends small results on a worker."""

    def setup(self, worker: Worker) -> None:
        """Register the handler; called by distributed on each worker."""
        # Results that an earlier plugin of this kind was asked for are still sent.
        earlier = getattr(worker.stream_handlers.get(INLINE), "__self__", None)
        self._results: InlinedResults = (
            InlinedResults(worker.state, worker.handle_stimulus, worker.batched_send)
            if earlier is None  # one without results is false
            else earlier
        )
        self._results.handlers.add(worker.stream_handlers)
        worker.log_event(TOPIC, {})  # distributed adds the worker

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Send the result of a task that finished."""
        self._results.transition(key, start, finish)
