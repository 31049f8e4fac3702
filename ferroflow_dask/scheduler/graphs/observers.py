"""Observers on the scheduler: foreign plugins that follow tasks, for which no graph is bundled.

Such a plugin looks up each key in `scheduler.tasks` or `worker.tasks`. The tasks inside a bundle are not
there. While one is present, graphs stay as they come, and bundles that no worker has are split.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ferroflow_dask import config
from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import Change, Guard, ItemChange, attempt
from ferroflow_dask.scheduler.graphs.worker_observers import OPERATION, observers

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from ferroflow_dask.scheduler.graphs.splitting import Splitting

logger = logging.getLogger("ferroflow_dask")

#: Hooks by which scheduler plugins follow tasks.
_HOOKS = ("transition", "update_graph")
#: Request handlers after which workers may have other plugins.
_REGISTRATIONS = ("register_worker_plugin", "unregister_worker_plugin")


class Observers:
    """Knows the foreign plugins that follow tasks.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    splitting : Splitting
    guard : Guard
    added : callable
        Called after a scheduler plugin was added.
    """

    def __init__(
        self, scheduler: Scheduler, splitting: Splitting, guard: Guard, added: Callable[[], None]
    ) -> None:
        self._scheduler = scheduler
        self._splitting = splitting
        self._guard = guard
        self._note, self._split_unsent = guard(self.reported), guard(self._split)
        self._added = guard(added)
        self._is_respected = config.respects_observers()
        # The latest report of each worker: its time on the worker [s], and the plugins.
        self._reports: dict[str, tuple[float, list[str]]] = {}
        self._warned: set[str] = set()

    def changes(self, on_workers: Change) -> Iterable[Change]:
        """Return the changes to the scheduler; `on_workers` is the plugin that reports."""
        stock_add = self._scheduler.add_plugin

        def add_plugin(*args: Any, **options: Any) -> None:
            stock_add(*args, **options)
            self._added()
            self._scheduler.loop.add_callback(self._split_unsent)

        yield ItemChange("Scheduler.add_plugin", vars(self._scheduler), "add_plugin", add_plugin)
        handlers = self._scheduler.handlers
        for operation in _REGISTRATIONS:

            async def handle(comm: Any, stock: Any = handlers[operation], **message: Any) -> Any:
                answer = await stock(comm, **message)
                await self._ask(on_workers)
                return answer

            yield ItemChange(f"Scheduler.handlers[{operation!r}]", handlers, operation, handle)

    async def _ask(self, on_workers: Change) -> None:
        """Ask all workers, so that the next graph of the client that has registered a plugin is right."""
        if not self._is_respected or not on_workers.is_applied or self._guard.error is not None:
            return
        try:
            await on_workers.settled()
            # A worker that starts has no handler yet, and announces its plugins later.
            answers = await self._scheduler.broadcast(msg={"op": OPERATION}, on_error="ignore")
            for address, report in answers.items():
                self._note(address, report)
        except Exception as error:  # noqa: BLE001 -- it ends the plugin, not the client's request
            self._guard.fail(error)

    def reported(self, address: str, report: Any) -> None:
        """Note which plugins of a worker follow tasks, unless a later report was faster."""
        if not isinstance(report, dict) or address not in self._scheduler.workers:
            return
        latest = (report["at"], report["observers"])
        if latest[0] >= self._reports.get(address, latest)[0]:
            self._reports[address] = latest
            if latest[1]:
                self._scheduler.loop.add_callback(self._split_unsent)

    def worker_left(self, address: str) -> None:
        """Forget a worker."""
        self._reports.pop(address, None)

    def are_present(self) -> bool:
        """Return whether graphs must stay as they come; warn the first time for each class of plugins."""
        if not self._is_respected:
            return False
        present = {name for _, names in self._reports.values() for name in names}
        present.update(observers(self._scheduler.plugins.values(), _HOOKS))
        if new := present - self._warned:
            self._warned |= new
            self._warn(", ".join(sorted(new)))
        return bool(present)

    def _warn(self, names: str) -> None:
        message = (
            f"ferroflow: plugins that follow tasks turn bundling off: {names}. To bundle all the same, set "
            "ferroflow.observers: ignore, or ferroflow_bundles = True in the class of the plugin"
        )
        logger.warning("%s", message)
        attempt(lambda: _distributed.warn_clients(self._scheduler, message), "clients could not be warned")

    def _split(self) -> None:
        """Split the bundles that no worker has; must not be called within a transition."""
        tasks, keys = self._scheduler.tasks, self._splitting.bundles.keys()
        unsent = [key for key in keys if key in tasks and tasks[key].processing_on is None]
        if unsent and self.are_present():
            for key in unsent:
                self._splitting.split(key, OPERATION)
