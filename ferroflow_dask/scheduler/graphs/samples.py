"""Samples on the scheduler: a few tasks of an arriving graph run first, so that the others can be bundled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from dask.typing import Key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Wait for the first task of a sample, as new workers import libraries, and the most for the others [s].
_FIRST_S = 2.0
#: Wait for the others: at least so long [s], and this part of the expected duration of the graph.
_LEAST_S, _MOST_PART = 0.05, 0.05
#: Longest wait in all while the sample occupies all threads: then it costs nothing [s].
_BUSY_S = 10.0
#: States of tasks that have not ended.
_UNENDED = frozenset({"waiting", "no-worker", "queued", "processing"})


class Samples:
    """Waits for samples.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: Samples whose tasks have not all ended; several clients may have the same task in theirs.
        self.running: list[RunningSample] = []
        self._is_open = True

    def changed(self, key: Key) -> None:
        """Note that the state of a task has changed."""
        for running in self.running:
            if key in running.keys and self._has_ended(key):
                running.ended(key)

    def close(self) -> None:
        """Wait for no sample any more: `changed` may not be called again."""
        self._is_open = False
        for running in self.running:
            running.keys.clear()
            running.wake()

    def _has_ended(self, key: Key) -> bool:
        ts = self._scheduler.tasks.get(key)
        return ts is None or ts.state not in _UNENDED

    def _are_busy(self, keys: Collection[Key]) -> bool:
        """Return whether some tasks occupy all threads."""
        tasks, n_threads = self._scheduler.tasks, self._scheduler.total_nthreads
        running = (key for key in keys if key in tasks and tasks[key].state == "processing")
        return bool(self._scheduler.running) and sum(1 for _ in islice(running, n_threads)) == n_threads

    def begin(
        self,
        keys: Collection[Key],
        expected_s: Callable[[], float],
        clock: Callable[[], float],
        wake: Callable[[], object],
    ) -> RunningSample:
        """Follow a sample, until `end` gets what this method returns.

        Parameters
        ----------
        keys : collection of Key
            The tasks of the sample.
        expected_s : callable
            Returns the expected duration of the whole graph [s] by what is known now.
        clock : callable
            Returns the time [s].
        wake : callable
            Called whenever a task of the sample has ended.
        """
        left = {key for key in keys if self._is_open and not self._has_ended(key)}
        running = RunningSample(left, expected_s, clock, wake, self._are_busy)
        self.running.append(running)
        return running

    def end(self, running: RunningSample) -> None:
        """Follow a sample no longer."""
        self.running.remove(running)

    async def wait(self, keys: Collection[Key], expected_s: Callable[[], float]) -> None:
        """Wait until a sample has ended, or until waiting longer might cost more than it gains.

        The parameters are those of `begin`.
        """
        event, clock = asyncio.Event(), asyncio.get_running_loop().time
        running = self.begin(keys, expected_s, clock, event.set)
        try:
            while not running.is_over():
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(running.deadline):
                        await event.wait()
                event.clear()
        finally:
            self.end(running)


class RunningSample:
    """Tasks of a sample that have not ended, and the time until which the rest of the graph waits for them.

    Parameters
    ----------
    keys : set of Key
    expected_s, clock, wake : callable
        As in `Samples.begin`.
    is_busy : callable
        Returns whether the tasks with some keys occupy all threads.
    """

    def __init__(
        self,
        keys: set[Key],
        expected_s: Callable[[], float],
        clock: Callable[[], float],
        wake: Callable[[], object],
        is_busy: Callable[[Collection[Key]], bool],
    ) -> None:
        self.keys = keys
        self.wake = wake
        self._is_busy = is_busy
        self._expected_s = expected_s
        self._clock = clock
        self._has_ended = self._is_limited = False
        #: [s]
        self.deadline = clock() + _FIRST_S
        self._latest = clock() + max(_FIRST_S, _BUSY_S)

    def is_over(self) -> bool:
        """Return whether the rest of the graph waits no longer; called after `wake` and at the deadline."""
        if self._has_ended and not self._is_limited:
            self._is_limited = True
            wait_s = min(max(_LEAST_S, _MOST_PART * self._expected_s()), _FIRST_S)
            self.deadline = min(self._clock() + wait_s, self._latest)
        now = self._clock()
        if self.keys and self.deadline <= now < self._latest and self._is_busy(self.keys):
            self.deadline = min(now + _LEAST_S, self._latest)
        return not self.keys or now >= self.deadline

    def ended(self, key: Key) -> None:
        """Note that a task has ended: the first one limits the wait for the others."""
        self.keys.discard(key)
        self._has_ended = True
        self.wake()
