"""Overheads of a cluster, as its scheduler knows them: the numbers by which graphs are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.scheduler.pauses import ASSUMED_S

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from ferroflow_dask.scheduler.learned import Learned

#: Threads for which graphs are cut while there are no workers: an adaptive cluster starts some [threads].
_THREADS_TO_COME = (1,) * 4
#: Between processes of one host, at least [B/s]. Dask's mean starts at 1e8 and follows each transfer by a
#: twentieth; those of 1 MB mostly wait for messages.
_WITHIN_HOST = 4e8


class Overheads:
    """The cluster of a scheduler as a `ClusterProfile`; may be read by any thread.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    learned : Learned
        Has the measured round trip and pause.
    cores : callable, optional
        Returns how many cores all threads share; 0 if each has one.
    """

    def __init__(self, scheduler: Scheduler, learned: Learned, cores: Callable[[], int] = lambda: 0) -> None:
        self._cores = cores
        self._scheduler = scheduler
        self._learned = learned
        self._threads: tuple[int, ...] = _THREADS_TO_COME
        # The last profile, and the values that it is made of: each division of a bundle asks for it.
        self._known: tuple[tuple[Any, ...], ClusterProfile] | None = None

    def profile(self) -> ClusterProfile:
        """Return the cluster as it is now; with the workers that it had last if it has none."""
        workers = list(self._scheduler.workers.values())
        if workers:
            self._threads = tuple(ws.nthreads for ws in workers)
        limits = [ws.memory_limit for ws in workers if ws.memory_limit]
        round_trip_s, pause_s = self._learned.round_trip_s, self._learned.pause_s
        bandwidth = float(self._scheduler.bandwidth)
        if len(self._scheduler.host_info) == 1:
            bandwidth = max(bandwidth, _WITHIN_HOST)
        cores = self._cores() if workers else 0
        made_of = (self._threads, round_trip_s, pause_s, bandwidth, min(limits, default=0), cores)
        if self._known is None or self._known[0] != made_of:
            default = ClusterProfile(self._threads)
            profile = ClusterProfile(
                self._threads,
                pause_s=ASSUMED_S if pause_s is None else pause_s,
                round_trip_s=round_trip_s or default.round_trip_s,
                bandwidth=bandwidth or default.bandwidth,
                memory_nbytes=min(limits, default=0),
                cores=cores,
            )
            self._known = made_of, profile
        return self._known[1]
