"""Worker's end of low-latency messages: intervals of streams, by the load of the sending event loop.

This module is sent to workers by value and must not import this package.
"""

from __future__ import annotations

import asyncio
from time import thread_time
from typing import TYPE_CHECKING

from distributed import WorkerPlugin

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.batched import BatchedSend

#: Window over which the load of an event loop is measured [s].
_WINDOW_S = 0.01
#: Load above which messages are batched.
_BUSY = 0.8


class Load:
    """Load of the calling thread: the part of its time in which it runs or waits for a core, from 0 to 1."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._worked_s = 0.0
        self._busy = 0.0

    def at(self, now_s: float) -> float:
        """Return the load over the last window."""
        elapsed_s = now_s - self._since_s
        if elapsed_s >= _WINDOW_S or elapsed_s < 0:
            worked_s = _busy_s()
            if elapsed_s < 10 * _WINDOW_S:
                self._busy = (worked_s - self._worked_s) / elapsed_s if elapsed_s > 0 else 1.0
            else:
                self._busy = 0.0  # the thread was mostly idle
            self._since_s, self._worked_s = now_s, worked_s
        return self._busy


class WorkerLoad(Load):
    """Load of a worker: 1 while it has other tasks to run, since then its messages are not urgent.

    Parameters
    ----------
    worker : distributed.Worker
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._ready = worker.state.ready

    def at(self, now_s: float) -> float:
        """Return the load over the last window."""
        return 1.0 if self._ready else super().at(now_s)


def _busy_s() -> float:
    """Return the time that this thread has run or was ready to run [s]."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            ran_ns, waited_ns, _ = file.read().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9
    except (OSError, ValueError):  # /proc exists on Linux only
        return thread_time()


class Interval:
    """Interval between two batches of a stream, computed whenever it is added to a time.

    `distributed.batched.BatchedSend` adds its interval to the time of each batch, and uses it for nothing
    else.

    Parameters
    ----------
    load : Load
    longest_s : float
        The stream's own interval [s].
    """

    def __init__(self, load: Load, longest_s: float) -> None:
        self._load = load
        self.longest_s = longest_s

    def __radd__(self, now_s: float) -> float:
        """Return when the next batch may leave [s]."""
        try:
            load = self._load.at(now_s)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 -- an exception here would stop the stream for ever
            load = 1.0
        return now_s + self.longest_s * min(1.0, max(0.0, (load - _BUSY) / (1 - _BUSY)))


def shorten(stream: BatchedSend, load: Load) -> Interval:
    """Let a stream send at once while `load` is low; `restore` undoes it, given the returned interval."""
    interval = Interval(load, getattr(stream.interval, "longest_s", stream.interval))
    stream.interval = interval
    return interval


def restore(stream: BatchedSend, interval: Interval) -> None:
    """Give a stream its own interval back, unless another one was set since."""
    if stream.interval is interval:
        stream.interval = interval.longest_s


class WorkerBatching(WorkerPlugin):
    """Shortens the interval of a worker's messages to the scheduler."""

    def setup(self, worker: Worker) -> None:
        """Shorten the interval; called by distributed on each worker."""
        self._interval = shorten(worker.batched_stream, WorkerLoad(worker))

    def teardown(self, worker: Worker) -> None:
        """Restore Dask's interval."""
        restore(worker.batched_stream, self._interval)
