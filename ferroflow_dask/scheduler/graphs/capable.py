"""Workers that can run bundles: those that have announced this version of the package."""

from __future__ import annotations

import asyncio
from collections import Counter
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
        self._cores: dict[str, int] = {}

    def note(self, address: str, announced: object, cores: object) -> None:
        """Remember the version that a worker has announced, and the cores of its host."""
        if isinstance(cores, int) and cores > 0:
            self._cores[address] = cores
        self._announced.add(address)
        self._has_announced.set()
        if announced == VERSION:
            self._capable.add(address)

    def worker_left(self, address: str) -> None:
        """Forget a worker."""
        self._cores.pop(address, None)
        self._capable.discard(address)
        self._announced.discard(address)

    def cores(self) -> int:
        """Return how many cores all threads share; 0 if each has one, or if it is unknown.

        May be called by any thread.
        """
        of_hosts, threads = dict[str, int](), Counter[str]()
        for address, ws in list(self._scheduler.workers.items()):
            if address not in self._cores:
                return 0
            of_hosts[ws.host] = self._cores[address]
            threads[ws.host] += ws.nthreads
        cores = sum(min(of_hosts[host], n) for host, n in threads.items())
        return cores if cores < threads.total() else 0

    def crowding(self) -> float:
        """Return how many threads share a core, at least 1; 1 if it is unknown."""
        cores = self.cores()
        return sum(ws.nthreads for ws in self._scheduler.workers.values()) / cores if cores else 1.0

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
