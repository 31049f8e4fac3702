"""Worker's end of inlining: tasks that come with their inputs, and small results in the reports of tasks.

An inlined input becomes an argument of the task. The worker keeps no copy of it under its key, so the
scheduler need not follow copies.

This module is sent to workers by value and must not import this package, except `worker_handlers`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from dask._task_spec import DataNode, GraphNode, Task
from dask.typing import Key
from distributed import WorkerPlugin
from distributed.worker_state_machine import ComputeTaskEvent, StateMachineEvent

from ferroflow_dask.scheduler.worker_handlers import StreamHandlers

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.worker_state_machine import WorkerState

#: Operation of a task with its inlined inputs, in place of distributed's `compute-task`.
TASK = "ferroflow-task"
#: Name of the result in the metadata of the message that reports a task.
RESULT = "ferroflow-result"
#: Operation of the scheduler's last message.
CLOSE = "ferroflow-inlining-close"
#: Topic under which workers announce that they support inlined results.
TOPIC = "ferroflow-inlining"
#: States of a task that may still finish on this worker.
_UNDER_WAY = frozenset({"waiting", "ready", "constrained", "executing", "long-running"})
#: States of a task that does not run unless it is sent again. A released one may still run.
_ENDED = frozenset({"memory", "error", "forgotten"})
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
    """Runs tasks that come with their inputs, and reports the results that the scheduler asks for.

    Parameters
    ----------
    state : distributed.worker_state_machine.WorkerState
    handle : callable
        Hands an event to the state machine and carries out its instructions.
    may_send : callable, optional
        Returns whether a value is small enough, given the limit [B], and a copy can replace it.
    """

    def __init__(
        self,
        state: WorkerState,
        handle: Callable[[StateMachineEvent], None],
        may_send: Callable[[object, int], bool] = is_small,
    ) -> None:
        self._state = state
        self._handle = handle
        self._may_send = may_send
        # Largest size of the results that the scheduler asks for [B].
        self._asked: dict[Key, int] = {}
        # Tasks as they were before they got their inputs.
        self._without_inputs: dict[Key, GraphNode] = {}
        self.handlers = StreamHandlers({TASK: self.take}, CLOSE, self._asked.clear)

    def __len__(self) -> int:
        return len(self._asked)

    def take(self, limit: int, values: Mapping[Key, bytes], **message: Any) -> None:
        """Compute a task.

        Parameters
        ----------
        limit : int
            Largest size of the task's result that is to be reported, in memory and pickled [B]; 0 for none.
        values : mapping of key to bytes
            Pickled inputs.
        **message
            The message that computes the task; it does not name these inputs.
        """
        key: Key = message["key"]
        if limit:
            self._asked[key] = limit
        else:
            self._asked.pop(key, None)
        if values:
            spec = self._without_inputs[key] = message["run_spec"]
            inputs = {needed: _node(needed, pickled) for needed, pickled in values.items()}
            message["run_spec"] = spec.substitute(inputs)
        self._handle(ComputeTaskEvent(**message))

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Add the result of a task to its report; called by the state machine before it sends the report."""
        if finish in _ENDED and key in self._without_inputs:
            ts = self._state.tasks.get(key)
            if ts is None:
                del self._without_inputs[key]
            elif ts.state == finish:  # else the task was fetched, in vain, and will now be computed
                # The worker keeps finished tasks; their inputs are not needed any more.
                ts.run_spec = self._without_inputs.pop(key)
        if key in self._asked and finish not in _UNDER_WAY:
            limit = self._asked.pop(key)
            if finish == "memory":
                self._report(key, limit)

    def _report(self, key: Key, limit: int) -> None:
        ts = self._state.tasks.get(key)
        if ts is None or (ts.nbytes or 0) > limit or key not in self._state.data:
            return
        value = self._state.data[key]
        if self._may_send(value, limit):
            pickled = pickle.dumps(value, protocol=5)
            if len(pickled) <= limit:
                # The report has this dictionary; the task, which stays here, gets another one.
                reported, ts.metadata = ts.metadata, dict(ts.metadata)
                reported[RESULT] = pickled


def _node(key: Key, pickled: bytes) -> GraphNode:
    try:
        return DataNode(key, pickle.loads(pickled))
    except Exception:  # noqa: BLE001 -- the task fails with this error when it runs
        return Task(key, pickle.loads, pickled)


class WorkerInlining(WorkerPlugin):
    """Takes and reports small results on a worker."""

    def setup(self, worker: Worker) -> None:
        """Register the handler; called by distributed on each worker."""
        # Results that an earlier plugin of this kind was asked for are still reported.
        earlier = getattr(worker.stream_handlers.get(TASK), "__self__", None)
        self._results: InlinedResults = (
            InlinedResults(worker.state, worker.handle_stimulus)
            if earlier is None  # one without results is false
            else earlier
        )
        number = self._results.handlers.add(worker.stream_handlers)
        worker.log_event(TOPIC, {"number": number})  # distributed adds the worker

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Report the result of a task that finished."""
        self._results.transition(key, start, finish)
