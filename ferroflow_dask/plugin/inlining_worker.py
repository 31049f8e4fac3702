"""The workers' end of `inlining`: small results are told to the scheduler, and taken from its messages.

What is here is sent to workers by value and must not need this package.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
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
#: How long after the first of them results that came with tasks are confirmed, all in one message [s].
_CONFIRMED_AFTER_S = 0.1
#: Items of a container, and containers in each other, that are looked at.
_MOST_ITEMS = 64
_DEEPEST = 3
_SCALARS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_CONTAINERS = frozenset({tuple, list})


def is_plain(value: object, depth: int = _DEEPEST) -> bool:
    """Return whether a value is of plain data on the host, which a copy can stand for."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind.__module__ == "numpy":  # workers need not have it
        dtype = getattr(value, "dtype", None)
        return dtype is not None and not dtype.hasobject
    if depth and kind in _CONTAINERS:
        return len(value) <= _MOST_ITEMS and all(is_plain(item, depth - 1) for item in value)  # type: ignore[arg-type, attr-defined]
    if depth and kind is dict:
        return len(value) <= _MOST_ITEMS and all(  # type: ignore[arg-type]
            is_plain(item, depth - 1)
            for pair in value.items()  # type: ignore[attr-defined]
            for item in pair
        )
    return False


class Inline:
    """Takes results that come with tasks, and tells those that are asked for.

    Parameters
    ----------
    state : distributed.worker_state_machine.WorkerState
    handle : callable
        Hands an event to the state machine and carries out what it answers.
    send : callable
        Sends the scheduler a message.
    later : callable
        Calls a function after a time [s].
    may_tell : callable, optional
        Returns whether a copy can stand for a value.
    """

    def __init__(
        self,
        state: WorkerState,
        handle: Callable[[StateMachineEvent], None],
        send: Callable[[dict[str, Any]], object],
        later: Callable[[float, Callable[[], None]], object],
        may_tell: Callable[[object], bool] = is_plain,
    ) -> None:
        self._state = state
        self._handle = handle
        self._send = send
        self._later = later
        self._may_tell = may_tell
        # Tasks on this worker whose results are to be told, if they are no larger than that [B].
        self._asked: dict[Key, int] = {}
        # Results that were put into memory and are still to be confirmed.
        self._taken: list[Key] = []

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
            if not (needed in data or needed in self._state.data):
                self._send({"op": "release-worker-data", "key": needed, "stimulus_id": INLINE})
        if data:
            self._handle(UpdateDataEvent(data=data, stimulus_id=INLINE))
            if not self._taken:
                self._later(_CONFIRMED_AFTER_S, self._confirm)
            self._taken += data

    def _confirm(self) -> None:
        # The scheduler takes it for granted that they are here, but others may have come to ask too soon.
        taken, self._taken = self._taken, []
        here = [key for key in taken if key in self._state.data]
        if here:
            self._send({"op": "add-keys", "keys": here, "stimulus_id": INLINE})

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Tell the result of a task, just before the state machine tells its end."""
        if key not in self._asked or finish in (
            "waiting",
            "ready",
            "constrained",
            "executing",
            "long-running",
        ):
            return
        limit = self._asked.pop(key)
        ts = self._state.tasks.get(key)
        if finish == "memory" and ts is not None and (ts.nbytes or 0) <= limit and key in self._state.data:
            value = self._state.data[key]
            if self._may_tell(value):
                pickled = pickle.dumps(value, protocol=5)
                if len(pickled) <= limit:
                    self._send({"op": RESULT, "key": key, "run_id": ts.run_id, "value": pickled})


class WorkerInlining(WorkerPlugin):
    """Takes and tells small results on a worker."""

    def setup(self, worker: Worker) -> None:
        """Listen to what comes with tasks; called by distributed on each worker."""
        # What one that was here before was asked for is still to be told.
        earlier = getattr(worker.stream_handlers.get(INLINE), "__self__", None)
        self._inline: Inline = earlier or Inline(
            worker.state,
            worker.handle_stimulus,
            worker.batched_send,
            worker.loop.asyncio_loop.call_later,  # type: ignore[attr-defined]
        )
        worker.stream_handlers[INLINE] = self._inline.take
        worker.log_event(TOPIC, {})  # distributed adds the worker

    def teardown(self, worker: Worker) -> None:
        """Tell nothing any more; messages that are on their way still find who takes them."""

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Tell the result of a task that ends."""
        self._inline.transition(key, start, finish)
