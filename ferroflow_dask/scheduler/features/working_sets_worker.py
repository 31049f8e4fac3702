"""Worker's end of working sets: memory as a resource, and the memory that a task takes while it runs alone.

This module is sent to workers by value and must not import this package, except `remote_worker`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from dask.utils import key_split
from distributed.worker_state_machine import UnpauseEvent

from ferroflow_dask.scheduler.remote_worker import WorkerEnd

if TYPE_CHECKING:
    from distributed import Worker

#: Name of the resource, and the amount of each worker, independent of its memory limit. Amounts are whole
#: numbers, because sums of floats do not return to the same value.
RESOURCE, WHOLE = "ferroflow-memory", 1000
#: Topic of the events that report working sets.
TOPIC = "ferroflow-working-sets"
#: States before a task has started.
_NOT_STARTED = frozenset({"ready", "constrained"})
#: How often memory is read while a task is measured [s].
_INTERVAL_S = 0.02


class Sampler:
    """Reads an amount again and again, in a thread, until it is stopped.

    Parameters
    ----------
    read : callable
        Returns the amount.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._before = self._most = read()
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="ferroflow-working-set", daemon=True).start()

    def _run(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            self._most = max(self._most, self._read())

    def stop(self) -> int:
        """Return by how much the amount has grown at most."""
        self._is_over.set()
        return max(self._most, self._read()) - self._before


class WorkingSetsEnd(WorkerEnd):
    """Measures tasks that need memory as a resource, if they run alone."""

    name = "working_sets"

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._measured: Key | None = None
        self._sampler: Any = None

    def open(self) -> int:
        """Have memory as a resource. It stays after the end is closed: tasks that were sent may need it."""
        state = self.worker.state
        if RESOURCE not in state.total_resources:
            state.total_resources[RESOURCE] = state.available_resources[RESOURCE] = WHOLE
        return super().open()

    def closed(self) -> None:
        """Measure no more."""
        self._stop()

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Measure a task from its start to its end, or until it leaves its thread."""
        if finish == "executing":
            self._stop()  # a task that is measured no longer runs alone
            is_new = start in _NOT_STARTED
            if is_new and self._amount_of(key) and len(self.worker.state.executing) == 1:
                self._measured, self._sampler = key, self.sampler()
        elif key == self._measured:
            nbytes = self._stop()
            if finish in ("memory", "long-running"):
                self.report({"prefix": key_split(key), "nbytes": nbytes})
        if finish == "long-running":
            self._release(key)

    def _amount_of(self, key: Key) -> float:
        return float((self.worker.state.tasks[key].resource_restrictions or {}).get(RESOURCE, 0))

    def _release(self, key: Key) -> None:
        """Take the memory from a task that may now wait for others, which may need it."""
        if amount := self._amount_of(key):
            ts, state = self.worker.state.tasks[key], self.worker.state
            others = {name: one for name, one in ts.resource_restrictions.items() if name != RESOURCE}
            ts.resource_restrictions = others
            state.available_resources[RESOURCE] += amount
            # The worker has looked for tasks that can start before this call.
            self.worker.loop.add_callback(self._start_others)

    def _start_others(self) -> None:
        if self.worker.state.running:
            self.worker.handle_stimulus(UnpauseEvent(stimulus_id="ferroflow-memory-released"))

    def _stop(self) -> int:
        nbytes = 0 if self._sampler is None else self._sampler.stop()
        self._measured = self._sampler = None
        return nbytes

    # A virtual worker overrides these

    def sampler(self) -> Any:
        """Start to measure the memory of the process."""
        return Sampler(self.worker.monitor.get_process_memory)

    def report(self, event: dict[str, Any]) -> None:
        """Report to the scheduler."""
        self.worker.log_event(TOPIC, event)
