"""Network view: bandwidths, bytes in flight and device memory, read when a policy is about to need them.

distributed has no events for these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dask

from ferroflow_dask.annotations import GPU
from ferroflow_dask.device_reports import memory_of
from ferroflow_dask.policy import ClusterView, TaskView
from ferroflow_dask.scheduler import _distributed

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Weight of earlier transfers when there are new ones.
_KEPT = 0.8


@dataclass(slots=True)
class _LinkClass:
    """Sum of the bandwidths of transfers [B/s] and their number; both decay."""

    total: float = 0.0
    n: float = 0.0
    mean: float | None = None

    def record(self, total: float, n: float) -> None:
        if n:
            self.total, self.n = _KEPT * self.total + total, _KEPT * self.n + n
            self.mean = self.total / self.n


class Links:
    """Measured bandwidths of links within a host and between hosts.

    Dask keeps the mean over all links. It also keeps one for each pair of workers, but adds a heartbeat's sum
    to it as if it were a mean.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._looks_at = 0.0
        self._within, self._between = _LinkClass(), _LinkClass()

    def bandwidths(self, now: float) -> tuple[float, float]:
        """Return the bandwidths between workers of one host, and of different hosts [B/s].

        Dask's mean where nothing was measured, and for both if there is one host only.
        """
        mean = self._scheduler.bandwidth
        if len(self._scheduler.host_info) < 2:
            return mean, mean
        if now >= self._looks_at:
            # A heartbeat reports the transfers since the one before.
            self._looks_at = now + _distributed.heartbeat_s(self._scheduler) / 2
            self._look()
        return self._within.mean or mean, self._between.mean or mean

    def _look(self) -> None:
        within, between = [0.0, 0.0], [0.0, 0.0]
        for ws in self._scheduler.workers.values():
            for source, (total, n) in _distributed.measured_bandwidths(ws).items():
                of_class = within if _distributed.host_of(source) == ws.host else between
                of_class[0] += total
                of_class[1] += n
        self._within.record(*within)
        self._between.record(*between)


class NetworkView:
    """Updates a cluster view with bandwidths, bytes in flight and free memory of devices.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    view : ClusterView
    """

    def __init__(self, scheduler: Scheduler, view: ClusterView) -> None:
        self._scheduler = scheduler
        self._view = view
        self._links = Links(scheduler)
        #: When `update_memory` has something to do again [s].
        self.reads_memory_at = 0.0

    def update_workers(self, addresses: Iterable[str], now: float) -> None:
        """Update bandwidths, and the bytes in flight and free device memory of workers."""
        self._view.host_bandwidth, self._view.bandwidth = self._links.bandwidths(now)
        for address in addresses:
            ws = self._scheduler.workers.get(address)  # it may be joining or leaving
            if ws is not None and address in self._view.workers:
                self._view.set_incoming(address, _distributed.incoming_nbytes(ws))
                memory = memory_of(ws) if self._view.workers[address].kind == GPU else None
                if memory is not None:
                    self._view.set_device_memory(address, *memory)

    def update_memory(self, now: float) -> None:
        """Update which workers are above Dask's target for memory, by their last heartbeats."""
        if now < self.reads_memory_at:
            return
        self.reads_memory_at = now + _distributed.heartbeat_s(self._scheduler) / 2
        target = dask.config.get("distributed.worker.memory.target")
        if not target:
            return
        for address in self._view.workers:
            ws = self._scheduler.workers.get(address)
            if ws is not None and ws.memory_limit:
                nbytes = ws.metrics.get("memory", 0)
                self._view.set_short_of_memory(address, nbytes > target * ws.memory_limit)

    def update_candidates(self, task: TaskView, now: float) -> None:
        """Update the workers on which a task may be placed."""
        for address in task.allowed or ():  # clients may have scattered data there
            self._view.set_nbytes(address, self._scheduler.workers[address].nbytes)
        if task.input_bytes or task.output_bytes:
            best = task.allowed
            if best is None:
                best = [worker.key for worker in self._view.least_loaded_for(task)]
            self.update_workers({*task.held, *best}, now)
