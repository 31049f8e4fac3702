"""Workers that can run bundles: those that have announced this version of the package."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Version of this package, which workers announce.
VERSION = version("ferroflow-dask")
#: Longest wait for the announcements of workers, each of which is one message after its plugin is set up [s].
_ANNOUNCED_S = 1.0


class CapableWorkers:
    """Knows which workers can run bundles.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._capable: set[str] = set()
        # Also those that have another version.
        self._announced: set[str] = set()
        self._has_announced = asyncio.Event()

    def note(self, address: str, announced: object) -> None:
        """Remember the version that a worker has announced."""
        self._announced.add(address)
        self._has_announced.set()
        if announced == VERSION:
            self._capable.add(address)

    def worker_left(self, address: str) -> None:
        """Forget a worker."""
        self._capable.discard(address)
        self._announced.discard(address)

    def are_all(self) -> bool:
        """Return whether all workers can run bundles; may be called by any thread."""
        return self._capable.issuperset(list(self._scheduler.workers))

    async def announced(self) -> None:
        """Wait until all workers have announced a version: a graph may follow `install` at once."""
        try:
            async with asyncio.timeout(_ANNOUNCED_S):
                while not self._announced.issuperset(self._scheduler.workers):
                    self._has_announced.clear()
                    await self._has_announced.wait()
        except TimeoutError:  # the next graph does not wait for them again
            self._announced.update(self._scheduler.workers)
