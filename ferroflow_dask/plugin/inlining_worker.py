"""The workers' end of `inlining`: small results are told to the scheduler, and taken from its messages.

What is here is sent to workers by value and must not need this package.
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

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.worker_state_machine import WorkerState

logger = logging.getLogger("ferroflow_dask")

#: What the scheduler sends before a task, and what workers tell it before the end of one.
INLINE, RESULT = "ferroflow-inline", "ferroflow-result"
#: Under which workers tell that they understand it.
TOPIC = "ferroflow-inlining"
#: States of a task that may still end here.
_UNDER_WAY = frozenset({"waiting", "ready", "constrained", "executing", "long-running"})
#: Containers in each other that are looked at, and what each item counts for beside what it has [B].
_DEEPEST = 3
_ITEM_NBYTES = 8
_FIXED = frozenset({int, float, complex, bool, type(None)})
_CONTAINERS = frozenset({tuple, list, dict})
#: What our own bundles yield, which holds a tuple.
_RESULTS = ("ferroflow_dask.bundling.results", "Results")


def is_small(value: object, limit: int) -> bool:
    """Return whether a value is plain data on the host, which a copy can stand for, of so many bytes at most.

    Sizes as Dask tells them say little of what pickling writes: of what is broadcast, or deep in a list.
    """
    return _left(value, limit, _DEEPEST) >= 0


def _left(value: Any, limit: int, depth: int) -> int:
    """Return what a value leaves of a limit [B]; below 0 if it goes beyond that, or is no plain data."""
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


class Inline:
    """Takes results that come with tasks, and tells those that are asked for.

    Parameters
    ----------
    state : distributed.worker_state_machine.WorkerState
    handle : callable
        Hands an event to the state machine and carries out what it answers.
    send : callable
        Sends the scheduler a message.
    may_tell : callable, optional
        Returns whether a value is small enough, given the limit [B], and a copy can stand for it.
    """

    def __init__(
        self,
        state: WorkerState,
        handle: Callable[[StateMachineEvent], None],
        send: Callable[[dict[str, Any]], object],
        may_tell: Callable[[object, int], bool] = is_small,
    ) -> None:
        self._state = state
        self._handle = handle
        self._send = send
        self._may_tell = may_tell
        # Tasks on this worker whose results are to be told, if they are no larger than that [B].
        self._asked: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def take(self, key: Key, limit: int, values: Mapping[Key, bytes]) -> None:
        """Put results into memory that a task needs, before that comes; note whether its own is to be told.

        Parameters
        ----------
        key : Key
            The task.
        limit : int
            Up to which size its result is to be told, in memory and pickled [B]; 0 if it is not.
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
                except Exception:  # whatever it is, the result can still be fetched
                    logger.warning("ferroflow: result of %r cannot be unpickled here", needed, exc_info=True)
        if data:
            self._handle(UpdateDataEvent(data=data, stimulus_id=INLINE))
            # The state machine does not tell, since what clients scatter the scheduler knows.
            self._send({"op": "add-keys", "keys": list(data), "stimulus_id": INLINE})

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Tell the result of a task, just before the state machine tells its end."""
        if key not in self._asked or finish in _UNDER_WAY:
            return
        limit = self._asked.pop(key)
        ts = self._state.tasks.get(key)
        if finish == "memory" and ts is not None and (ts.nbytes or 0) <= limit and key in self._state.data:
            value = self._state.data[key]
            if self._may_tell(value, limit):
                pickled = pickle.dumps(value, protocol=5)
                if len(pickled) <= limit:
                    self._send({"op": RESULT, "key": key, "run_id": ts.run_id, "value": pickled})


class WorkerInlining(WorkerPlugin):
    """Takes and tells small results on a worker."""

    def setup(self, worker: Worker) -> None:
        """Listen to what comes with tasks; called by distributed on each worker."""
        # What one that was here before was asked for is still to be told.
        earlier = getattr(worker.stream_handlers.get(INLINE), "__self__", None)
        self._inline: Inline = earlier or Inline(worker.state, worker.handle_stimulus, worker.batched_send)
        worker.stream_handlers[INLINE] = self._inline.take
        worker.log_event(TOPIC, {})  # distributed adds the worker

    def teardown(self, worker: Worker) -> None:
        """Tell nothing any more; messages that are on their way still find who takes them."""

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Tell the result of a task that ends."""
        self._inline.transition(key, start, finish)
