"""Deliveries: values that clients want leave a bundle while it runs, under their own keys."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from dask._task_spec import Task
from dask.typing import Key
from distributed.metrics import time
from distributed.utils import thread_state  # type: ignore[attr-defined]

#: Name of the worker extension that takes the values: its `deliver` is called by the thread of the bundle.
EXTENSION = "ferroflow-deliveries"
#: Values are delivered at least so often [s]: each delivery is a message, and clients may process results as
#: they come.
_INTERVAL_S = 0.05


class DeliveringTask(Task):
    """Task of a bundle that delivers its values.

    A type of its own, as for the barrier of a P2P shuffle: its dependents need not run, so they are not
    prefetched, and its result is not inlined.
    """

    __slots__ = ()


class Deliveries:
    """Hands values to the worker that runs the present task.

    Parameters
    ----------
    keys : mapping of int to Key
        Key of the value of each step, for those that are wanted.
    """

    def __init__(self, keys: Mapping[int, Key]) -> None:
        self._keys = keys
        worker = getattr(thread_state, "execution_state", {}).get("worker")
        self._extension = worker.extensions.get(EXTENSION) if worker is not None else None
        self._bundle: Key | None = getattr(thread_state, "key", None)
        # Value, start and stop of each task.
        self._values: dict[Key, tuple[Any, float, float]] = {}
        self._start_s = time()
        self._next_s = perf_counter() + _INTERVAL_S

    @property
    def is_open(self) -> bool:
        """Whether the worker takes values."""
        return self._extension is not None

    def add(self, step: int, value: Any) -> None:
        """Note that a step has ended with a value."""
        stop_s = time()
        key = self._keys.get(step)
        # A bundle that returns an iterator is split.
        if key is not None and not hasattr(type(value), "__next__"):
            self._values[key] = value, self._start_s, stop_s
        self._start_s = stop_s
        if perf_counter() > self._next_s:
            self.flush()

    def flush(self) -> None:
        """Hand over the values that are there."""
        if self._values and self._extension is not None:
            self._extension.deliver(self._bundle, self._values)
        self._values = {}
        self._next_s = perf_counter() + _INTERVAL_S
