"""Virtual time: a heap of calls, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import partial
from inspect import iscoroutine
from itertools import count
from typing import Any, NamedTuple

from ferroflow_dask.exceptions import SimulationError


class _Entry(NamedTuple):
    when: float
    number: int  # unique: ties are served in the order in which they were asked for
    is_background: bool
    call: Callable[[], Any]


class VirtualTime:
    """The clock, and the calls that are due.

    Calls in the background (periodic looks of a scheduler that may find nothing) do not keep a run without
    an end going for longer than its `patience_s`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        #: Whether the call that runs now is one of the background.
        self.is_background = False
        self._heap: list[_Entry] = []
        self._numbers = count()
        self._n_foreground = 0
        self._last_foreground = 0.0

    def __call__(self) -> float:
        """Return the time [s]; what takes a clock takes this object."""
        return self.now

    def at(self, when: float, call: Callable[..., Any], *args: Any, background: bool = False) -> None:
        """Have `call(*args)` run at a time [s], which must not have passed; O(log n)."""
        if not when >= self.now:
            raise SimulationError(f"a call is due at {when!r} s, but it is {self.now!r} s already")
        self._n_foreground += not background
        heapq.heappush(self._heap, _Entry(when, next(self._numbers), background, partial(call, *args)))

    def after(self, delay: float, call: Callable[..., Any], *args: Any, background: bool = False) -> None:
        """Have `call(*args)` run in `delay` seconds."""
        self.at(self.now + delay, call, *args, background=background)

    def run(self, until: float, patience_s: float, max_calls: int) -> None:
        """Run what is due, in order of time.

        Parameters
        ----------
        until : float
            Run what is due up to this time, in the background too, which it is then; `math.inf` for all
            there is [s].
        patience_s : float
            Stop when nothing but background calls has happened for so long, if `until` is `math.inf` [s].
        max_calls : int
            Bound on the number of calls.

        Raises
        ------
        SimulationError
            There were more calls than `max_calls`, or one was due before now.
        """
        # What is in the background is left undone only where no time after it is set.
        is_patient = until < math.inf
        for _ in range(max_calls):
            if not self._heap or self._heap[0].when > until:
                break
            is_over = not self._n_foreground and self._heap[0].when > self._last_foreground + patience_s
            if is_over and not is_patient:
                break
            self._run_next()
        else:
            raise SimulationError(f"no end after {max_calls} events, at {self.now:.6g} s of virtual time")
        if until < math.inf:
            self.now = max(self.now, until)

    def _run_next(self) -> None:
        entry = heapq.heappop(self._heap)
        if entry.when < self.now:
            raise SimulationError(f"a call was due at {entry.when!r} s, but it is {self.now!r} s already")
        self.now, self.is_background = entry.when, entry.is_background
        if not entry.is_background:
            self._n_foreground -= 1
            self._last_foreground = entry.when
        try:
            entry.call()
        finally:
            self.is_background = False


class VirtualLoop:
    """The part of an event loop that extensions of a scheduler use: callbacks, now and later.

    Virtual workers have no plugins to register, so the coroutines that register and remove them are closed.

    Parameters
    ----------
    time : VirtualTime
    run : callable, optional
        Runs each callback, given with its arguments; at once if left out.
    """

    def __init__(self, time: VirtualTime, run: Callable[..., None] | None = None) -> None:
        self._time = time
        #: Runs a call of the scheduler.
        self.run = run or (lambda call, *args: call(*args))

    def add_callback(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run a callback once the present call is over."""
        self._time.after(0.0, self.run, self._call, callback, *args, background=self._time.is_background)

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> None:
        """Run a callback in `delay` seconds, in the background."""
        self._time.after(delay, self.run, self._call, callback, *args, background=True)

    @staticmethod
    def _call(callback: Callable[..., Any], *args: Any) -> None:
        result = callback(*args)
        if iscoroutine(result):
            result.close()


class Periodic:
    """Calls again and again, in the background; stands where tornado's `PeriodicCallback` stood.

    Parameters
    ----------
    time : VirtualTime
    call : callable
    callback_time : float
        Interval, in tornado's unit [ms].
    """

    def __init__(self, time: VirtualTime, call: Callable[[], Any], callback_time: float) -> None:
        self._time = time
        self._call = call
        self.callback_time = callback_time
        self._is_stopped = False
        self._arm()

    def stop(self) -> None:
        """Call no more."""
        self._is_stopped = True

    def _arm(self) -> None:
        self._time.after(self.callback_time / 1e3, self._tick, background=True)

    def _tick(self) -> None:
        if not self._is_stopped:
            self._call()
            self._arm()
