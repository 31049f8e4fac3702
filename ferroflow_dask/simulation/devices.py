"""Devices of the light engine: threads of workers, and links that serve first in, first out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ferroflow_dask.topology import Route


class Threads:
    """Times at which the threads of each worker become free [s].

    Parameters
    ----------
    threads : sequence of int
        Of each worker.
    speeds : sequence of float
        Of each worker.
    """

    def __init__(self, threads: Sequence[int], speeds: Sequence[float]) -> None:
        self._free_s = [[0.0] * n for n in threads]
        # For each speed. They may hold outdated times, which are dropped when they come up.
        self._earliest: list[list[tuple[float, int]]] = []
        by_speed: dict[float, list[tuple[float, int]]] = {}
        for worker, speed in enumerate(speeds):
            by_speed.setdefault(speed, []).append((0.0, worker))
        self._earliest = list(by_speed.values())
        self._of_speed = [by_speed[speed] for speed in speeds]

    def free_s(self, worker: int) -> float:
        """Return when the first thread of a worker is free [s]."""
        return self._free_s[worker][0]

    def first_free(self) -> list[int]:
        """Return the worker of each speed that has a free thread first."""
        free_s = self._free_s
        for earliest in self._earliest:
            while earliest[0][0] < free_s[earliest[0][1]][0]:
                heapq.heappop(earliest)
        return [earliest[0][1] for earliest in self._earliest]

    def occupy(self, worker: int, until_s: float) -> None:
        """Take the first free thread of a worker until a time [s]."""
        free_s = self._free_s[worker]
        heapq.heapreplace(free_s, until_s)
        heapq.heappush(self._of_speed[worker], (free_s[0], worker))


class Links:
    """Times at which links become free [s]. A link serves its transfers one after the other.

    Parameters
    ----------
    bandwidths : sequence of float
        Of each link [B/s].
    """

    def __init__(self, bandwidths: Sequence[float]) -> None:
        self._bandwidths = bandwidths
        self._free_s = [0.0] * len(bandwidths)

    def start_s(self, route: Route, ready_s: float) -> float:
        """Return when all links of a route are free [s]."""
        free_s = self._free_s
        for link in route.links:
            ready_s = max(ready_s, free_s[link])
        return ready_s

    def occupy(self, route: Route, nbytes: int, ready_s: float) -> tuple[float, float]:
        """Send a result over a route; return when it starts and when it has arrived [s]."""
        if not nbytes:
            return ready_s, ready_s + route.latency_s
        start_s = self.start_s(route, ready_s)
        for link in route.links:
            self._free_s[link] = start_s + nbytes / self._bandwidths[link]
        return start_s, start_s + nbytes / route.bandwidth + route.latency_s
