"""Run of a bundle: its steps, each of which is claimed once, by the thread or by the worker's event loop.

The thread takes a step out of `pending` before it starts it. The event loop takes steps out of it, too, from
the last one backwards, and hands them to the scheduler. `dict.pop` is atomic, so each step has one owner (the
private queues of Acar, Charguéraud and Rainey, "Scheduling parallel programs by work stealing with private
deques", PPoPP 2013, with the lazy splitting of Mohr, Kranz and Halstead, "Lazy task creation", 1991).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed import Reschedule, threadpoolexecutor
from distributed.core import error_message
from distributed.metrics import time
from distributed.utils import thread_state  # type: ignore[attr-defined]

from ferroflow_dask.bundling import division
from ferroflow_dask.bundling.deliveries import EARLY_S, EXTENSION, UNCOMPUTED, Deliveries, is_deliverable
from ferroflow_dask.bundling.results import LEFT

if TYPE_CHECKING:
    from ferroflow_dask.bundling.sequence import ExecuteTasks

#: Code whose frames are removed from the beginning of a traceback, as Dask removes its own.
_OWN_FRAMES = ("dask/_task_spec", "ferroflow_dask/bundling/")


#: Returned by `pending` for a step that has an owner.
_TAKEN = object()


class Share(Enum):
    """Unstarted steps that are taken from a run; the value is sent in messages."""

    ALL = "all"
    #: All, unless each of them would wait for the running step in any case.
    FREE = "free"
    HALF = "half"


@dataclass(frozen=True, slots=True)
class Taken:
    """Steps that have left a run.

    Parameters
    ----------
    steps : tuple of Key
    read : tuple of Key
        Steps of the run whose values these read, and which the run exports from now on.
    unfinished : tuple of Key
        Those of `read` whose values are not computed yet.
    items : tuple of int
        Items of the run's result that have the values of `read`.
    values : dict of Key to (object, float, float)
        The values of `read` that are computed, and those that the thread has not delivered yet, with start
        and stop of their steps [s].
    n_ended : int
        Steps of the run that have ended.
    elapsed_s : float
        Time since the run started [s].
    """

    steps: tuple[Key, ...]
    read: tuple[Key, ...] = ()
    unfinished: tuple[Key, ...] = ()
    items: tuple[int, ...] = ()
    values: dict[Key, tuple[Any, float, float]] = field(default_factory=dict)
    n_ended: int = 0
    elapsed_s: float = 0.0


class Run:
    """One execution of a bundle.

    Parameters
    ----------
    bundle : ExecuteTasks
    results : sequence
        The results of other tasks that the bundle reads.
    """

    #: Returns the time [s].
    clock: Callable[[], float] = staticmethod(time)

    def __init__(self, bundle: ExecuteTasks, results: Sequence[Any]) -> None:
        self.bundle = bundle
        self.key: Key | None = getattr(thread_state, "key", None)
        self.thread = threading.current_thread()
        #: Steps without an owner.
        self.pending = dict.fromkeys(range(len(bundle.steps)))
        #: Times of the thread on a core, and waiting for one, at the start of the run [s].
        self.cores_s = (0.0, 0.0)
        self._current = -1
        self._n_arguments = len(bundle.arguments)
        arguments = [results[i] if item is None else results[i][item] for i, item in bundle.arguments]
        self._values: list[Any] = [*arguments, *[UNCOMPUTED] * len(bundle.steps)]
        self._exports = list(bundle.exports)
        self._delivered = dict(bundle.delivered)
        self._start_s = self.clock()
        # The event loop divides the run while it holds this lock; the thread ends the run with it.
        self._lock = threading.Lock()
        self._is_over = False
        self._leaves_pool = False
        self._keeps_values = False
        # Values that only steps of other bundles read now.
        self._new_exports: set[int] = set()
        # `get_worker` would be noted as a call by the task.
        worker = getattr(thread_state, "execution_state", {}).get("worker")
        self._extension = worker.extensions.get(EXTENSION) if worker is not None else None
        self._active: dict[int, Key] = getattr(worker, "active_threads", {})
        # Start and stop of each step [s], if the scheduler wants to know.
        self._times: dict[int, tuple[float, float]] | None = (
            {} if getattr(self._extension, "is_traced", False) else None
        )
        #: Whether the thread should raise `Reschedule` at its end: the scheduler runs the bundle again.
        self.is_void = False

    def arguments(self) -> list[Any]:
        """Return the values that the bundle reads; before the run."""
        return self._values[: self._n_arguments]

    def exports(self) -> list[int]:
        """Return the numbers of the exported values."""
        return self._exports

    def __call__(self) -> tuple[Any, ...]:
        """Run the steps that are not taken; return the exported values, `LEFT` for each that has left.

        Raises
        ------
        distributed.Reschedule
            The scheduler has replaced the bundle meanwhile.
        """
        if self._extension is None:
            return self._run(Deliveries(None, None, {}))
        self._extension.started(self)
        try:
            first_s = EARLY_S if self.bundle.is_early else None
            return self._run(
                Deliveries(self._extension, self.key, self._delivered, first_s=first_s, times=self._times)
            )
        finally:
            self._extension.ended(self)
            thread_state.ferroflow_key = None
            if self._leaves_pool:
                threadpoolexecutor.thread_state.proceed = False  # the thread ends, as after `secede`

    def _run(self, deliveries: Deliveries) -> tuple[Any, ...]:
        bundle, values, pop, n = self.bundle, self._values, self.pending.pop, self._n_arguments
        functions, keys, taken, active = bundle.functions, bundle.keys, _TAKEN, self._active
        ident = threading.get_ident()
        try:
            for i, (function, arguments, read, gone) in enumerate(bundle.steps):
                self._current = i  # before the claim: the event loop sees each unfinished step in one of both
                if pop(i, taken) is taken:
                    continue
                active[ident] = thread_state.ferroflow_key = keys[i]
                operands = list(arguments)
                for place, number in read:
                    operands[place] = values[number]
                try:
                    value = copy_context().run(functions[function], *operands)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    if self._extension is None:
                        raise
                    self._failed(i, error, deliveries)
                    continue
                finally:
                    del operands
                values[n + i] = value
                if self._delivered or self._times is not None:
                    deliveries.add(i, value)
                del value
                if not self._keeps_values:
                    for number in gone:
                        if number not in self._new_exports:
                            values[number] = None
        finally:
            deliveries.flush()
            if self.key is not None and ident in active:
                active[ident] = self.key
        return self._outputs()

    def _outputs(self) -> tuple[Any, ...]:
        with self._lock:
            self._is_over = True
            outputs = tuple(self._value(number) for number in self._exports)
        if self.is_void or (self.bundle.is_single and outputs[0] is LEFT):
            raise Reschedule
        return outputs

    def _value(self, number: int) -> Any:
        value = LEFT if number < 0 else self._values[number]
        return LEFT if value is UNCOMPUTED else value

    def delivers_all(self) -> bool:
        """Return whether the worker holds each exported value under a key of its own, too."""
        n = self._n_arguments
        return self._extension is not None and all(
            number < 0 or number - n in self._delivered for number in self._exports
        )

    def running_step(self) -> Key:
        """Return the key of the step that runs, or that runs next."""
        return self.bundle.keys[max(self._current, 0)]

    def undelivered(self) -> list[tuple[Key, float, float]] | None:
        """Return start and stop of each step whose value is not delivered [s]; None if they are unknown."""
        if self._times is None:
            return None
        return [(self.bundle.keys[i], *span) for i, span in self._times.items() if i not in self._delivered]

    def claim(self, step: int) -> bool:
        """Take a step out of `pending`; return whether it had no owner. Threads do the same inline."""
        return self.pending.pop(step, _TAKEN) is not _TAKEN

    # What leaves the run

    def take(self, which: str) -> Taken | None:
        """Take a `Share` of the unstarted steps, maybe none. Called by the worker's event loop.

        Return None if the run is over. The last step may wait for what a client does with the values of the
        others, so they are handed over in any case.
        """
        share = Share(which)
        with self._lock:
            if self._is_over or self.bundle.is_single:
                return None  # each step of a chain waits for the one before
            reads, unstarted, current = self.bundle.reads, set(self.pending), self._current
            unstarted.discard(current)  # the thread is about to claim it
            arguments = (reads, self._n_arguments, unstarted, current)
            if share is Share.HALF:
                chosen = division.last_half(*arguments)
            elif share is Share.ALL or division.free_steps(*arguments):
                chosen = sorted(unstarted)
            else:
                chosen = []
            return self._taken(chosen)

    def _taken(self, chosen: Sequence[int]) -> Taken:
        # From here to the end the thread clears no value, so none is lost that a taken step reads.
        self._keeps_values = True
        taken = {i for i in reversed(chosen) if self.pending.pop(i, _TAKEN) is not _TAKEN}
        left = self._leaving(taken)
        self._clear()
        self._keeps_values = False
        return left

    def _leaving(self, taken: set[int]) -> Taken:
        """Export the values that steps read which leave the run."""
        n, keys, values = self._n_arguments, self.bundle.keys, self._values
        read = sorted({number - n for i in taken for number in self.bundle.reads[i] if number >= n} - taken)
        new = [i for i in read if i not in self._delivered]
        self._exports += [n + i for i in new if n + i not in self._exports]
        self._new_exports.update(n + i for i in new)
        # First the note for the thread, then the look at the value: one of both delivers it.
        self._delivered.update({i: keys[i] for i in new})
        now_s, times = self.clock(), self._times or {}
        ready = {
            keys[i]: (values[n + i], *times.get(i, (now_s, now_s)))
            for i in self._delivered
            if is_deliverable(values[n + i])
        }
        return Taken(
            tuple(keys[i] for i in sorted(taken)),
            tuple(keys[i] for i in read),
            tuple(keys[i] for i in read if keys[i] not in ready),
            tuple(self._exports.index(n + i) for i in read),
            ready,
            sum(value is not UNCOMPUTED for value in values[n:]),
            self.clock() - self._start_s,
        )

    def _clear(self) -> None:
        """Drop the values that no step of the run reads and that are not exported."""
        unfinished = [*self.pending, self._current]
        kept = {number for i in unfinished for number in self.bundle.reads[i]} | {*self._exports}
        for number, value in enumerate(self._values):
            if value is not UNCOMPUTED and number not in kept:
                self._values[number] = None

    def drop_all_but(self, exports: Collection[Key]) -> None:
        """Drop the unstarted steps that none of some exports needs. Called by the worker's event loop."""
        if not exports:
            self.void()
        with self._lock:
            keys, n = self.bundle.keys, self._n_arguments
            # The scheduler may not have heard of the newest exports.
            own = [number for number in self._exports if number >= n]
            wanted = [one for one in own if keys[one - n] in exports or one in self._new_exports]
            kept = division.needed(self.bundle.reads, n, wanted)
            for i in sorted(self.pending, reverse=True):
                if i not in kept:
                    self.pending.pop(i, None)

    def leave_pool(self) -> bool:
        """End the thread after the run, as another one has its place in the pool.

        Return False if the run is over.
        """
        with self._lock:
            self._leaves_pool = not self._is_over
        return self._leaves_pool

    def void(self) -> None:
        """Drop all unstarted steps: the scheduler has replaced or cancelled the bundle."""
        self.is_void = True
        self.pending.clear()

    def _failed(self, step: int, error: BaseException, deliveries: Deliveries) -> None:
        """Report a failed step, with the unstarted steps that depend on it; the others run on."""
        message = None
        start_s, stop_s = deliveries.lap()
        if not isinstance(error, Reschedule):
            _without_own_frames(error)
            message = dict(error_message(error))
            message["startstops"] = [{"action": "compute", "start": start_s, "stop": stop_s}]
            message["thread"] = threading.get_ident()
        later = division.depending(self.bundle.reads, self._n_arguments, step)
        deliveries.flush()
        # The scheduler hears of what leaves in the order in which it leaves.
        with self._lock:
            taken = {step, *(i for i in reversed(later) if self.pending.pop(i, _TAKEN) is not _TAKEN)}
            if message is None:
                left = self._leaving(taken)
            else:
                left = Taken(tuple(self.bundle.keys[i] for i in sorted(taken)))
            if self.bundle.is_single:
                self.void()
            self._extension.failed(self, left, message)  # type: ignore[union-attr]


def _without_own_frames(error: BaseException) -> None:
    """Remove the frames of Dask and of this package from the beginning of a traceback."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and _is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error.__traceback__ = trace


def _is_own(path: str) -> bool:
    return any(part in path.replace("\\", "/") for part in _OWN_FRAMES)
