"""What Dask has measured between workers, by class of link: within a host, and between two."""

from __future__ import annotations

from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from ferroflow_dask.plugin import seams

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: How often pairs of workers are looked through, of which there is no event [s], and how many of them.
_INTERVAL_S = 1.0
_PAIRS = 1000


class Links:
    """The bandwidth of each class of links, as far as workers have sent each other enough to tell.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._looks_at = 0.0
        self._within: float | None = None
        self._between: float | None = None

    def bandwidths(self, now: float) -> tuple[float, float]:
        """Return the bandwidth between two workers of one host, and of different ones [B/s].

        Dask's mean for a class of which nothing was measured, and for both where there is one host.
        """
        mean = self._scheduler.bandwidth
        if len(self._scheduler.host_info) < 2:
            return mean, mean
        if now >= self._looks_at:
            self._looks_at = now + _INTERVAL_S
            self._look()
        return self._within or mean, self._between or mean

    def _look(self) -> None:
        within: list[float] = []
        between: list[float] = []
        for (one, other), bandwidth in islice(self._scheduler.bandwidth_workers.items(), _PAIRS):
            (within if seams.host_of(one) == seams.host_of(other) else between).append(bandwidth)
        self._within = median(within) if within else None
        self._between = median(between) if between else None
