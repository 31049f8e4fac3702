"""Remote: the scheduler's side of a feature that has ends on the workers.

A worker plugin opens the ends, also on workers that join later. It is sent by value, so workers need not have
this package. Such a plugin may use only its own module, `remote_worker`, `worker_observers` and distributed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import cloudpickle
from distributed import Status, WorkerPlugin

from ferroflow_dask.scheduler import remote_worker
from ferroflow_dask.scheduler.changes import ATTEMPTS, FAILURES, Change, attempt, call_later
from ferroflow_dask.scheduler.graphs import worker_observers
from ferroflow_dask.scheduler.remote_worker import RemotePlugin, WorkerEnd, close_of, closed_of

if TYPE_CHECKING:
    from distributed import Scheduler

    from ferroflow_dask.scheduler.core import Core

logger = logging.getLogger("ferroflow_dask")

#: How often a closed remote looks for workers that have left [s].
_LOOK_S = 5.0
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

    @property
    def is_registered(self) -> bool:
        """Whether workers that join get the plugin."""
        return self._plugin_name in self._scheduler.worker_plugins

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
    own = type(plugin) if not isinstance(plugin, RemotePlugin) else plugin.kind
    modules: list[Any] = [sys.modules[own.__module__], remote_worker, worker_observers]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(plugin))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


class Remote(Change):
    """The ends of a feature on all workers, and the handlers of their messages.

    `undo` sends each end its last message. Messages in flight are ignored until each worker that sends some
    has answered by its own last one. An operation without a handler would close the worker's stream.

    Parameters
    ----------
    core : Core
    end : type of WorkerEnd
    receives : mapping of str to (callable, callable), optional
        By operation: the receiver of a message of an end, and the one after `undo`. They are called
        with the fields of the message and the address of the worker, and must not raise.
    joined : callable, optional
        Called with the address of each worker after its end has announced itself.
    """

    def __init__(
        self,
        core: Core,
        end: type[WorkerEnd],
        receives: Mapping[str, tuple[Callable[..., object], Callable[..., object]]] | None = None,
        *,
        joined: Callable[[str], object] = lambda _: None,
    ) -> None:
        super().__init__(f"ends of {end.name} on workers")
        self._core = core
        self._scheduler = core.scheduler
        self._end = end
        self._joined = joined
        if bool(receives) is not end.sends:
            raise TypeError(f"{end.__name__}.sends must be {bool(receives)}, as there are receivers or none")
        self._receive = {operation: receive for operation, (receive, _) in (receives or {}).items()}
        self._ignore = {operation: ignore for operation, (_, ignore) in (receives or {}).items()}
        self._plugin: Change | None = None
        self._is_applied = False
        #: Workers with an end, and the numbers of their plugins.
        self.supporting: dict[str, int] = {}
        # Workers that open an end before they take tasks, and announce it later.
        self._opening: set[str] = set()
        # Whether a worker has shown that ends can be opened.
        self._has_announced = False
        # After `undo`: workers that are not asked to close yet.
        self._unasked: dict[str, int] = {}
        # How many answers of each worker are to come, those to earlier installations included.
        self._unanswered: Counter[str] = Counter()

    @property
    def is_applied(self) -> bool:
        """Whether the ends are wanted."""
        return self._is_applied

    def apply(self) -> None:
        """Receive messages, and open an end on each worker."""
        self._is_applied = True
        self._core.remotes[self._end.name] = self
        if self._receive:
            handlers = self._scheduler.stream_handlers
            earlier = getattr(handlers.get(closed_of(self._end.name)), "__self__", None)
            if isinstance(earlier, Remote):
                self._unanswered = earlier._unanswered
            handlers.update(self._receive | {closed_of(self._end.name): self._worker_closed})
        self._plugin = self._core.put_on_workers(RemotePlugin(self._end), f"ferroflow-{self._end.name}")
        self._plugin.apply()

    def undo(self) -> None:
        """Close the ends, and ignore their messages from now on."""
        if self._is_applied:
            self._is_applied = False
            workers, handlers = self._scheduler.workers, self._scheduler.stream_handlers
            self._unasked = {one: number for one, number in self.supporting.items() if one in workers}
            # A later installation may have replaced a handler.
            handlers.update(
                {name: self._ignore[name] for name, one in self._receive.items() if handlers.get(name) == one}
            )
        self.supporting.clear()
        self._opening.clear()
        if self._core.remotes.get(self._end.name) is self:
            del self._core.remotes[self._end.name]
        if self._plugin is not None:
            self._plugin.undo()
        for address, number in list(self._unasked.items()):  # also when an earlier call has failed halfway
            if address in self._scheduler.stream_comms:
                message = {"op": close_of(self._end.name), "number": number}
                self._scheduler.worker_send(address, message)
                if self._receive:
                    self._unanswered[address] += 1
            del self._unasked[address]
        self._remove_if_closed()
        if self._unanswered:
            self._look_later()

    async def settled(self) -> None:
        """Return when the workers have ends, or have none."""
        if self._plugin is not None:
            await self._plugin.settled()

    def announced(self, address: object, number: object) -> None:
        """Handle the announcement of an end, by the number of its plugin; ignore other events."""
        if not (isinstance(address, str) and isinstance(number, int)):
            return
        if self._is_applied and address in self._scheduler.workers:
            self._has_announced = True
            self._opening.discard(address)
            self.supporting[address] = number
            self._joined(address)

    def left(self, address: str) -> None:
        """Forget a worker."""
        self.supporting.pop(address, None)
        self._opening.discard(address)
        self._unanswered.pop(address, None)

    def worker_joined(self, address: str) -> None:
        """Handle a worker that joins: Dask gives it the plugin before its first task."""
        if self._is_applied and self._has_announced and getattr(self._plugin, "is_registered", True):
            self._opening.add(address)

    def has_end(self, address: str) -> bool:
        """Return whether a worker has an end, or opens one before it takes tasks."""
        return address in self.supporting or address in self._opening

    def may_send(self, address: str) -> bool:
        """Return whether a worker understands the messages of the feature."""
        return address in self.supporting and address in self._scheduler.stream_comms

    def _worker_closed(self, worker: str) -> None:
        self._unanswered[worker] -= 1
        # An exception would close the worker's stream.
        attempt(self._remove_if_closed, f"{self.name} could not be restored")

    def _look(self) -> None:
        """Look for workers that have left before they answered."""
        if attempt(self._remove_if_closed, f"{self.name} could not be restored") and self._unanswered:
            self._look_later()

    def _look_later(self) -> None:
        # As long as there are handlers, they keep this object alive, and with it the extension.
        call_later(self._scheduler.loop, _LOOK_S, self._look)

    def _remove_if_closed(self) -> None:
        for address in list(self._unanswered):
            if self._unanswered[address] <= 0 or address not in self._scheduler.workers:
                del self._unanswered[address]
        if self._is_applied or self._unanswered:
            return
        handlers = self._scheduler.stream_handlers
        for operation, ours in {**self._ignore, closed_of(self._end.name): self._worker_closed}.items():
            if handlers.get(operation) == ours:
                del handlers[operation]
