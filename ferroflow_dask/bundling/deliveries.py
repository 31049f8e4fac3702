"""Deliveries: values that clients want leave a bundle while it runs, under their own keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dask._task_spec import Task
from dask.typing import Key
from distributed.metrics import time

#: Name of the worker extension that takes the values: its `deliver` is called by the thread of the bundle.
EXTENSION = "ferroflow-deliveries"
#: Values are delivered at least so often [s]: each delivery is a message, and clients may process results as
#: they come.
_INTERVAL_S = 0.05
#: Longest wait for the first delivery of a bundle that delivers early [s]: about the time of the message.
EARLY_S = 0.001


class DeliveringTask(Task):
    """Task of a bundle that delivers its values.

    A type of its own, as for the barrier of a P2P shuffle: its dependents need not run, so they are not
    prefetched, and its result is not inlined.
    """

    __slots__ = ()


#: In place of the value of a step that has not ended.
UNCOMPUTED = object()


def is_deliverable(value: Any) -> bool:
    """Return whether a value is computed and no iterator: a bundle that returns an iterator is split."""
    return value is not UNCOMPUTED and not hasattr(type(value), "__next__")


class Deliveries:
    """Hands values of a running bundle to its worker.

    Parameters
    ----------
    extension : object or None
        Worker extension that takes them; None if there is none.
    bundle : Key or None
    keys : mapping of int to Key
        Key of the value of each step, for those that are wanted. Steps may be added while the bundle runs.
    first_s : float, optional
        Longest wait for the first delivery [s]; each later wait is twice as long, up to `_INTERVAL_S`.
        By default all waits are that long.
    times : dict of int to (float, float), optional
        Gets start and stop of each step [s].
    clock : callable, optional
        Returns the time of the worker [s].
    """

    def __init__(
        self,
        extension: Any,
        bundle: Key | None,
        keys: Mapping[int, Key],
        *,
        first_s: float | None = None,
        times: dict[int, tuple[float, float]] | None = None,
        clock: Callable[[], float] = time,
    ) -> None:
        self._clock = clock
        self._extension = extension
        self._bundle = bundle
        self._keys = keys
        self._times = times
        # Value, start and stop of each task.
        self._values: dict[Key, tuple[Any, float, float]] = {}
        self._start_s = clock()
        self._wait_s = _INTERVAL_S if first_s is None else first_s
        self._next_s = self._start_s + self._wait_s

    def add(self, step: int, value: Any) -> None:
        """Note that a step has ended with a value."""
        span = self.lap()
        key = self._keys.get(step)
        if key is not None and not hasattr(type(value), "__next__"):
            self._values[key] = value, *span
        if self._times is not None:
            self._times[step] = span
        if span[1] > self._next_s:
            self.flush()

    def lap(self) -> tuple[float, float]:
        """Return start and stop of the step that has just ended [s]."""
        start_s, self._start_s = self._start_s, self._clock()
        return start_s, self._start_s

    def flush(self) -> None:
        """Hand over the values that are there."""
        if self._values and self._extension is not None:
            self._extension.deliver(self._bundle, self._values)
            self._wait_s = min(2 * self._wait_s, _INTERVAL_S)
        self._values = {}
        self._next_s = self._clock() + self._wait_s
