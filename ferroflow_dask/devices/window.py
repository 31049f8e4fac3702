"""What was enqueued on a device and has not ended: kept alive, bounded, and timed when it ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ferroflow_dask.devices.device import Device, Event
from ferroflow_dask.exceptions import KernelError
from ferroflow_dask.kernels import one_line

#: Steps that are enqueued ahead of their end, and how long they may take together [s]. Less would let the
#: device wait for the host; more hides from schedulers how much there is still to do.
_MOST_AHEAD = 64
_AHEAD_S = 0.05
_MOST_AT_FIRST = 4
#: Part of a new step in the mean duration.
_WEIGHT = 0.1


Note = Callable[[tuple[int, ...], float, bool], None]


@dataclass(slots=True, eq=False)
class Work:
    """A task's steps on a device.

    Parameters
    ----------
    note : callable
        Told the op ids of a step, how long each took [s], and whether on the device, once it has ended.
    ended : callable
        Told how long all steps took together [s], once the last has ended.
    """

    note: Note
    ended: Callable[[float], None]
    n_open: int = 0
    is_complete: bool = False
    spent_s: float = 0.0

    def ran(self, op_id: int, seconds: float) -> None:
        """Note an op that ran on the host meanwhile [s]."""
        self.spent_s += seconds
        self.note((op_id,), seconds, False)


@dataclass(slots=True, eq=False)
class _Step:
    what: str
    ids: tuple[int, ...]
    start: Event
    end: Event
    work: Work
    # Operands, which must not be freed for others to use while the device may still read them.
    keeps: list[Any] = field(default_factory=list)


class Window:
    """The steps on a device that have not ended, oldest first."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: deque[_Step] = deque()
        self._lock = threading.RLock()
        self._mean_s: float | None = None
        #: Whether a step has failed.
        self.has_failed = False

    def add(
        self, what: str, ids: tuple[int, ...], events: tuple[Event, Event], work: Work, keeps: list[Any]
    ) -> None:
        """Note a step between two events, and wait for the oldest if too many are open.

        Raises
        ------
        KernelError
            An earlier step has failed.
        """
        with self._lock:
            work.n_open += 1
            self._steps.append(_Step(what, ids, *events, work, keeps))
            while self._steps and (self._is_full or self._steps[0].end.done):
                self._finish_first()

    @property
    def _is_full(self) -> bool:
        n = len(self._steps)
        if self._mean_s is None:  # nothing has ended so far
            return n > _MOST_AT_FIRST
        return n > _MOST_AHEAD or (n > 2 and n * self._mean_s > _AHEAD_S)

    def complete(self, work: Work) -> None:
        """Note that a task has no further steps."""
        with self._lock:
            work.is_complete = True
            if not work.n_open:
                work.ended(work.spent_s)

    def until(self, event: Event | None = None) -> None:
        """Wait for the steps up to the one that ends with an event, or for all.

        Raises
        ------
        KernelError
            One of them has failed; it is named.
        """
        with self._lock:
            if event is not None and not any(step.end is event for step in self._steps):
                return
            while self._steps:
                is_it = self._steps[0].end is event
                self._finish_first()
                if is_it:
                    return

    def reap(self) -> None:
        """Finish what has ended, without waiting; what has failed is left for somebody who can be told."""
        self.failure()
        if self._lock.acquire(blocking=False):
            try:
                with suppress(Exception):
                    while self._steps and self._steps[0].end.done:
                        self._steps[0].end.synchronize()
                        self._finish_first()
            finally:
                self._lock.release()

    def forget(self) -> None:
        """Drop what is open."""
        with self._lock:
            self._steps.clear()

    def failure(self) -> KernelError | None:
        """Return what tells of the device's failure, if it has failed."""
        try:
            self._device.check()
        except Exception as error:  # noqa: BLE001 -- the device's own
            return self._failure(list(self._steps), error)
        return None

    @property
    def has_suspects(self) -> bool:
        """Whether ops are open that may have made the device fail."""
        return any(step.ids for step in list(self._steps))

    def _failure(self, steps: Sequence[_Step], error: Exception) -> KernelError:
        # Nobody knows which of the steps that are open has done it; the oldest is told by name.
        self.has_failed = True
        first, *others = [step.what for step in steps if step.ids] or ["what ran last"]
        or_others = f", or one of {len(others)} steps after it," if others else ""
        return KernelError(f"{first}{or_others} failed on {self._device.name}: {one_line(error)}")

    def _finish_first(self) -> None:
        step = self._steps.popleft()
        work = step.work
        work.n_open -= 1
        try:
            step.end.synchronize()
            seconds = self._device.elapsed_s(step.start, step.end)
        except Exception as error:
            raise self._failure([step, *self._steps], error) from error
        before_s = seconds if self._mean_s is None else self._mean_s
        self._mean_s = before_s + _WEIGHT * (seconds - before_s)
        work.spent_s += seconds
        if step.ids:
            work.note(step.ids, seconds / len(step.ids), True)
        if work.is_complete and not work.n_open:
            work.ended(work.spent_s)
