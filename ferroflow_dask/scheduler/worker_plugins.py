"""Worker plugins: a plugin on all workers, those that join later included, for as long as it is wanted.

Plugins are sent by value, so workers need not have this package. Such a plugin may use only its own module,
`worker_handlers`, `worker_observers` and distributed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import cloudpickle
from distributed import Status, WorkerPlugin

from ferroflow_dask.scheduler import worker_handlers
from ferroflow_dask.scheduler.changes import ATTEMPTS, FAILURES, Change
from ferroflow_dask.scheduler.graphs import worker_observers

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("ferroflow_dask")

#: Each registration has a number, so that a late removal does not remove a newer plugin.
_numbers = itertools.count(1)


class WorkerPluginChange(Change):
    """A plugin on all workers.

    Registering it is a coroutine. `apply` and `undo` start a task on the scheduler's event loop; `settled`
    waits for it.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    plugin : distributed.WorkerPlugin
    name : str
        Name of the plugin on workers; a number is added.
    failed : callable
        Called with the error if the plugin cannot be registered.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        plugin: WorkerPlugin,
        name: str,
        failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(f"worker plugin {name}")
        self._scheduler = scheduler
        self._plugin = plugin
        self._plugin_name = f"{name}-{next(_numbers)}"
        self._failed = failed
        self._is_wanted = False
        self._lock = asyncio.Lock()

    @property
    def is_applied(self) -> bool:
        """Whether the plugin is wanted on the workers."""
        return self._is_wanted

    def apply(self) -> None:
        """Register the plugin once the event loop comes to it."""
        self._is_wanted = True
        self._scheduler.loop.add_callback(self._settle)

    def undo(self) -> None:
        """Unregister the plugin once the event loop comes to it."""
        if self._is_wanted:
            self._is_wanted = False
            self._scheduler.loop.add_callback(self._settle)

    async def _settle(self) -> None:
        """Call `settled` where no caller takes its errors: a plugin that is to be removed is tried again."""
        for _ in range(ATTEMPTS):
            try:
                await self.settled()
                return
            except FAILURES as error:
                if self._is_wanted:
                    self._failed(error)
                    return
                logger.warning("ferroflow: %s could not be removed", self.name, exc_info=True)

    async def settled(self) -> None:
        """Register or unregister the plugin; return when the workers are as wanted."""
        async with self._lock:  # workers must get the changes in their order
            is_there = self._plugin_name in self._scheduler.worker_plugins
            if self._scheduler.status not in (Status.init, Status.starting, Status.running):
                return  # its workers end with it
            # A worker may leave meanwhile; the others get the change.
            with suppress(OSError):
                if is_there and not self._is_wanted:
                    await self._scheduler.unregister_worker_plugin(None, name=self._plugin_name)
                elif self._is_wanted and not is_there:
                    pickled = by_value(self._plugin)
                    await self._scheduler.register_worker_plugin(
                        None, plugin=pickled, name=self._plugin_name, idempotent=False
                    )


def by_value(plugin: WorkerPlugin) -> bytes:
    """Return a pickled plugin that can be loaded where this package is not installed."""
    modules: list[Any] = [sys.modules[type(plugin).__module__], worker_handlers, worker_observers]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(plugin))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
