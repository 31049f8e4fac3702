"""CPU time of a virtual scheduler: measured, and if asked for, charged to virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import thread_time
from typing import Any

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.virtual.clock import VirtualTime

#: What is done with the CPU time that the scheduler takes.
IGNORED, MEASURED, CHARGED = "ignored", "measured", "charged"


class SchedulerCpu:
    """Runs everything that happens on the scheduler's event loop.

    Parameters
    ----------
    time : VirtualTime
    mode : str
        `ignored`: nothing is measured. `measured`: `seconds` adds up the CPU time. `charged`: the event loop
        is also busy for that time, so what comes meanwhile waits. Then no run repeats exactly.

    Raises
    ------
    UsageError
        The mode is another one.
    """

    def __init__(self, time: VirtualTime, mode: str) -> None:
        if mode not in (IGNORED, MEASURED, CHARGED):
            modes = ", ".join((IGNORED, MEASURED, CHARGED))
            raise UsageError(f"scheduler_cpu must be one of: {modes}; got {mode!r}")
        #: CPU time so far [s].
        self.seconds = 0.0
        self._time = time
        self._mode = mode
        self._due: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._busy_until = 0.0
        self._is_measuring = False

    def run(self, call: Callable[..., Any], *args: Any) -> None:
        """Run `call(*args)`: now, or if CPU time is charged, once the event loop is free."""
        if self._mode == IGNORED:
            call(*args)
        elif self._mode == MEASURED:
            self._measured(call, args)
        else:
            self._due.append((call, args))
            if len(self._due) == 1:
                self._time.at(max(self._time.now, self._busy_until), self._next, background=self._is_quiet)

    @property
    def _is_quiet(self) -> bool:
        return self._time.is_background

    def _next(self) -> None:
        before_s = self.seconds
        self._measured(*self._due[0])
        self._due.popleft()
        self._busy_until = self._time.now + self.seconds - before_s
        if self._due:
            self._time.at(self._busy_until, self._next, background=self._is_quiet)

    def _measured(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self._is_measuring:  # a call within another one is measured with it
            call(*args)
            return
        self._is_measuring = True
        start_s = thread_time()
        try:
            call(*args)
        finally:
            self.seconds += thread_time() - start_s
            self._is_measuring = False
