"""What no event tells, looked at when a policy is about to need it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ferroflow_dask.annotations import GPU
from ferroflow_dask.plugin import seams
from ferroflow_dask.plugin.device_reports import memory_of
from ferroflow_dask.plugin.links import Links
from ferroflow_dask.policy import ClusterView, TaskView

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


class Polled:
    """Brings a view up to date with links, with what is on its way to workers, and with what they hold.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    view : ClusterView
    """

    def __init__(self, scheduler: Scheduler, view: ClusterView) -> None:
        self._scheduler = scheduler
        self._view = view
        self._links = Links(scheduler)

    def see_workers(self, addresses: Iterable[str], now: float) -> None:
        """Note the inputs that are on their way to workers, how fast, and what is free on their devices."""
        self._view.host_bandwidth, self._view.bandwidth = self._links.bandwidths(now)
        for address in addresses:
            ws = self._scheduler.workers.get(address)  # it may have left, or joined, just now
            if ws is not None and address in self._view.workers:
                self._view.set_incoming(address, seams.incoming_nbytes(ws))
                memory = memory_of(ws) if self._view.workers[address].kind == GPU else None
                if memory is not None:
                    self._view.set_device_memory(address, *memory)

    def see_candidates(self, task: TaskView, now: float) -> None:
        """Note what concerns the workers on which a task may be placed."""
        for address in task.allowed or ():  # clients may have sent them data
            self._view.set_nbytes(address, self._scheduler.workers[address].nbytes)
        if task.input_bytes or task.output_bytes:
            best = task.allowed
            if best is None:
                best = [worker.key for worker in self._view.least_loaded_for(task)]
            self.see_workers({*task.held, *task.coming, *best}, now)
