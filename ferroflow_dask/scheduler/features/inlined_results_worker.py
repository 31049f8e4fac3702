"""Worker's end of inlining: tasks that come with their inputs, and small results in the reports of tasks.

An inlined input becomes an argument of the task. The worker keeps no copy of it under its key, so the
scheduler need not follow copies.

This module is sent to workers by value and must not import this package, except `remote_worker`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from dask._task_spec import DataNode, GraphNode, Task
from dask.typing import Key
from distributed.worker_state_machine import ComputeTaskEvent

from ferroflow_dask.scheduler.remote_worker import WorkerEnd

if TYPE_CHECKING:
    from distributed import Worker

#: Operation of a task with its inlined inputs, in place of distributed's `compute-task`.
TASK = "ferroflow-task"
#: Name of the result in the metadata of the message that reports a task.
RESULT = "ferroflow-result"
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


class ReportedResults(WorkerEnd):
    """Runs tasks that come with their inputs, and reports the results that the scheduler asks for."""

    name = "inlined_results"

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._state = worker.state
        # Largest size of the results that the scheduler asks for [B].
        self._asked: dict[Key, int] = {}
        # Tasks as they were before they got their inputs.
        self._without_inputs: dict[Key, GraphNode] = {}

    def handlers(self) -> dict[str, Callable[..., object]]:
        """Return the handler of tasks with inputs."""
        return {TASK: self.take}

    def closed(self) -> None:
        """Report no results."""
        self._asked.clear()

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
        self.worker.handle_stimulus(ComputeTaskEvent(**message))

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
        if self.may_send(value, limit):
            pickled = pickle.dumps(value, protocol=5)
            if len(pickled) <= limit:
                # The report has this dictionary; the task, which stays here, gets another one.
                reported, ts.metadata = ts.metadata, dict(ts.metadata)
                reported[RESULT] = pickled

    def may_send(self, value: object, limit: int) -> bool:
        """Return whether a value is small enough, given the limit [B], and a copy can replace it."""
        return is_small(value, limit)


def _node(key: Key, pickled: bytes) -> GraphNode:
    try:
        return DataNode(key, pickle.loads(pickled))
    except Exception:  # noqa: BLE001 -- the task fails with this error when it runs
        return Task(key, pickle.loads, pickled)
