"""Deaths of workers: which tasks are blamed for one, and which bundles are split after it.

Dask counts a worker's death against every task that the worker had. The plugin sends more tasks to a worker
than Dask would, and a bundle is only blamed once the step that ended the worker runs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.policy import ClusterView
from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import Change, Guard, ItemChange
from ferroflow_dask.scheduler.graphs.bundles import Bundles

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


class Deaths:
    """Takes the blame for dead workers from tasks that cannot have ended them.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    bundles : Bundles
    view : ClusterView
    guard : Guard
    in_flight : callable
        Returns the tasks of a worker for which a steal is in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        bundles: Bundles,
        view: ClusterView,
        guard: Guard,
        in_flight: Callable[[str], Iterable[Key]],
    ) -> None:
        self._scheduler = scheduler
        self._bundles = bundles
        self._view = view
        self._guard = guard
        self._in_flight = in_flight
        # Bundles of workers that are being removed, which may have ended them.
        self._suspects: dict[str, list[Key]] = {}

    def changes(self) -> Iterator[Change]:
        """Return the changes to the scheduler."""
        stock, spare = self._scheduler.remove_worker, self._guard(self.spare)

        # Dask counts deaths before it calls any hook.
        async def remove_worker(address: str, **options: Any) -> Any:
            if not options.get("expected"):
                spare(address)
            return await stock(address, **options)

        name = "remove_worker"
        yield ItemChange(f"Scheduler.{name}", vars(self._scheduler), name, remove_worker)
        handlers = self._scheduler.handlers
        yield ItemChange("Scheduler.handlers['unregister']", handlers, "unregister", remove_worker)

    def spare(self, address: str) -> None:
        """Lower the counts that Dask is about to raise for the death of a worker."""
        worker, ws = self._view.workers.get(address), self._scheduler.workers.get(address)
        if worker is None or ws is None:
            return
        # From Dask's own queue a worker has one more task than threads. So as many of its tasks are blamed,
        # and as many of those that need no transfer.
        n = worker.nthreads + 1
        may_have_run = {task.key for task in islice(worker.queue, n)}
        here = (task.key for task in worker.queue if not task.missing_bytes(address))
        may_have_run |= {*islice(here, n), *(task.key for task in worker.queue if task.has_started)}
        may_have_run -= set(self._in_flight(address))
        may_have_run |= {ts.key for ts in ws.long_running}
        processing = [ts.key for ts in ws.processing]
        suspects = [key for key in processing if key in may_have_run and self._bundles.is_splittable(key)]
        self._suspects[address] = suspects
        for key in processing:
            if key not in may_have_run or key in suspects:
                _distributed.lower_blame(self._scheduler, key)

    def removed(self, address: str) -> None:
        """Split the bundles that may have ended a worker, before Dask sends them to another one."""
        for key in self._suspects.pop(address, ()):
            self._bundles.split(key, "ferroflow-split", keeps=True)
