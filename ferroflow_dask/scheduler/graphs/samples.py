"""Samples on the scheduler: a few tasks of an arriving graph run first, so that the others can be bundled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dask.typing import Key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Longest wait for the first task of a sample, as new workers import libraries, and again for the others [s].
_FIRST_S = 2.0
#: Wait for the others: at least so long [s], and this part of the expected duration of the graph.
_LEAST_S, _MOST_PART = 0.05, 0.05
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
        self.running: list[_Running] = []
        self._is_open = True

    def changed(self, key: Key) -> None:
        """Note that the state of a task has changed."""
        for running in self.running:
            if key in running.keys and self._has_ended(key):
                running.keys.discard(key)
                running.event.set()

    def close(self) -> None:
        """Wait for no sample any more: `changed` may not be called again."""
        self._is_open = False
        for running in self.running:
            running.keys.clear()
            running.event.set()

    def _has_ended(self, key: Key) -> bool:
        ts = self._scheduler.tasks.get(key)
        return ts is None or ts.state not in _UNENDED

    async def wait(self, keys: Collection[Key], expected_s: Callable[[], float]) -> None:
        """Wait until a sample has ended, or until waiting longer might cost more than it gains.

        Parameters
        ----------
        keys : collection of Key
            The tasks of the sample.
        expected_s : callable
            Returns the expected duration of the whole graph [s] by what is known now.
        """
        if not self._is_open:
            return
        running = _Running({key for key in keys if not self._has_ended(key)})
        self.running.append(running)
        clock = asyncio.get_running_loop().time
        deadline = clock() + _FIRST_S
        has_first = False
        try:
            while running.keys:
                async with asyncio.timeout_at(deadline):
                    await running.event.wait()
                running.event.clear()
                if not has_first:
                    has_first = True
                    deadline = clock() + min(max(_LEAST_S, _MOST_PART * expected_s()), _FIRST_S)
        except TimeoutError:
            pass
        finally:
            self.running.remove(running)


@dataclass(eq=False, slots=True)
class _Running:
    """Tasks of a sample that have not ended; the event is set whenever one ends."""

    keys: set[Key]
    event: asyncio.Event = field(default_factory=asyncio.Event)
