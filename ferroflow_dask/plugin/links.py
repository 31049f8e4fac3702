"""What workers have measured between them, by class of link: within a host, and between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferroflow_dask.plugin import seams

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: What is kept of earlier transfers when there are new ones.
_KEPT = 0.8


@dataclass(slots=True)
class _Class:
    """The sum of the bandwidths of transfers [B/s], and how many there were; both decay."""

    total: float = 0.0
    n: float = 0.0

    def record(self, total: float, n: float) -> None:
        if n:
            self.total, self.n = _KEPT * self.total + total, _KEPT * self.n + n

    @property
    def mean(self) -> float | None:
        return self.total / self.n if self.n else None


class Links:
    """The bandwidth of each class of links, as far as workers have sent each other enough to tell.

    Dask keeps a mean of all links, and one for each pair of workers, of which it has the sums of what a
    heartbeat tells enter as if they were means.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._looks_at = 0.0
        self._within, self._between = _Class(), _Class()

    def bandwidths(self, now: float) -> tuple[float, float]:
        """Return the bandwidth between two workers of one host, and of different ones [B/s].

        Dask's mean for a class of which nothing was measured, and for both where there is one host.
        """
        mean = self._scheduler.bandwidth
        if len(self._scheduler.host_info) < 2:
            return mean, mean
        if now >= self._looks_at:
            # A heartbeat tells what came since the one before, and there is no event of it.
            self._looks_at = now + seams.heartbeat_s(self._scheduler) / 2
            self._look()
        return self._within.mean or mean, self._between.mean or mean

    def _look(self) -> None:
        within, between = [0.0, 0.0], [0.0, 0.0]
        for ws in self._scheduler.workers.values():
            for source, (total, n) in seams.measured_bandwidths(ws).items():
                of_class = within if seams.host_of(source) == ws.host else between
                of_class[0] += total
                of_class[1] += n
        self._within.record(*within)
        self._between.record(*between)
