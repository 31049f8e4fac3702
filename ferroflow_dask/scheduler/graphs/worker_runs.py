"""Worker's end of running bundles: stores and reports their values, and divides them.

This module is sent to workers by value and must not import this package, except `remote_worker`.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from time import thread_time
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from dask.utils import typename
from distributed import threadpoolexecutor
from distributed.metrics import time
from distributed.worker_state_machine import SecedeEvent, UpdateDataEvent

from ferroflow_dask.scheduler.remote_worker import WorkerEnd

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("distributed.worker")

#: As in `ferroflow_dask.bundling.deliveries`.
_EXTENSION = "ferroflow-deliveries"
#: Operations of the messages that ask for steps of a running bundle, and that report steps that have left it.
DIVIDE, DIVIDED = "ferroflow-divide", "ferroflow-divided"
#: Operation of the message that names the values that are still needed of a running bundle.
NARROW = "ferroflow-narrow"
#: Operation of the message that takes the thread of a running bundle, or of a former step of one, out of the
#: thread pool.
SECEDE = "ferroflow-secede"
#: Operation of the message after which bundles report start and stop of each step.
TRACE = "ferroflow-trace"
#: Name of the times on a core, and waiting for one, in the metadata of a bundle's end [s].
CORES_S = "ferroflow-cores"
#: Name of these times in the metadata of a bundle's end.
STEPS = "ferroflow-steps"
#: Operation by which clients ask for the frames of running tasks.
_CALL_STACK = "call_stack"
#: States of a task that a thread runs.
_RUNNING = frozenset({"executing", "long-running"})
#: Operation of the messages to the scheduler, of values that are stored.
DELIVERED = "ferroflow-delivered"


class Runs(WorkerEnd):
    """Worker extension that knows the running bundles, and takes values from them.

    Parameters
    ----------
    worker : distributed.Worker
    clock : callable, optional
        Returns the time [s].
    """

    name = "bundles"
    sends = True

    def __init__(self, worker: Worker, clock: Callable[[], float] = time) -> None:
        super().__init__(worker)
        #: Whether start and stop of each step are reported.
        self.is_traced = False
        self._stock_call_stack: Any = worker.handlers.get(_CALL_STACK)
        self._clock = clock
        # `ferroflow_dask.bundling.run.Run` of each running bundle, by key.
        self._runs: dict[Key, Any] = {}
        # Failures that are not reported yet, as given to `failed`.
        self._failures: deque[tuple[Any, Any, Mapping[str, Any] | None]] = deque()
        # For bundles that have not started: their runs, and the values that are still needed.
        self._narrowed: dict[Key, tuple[int, Collection[Key]]] = {}
        self._is_open = False

    def handlers(self) -> dict[str, Callable[..., object]]:
        """Return the handlers of the scheduler's messages about running bundles."""
        return {
            DIVIDE: self._divide,
            NARROW: self._narrow,
            SECEDE: self._secede,
            TRACE: self._trace,
        }

    def open(self) -> int:
        """Take values for one more plugin, and return its number."""
        self._is_open = True
        self.worker.extensions[_EXTENSION] = self
        self.worker.handlers[_CALL_STACK] = self._call_stack
        return super().open()

    def removed(self) -> bool:
        """Let bundles keep their values if no other plugin is left."""
        is_last = super().removed()
        if is_last:
            self.closed()
        return is_last

    def closed(self) -> None:
        """Leave values in their bundles."""
        self._is_open = False
        if self.worker.extensions.get(_EXTENSION) is self:
            del self.worker.extensions[_EXTENSION]
            # As in `WorkerEnd._remove_handlers`.
            if getattr(self.worker.handlers[_CALL_STACK], "__self__", None) is self:
                self.worker.handlers[_CALL_STACK] = self._stock_call_stack

    # Called by the threads of bundles

    def started(self, run: Any) -> None:
        """Note a run that starts."""
        run.cores_s = self._on_cores()  # first, since reading a file lets the event loop run
        self._runs[run.key] = run
        run_id, exports = self._narrowed.pop(run.key, (None, ()))
        ts = self.worker.state.tasks.get(run.key)
        if ts is not None and ts.run_id == run_id:
            run.drop_all_but(exports)

    def ended(self, run: Any) -> None:
        """Forget a run."""
        ts = self.worker.state.tasks.get(run.key)
        if ts is not None and (steps := run.undelivered()) is not None:
            ts.metadata[STEPS] = steps
        present = self._runs.pop(run.key, None)
        if present is not run and present is not None:  # it runs again, in another thread
            self._runs[run.key] = present
        if ts is not None:
            (core_s, queued_s), (core_now_s, queued_now_s) = run.cores_s, self._on_cores()
            ts.metadata[CORES_S] = core_now_s - core_s, queued_now_s - queued_s

    def deliver(self, bundle: Key, values: Mapping[Key, tuple[Any, float, float]]) -> None:
        """Take values of a running bundle, with start and stop of their tasks."""
        self.worker.loop.add_callback(self._take, bundle, values, threading.get_ident())

    def failed(self, run: Any, left: Any, error: Mapping[str, Any] | None) -> None:
        """Report the steps that have left a run: the first one has failed; without an error, it moves."""
        self._failures.append((run, left, error))
        self.worker.loop.add_callback(self._report_failures)

    def _on_cores(self) -> tuple[float, float]:
        """Return how long this thread has run on a core, and how long it has waited for one [s]."""
        try:
            with open("/proc/thread-self/schedstat", "rb") as file:
                ran_ns, waited_ns, _ = file.read().split()
            return int(ran_ns) / 1e9, int(waited_ns) / 1e9
        except (OSError, ValueError):  # /proc exists on Linux only
            return thread_time(), 0.0

    # Called by the event loop

    def _trace(self) -> None:
        self.is_traced = True

    def _call_stack(self, keys: Collection[Key] | None = None) -> Any:
        """Return the frames of tasks; those of a bundle's running step for a bundle."""
        runs = [self._runs.get(key) for key in keys or ()]
        steps = [run.running_step() for run in runs if run is not None]
        return self._stock_call_stack(keys=None if keys is None else [*keys, *steps])

    def _take(self, bundle: Key, values: Mapping[Key, tuple[Any, float, float]], thread: int | None) -> None:
        state = self.worker.state
        ts = state.tasks.get(bundle)
        if not self._is_open or ts is None or ts.state not in _RUNNING:
            return  # the plugin was removed, or the scheduler has cancelled the bundle
        data = {
            key: value
            for key, (value, _, _) in values.items()
            if key not in state.tasks or state.tasks[key].state == "released"
        }
        self.worker.handle_stimulus(UpdateDataEvent(data=data, stimulus_id=DELIVERED))
        # A value that could not be stored stays with the bundle.
        stored = {key: values[key][1:] for key in data if state.tasks[key].state == "memory"}
        types: dict[type, bytes] = {}
        details = {}
        for key, (start_s, stop_s) in stored.items():
            one = state.tasks[key]
            kind: Any = one.type
            if kind not in types:
                types[kind] = _pickled_type(kind)
            details[key] = (one.nbytes, types[kind], typename(kind), start_s, stop_s)
        self.worker.batched_send({"op": DELIVERED, "values": details, "thread": thread})

    def _run_of(self, key: Key, run_id: int | None = None) -> Any:
        """Return the run of a bundle if the worker still runs it for the scheduler, else None."""
        run, ts = self._runs.get(key), self.worker.state.tasks.get(key)
        if run is None or ts is None or ts.state not in _RUNNING or run_id not in (None, ts.run_id):
            return None
        return run

    def _divide(self, key: Key, run_id: int, share: str, stimulus_id: str) -> None:
        run = self._run_of(key, run_id)
        left = None if run is None else run.take(share)
        self._report_failures()  # those before the division
        if left is None:
            message = {"op": DIVIDED, "key": key, "run_id": run_id, "steps": ()}
            self.worker.batched_send({**message, "stimulus_id": stimulus_id})
        else:
            self._report(run, left, stimulus_id)

    def _report(self, run: Any, left: Any, stimulus_id: str, **fields: Any) -> None:
        """Report steps that have left a run, and deliver the values that they read."""
        names = ("steps", "read", "unfinished", "items", "n_ended", "elapsed_s")
        message = {"op": DIVIDED, "key": run.key, "run_id": self.worker.state.tasks[run.key].run_id}
        message |= {name: getattr(left, name) for name in names}
        self.worker.batched_send({**message, "stimulus_id": stimulus_id, **fields})
        if left.values:
            self._take(run.key, left.values, run.thread.ident)

    def _narrow(self, key: Key, run_id: int, exports: Collection[Key]) -> None:
        tasks = self.worker.state.tasks
        if exports:  # the thread may be about to start the run
            for gone in [one for one in self._narrowed if one not in tasks]:
                self._narrowed.pop(gone, None)
            self._narrowed[key] = run_id, exports
        run = self._run_of(key, run_id)
        if run is not None:
            self._narrowed.pop(key, None)
            run.drop_all_but(exports)

    def _secede(self, keys: Collection[Key]) -> None:
        """Take the thread of the first of some tasks that runs out of the thread pool."""
        for key in keys:
            ts = self.worker.state.tasks.get(key)
            if ts is None or ts.state != "executing" or not self._leave_pool(key, self._runs.get(key)):
                continue
            now_s = self._clock()
            duration_s = now_s - (ts.start_time or now_s)
            event = SecedeEvent(key=key, compute_duration=duration_s, stimulus_id=f"secede-{now_s}")
            self.worker.handle_stimulus(event)
            return

    def _leave_pool(self, key: Key, run: Any) -> bool:
        """Take the thread of a task out of the thread pool; return whether it was there.

        The thread of a task that is no bundle would not end after the task: the pool gets one more.
        """
        executor: Any = self.worker.executors["default"]
        with threadpoolexecutor.threads_lock:
            if run is None:
                with self.worker.active_threads_lock:
                    if key not in self.worker.active_threads.values():
                        return False  # it has no thread yet
                executor._max_workers += 1
                executor._adjust_thread_count()
                return True
            if run.thread not in executor._threads or not run.leave_pool():
                return False
            executor._threads.remove(run.thread)
            executor._adjust_thread_count()
        return True

    def _report_failures(self) -> None:
        while self._failures:
            self._report_failed(*self._failures.popleft())

    def _report_failed(self, run: Any, left: Any, error: Mapping[str, Any] | None) -> None:
        if self._runs.get(run.key) not in (run, None):
            return  # it runs again
        ts = self.worker.state.tasks.get(run.key)
        if ts is None or ts.state not in _RUNNING:
            return  # the scheduler has cancelled the bundle
        if error is not None:
            text = "Compute Failed\nKey:       %s\nState:     %s\nException: %r\nTraceback: %r\n"
            logger.error(text, left.steps[0], ts.state, error["exception_text"], error["traceback_text"])
        self._report(run, left, f"task-erred-{time()}", failed=left.steps[0], error=error)


def _pickled_type(kind: type) -> bytes:
    try:
        return pickle.dumps(kind)
    except Exception:  # noqa: BLE001 -- as Dask does: some types cannot be pickled
        return pickle.dumps(typename(kind))
