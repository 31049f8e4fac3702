"""Plugins of ours on all workers, for as long as they are wanted there.

They are sent by value: workers need not have this package. What such a plugin uses is in its own module,
or in distributed.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import cloudpickle
from distributed import Status, WorkerPlugin

if TYPE_CHECKING:
    from distributed import Scheduler

#: One for each time that one is put on a scheduler: what is taken off late takes nothing newer with it.
_numbers = itertools.count(1)


class OnWorkers:
    """Keeps a plugin on all workers while it is wanted, also on those that join.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    plugin : distributed.WorkerPlugin
    name : str
        Of the plugin on workers; a number is put behind it.
    """

    def __init__(self, scheduler: Scheduler, plugin: WorkerPlugin, name: str) -> None:
        self._scheduler = scheduler
        self._plugin = plugin
        self._name = f"{name}-{next(_numbers)}"
        self._is_wanted = False
        self._changes = asyncio.Lock()

    def want(self, is_wanted: bool) -> None:
        """Put the plugin on the workers, or take it off, once the event loop comes to it."""
        if is_wanted == self._is_wanted:
            return
        self._is_wanted = is_wanted
        self._scheduler.loop.add_callback(self._follow)

    async def _follow(self) -> None:
        # One change after the other: workers must not be told the last one first.
        async with self._changes:
            is_there = self._name in self._scheduler.worker_plugins
            if self._scheduler.status not in (Status.init, Status.starting, Status.running):
                return  # its workers go with it
            # A worker that leaves just then need not be told; the others are, whichever of them fails.
            with suppress(OSError):
                if is_there and not self._is_wanted:
                    await self._scheduler.unregister_worker_plugin(None, name=self._name)
                elif self._is_wanted and not is_there:
                    await self._scheduler.register_worker_plugin(
                        None, plugin=by_value(self._plugin), name=self._name, idempotent=False
                    )


def by_value(plugin: WorkerPlugin) -> bytes:
    """Return a pickled plugin that can be loaded where its module is not installed."""
    module: Any = sys.modules[type(plugin).__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(plugin))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
