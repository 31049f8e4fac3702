"""Life cycle: the end of the plugin, when it fails or is uninstalled, or when the scheduler closes.

Every change to Dask is an entry of `changes`, so all of them can be undone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import Changes, Guard, attempt
from ferroflow_dask.scheduler.hooks import Hooks
from ferroflow_dask.scheduler.steal_exchange import StealingExchange

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler
    from distributed.stealing import WorkStealing

logger = logging.getLogger("ferroflow_dask")

#: Logged for each failure in the recovery; the step is tried again.
STEP_FAILED = "a step of the recovery failed"

#: Name under which `FerroflowPlugin` is registered; a scheduler has at most one.
PLUGIN_NAME = "ferroflow"


class Lifecycle:
    """Leaves Dask as it was.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    ours : WorkStealing
        The extension.
    replaced : type of WorkStealing or None
        Class of the extension that is put back; None for no stealing.
    """

    def __init__(self, scheduler: Scheduler, ours: WorkStealing, replaced: type[WorkStealing] | None) -> None:
        self._scheduler = scheduler
        self._ours = ours
        self._exchange = StealingExchange(scheduler, ours, replaced)
        self._has_warned = False
        self.guard = Guard(self._failed)
        self.changes = Changes()
        self.hooks = Hooks()

    def _failed(self) -> None:
        # First, since Dask now sends these tasks itself. A task with two run ids never ends: each of its ends
        # is stale, and it is placed again. A withdrawal is only a message, safe within a transition.
        for hook in self.hooks.failed:
            attempt(hook, STEP_FAILED)
        # Changes are undone by the event loop, never inside a transition.
        self._scheduler.loop.add_callback(self.recover)

    def recover(self) -> None:
        """Warn the clients that the plugin has failed, and leave."""
        if not self._has_warned:
            error = self.guard.error
            message = f"ferroflow: {error!r}; Dask's own scheduling takes over"
            logger.warning("%s", message, exc_info=error)
            attempt(lambda: _distributed.warn_clients(self._scheduler, message), STEP_FAILED)
            self._has_warned = True
        self.leave()

    def leave(self) -> None:
        """Undo all changes to Dask: its own stealing is back when this returns, even if steps fail."""
        attempt(self.detach, STEP_FAILED)
        attempt(self._exchange_back, STEP_FAILED)

    def detach(self) -> None:
        """Stop, and undo all changes to Dask but the exchange of the extension."""
        self.guard.is_closed = True
        self.changes.undo_all()

    def _exchange_back(self) -> None:
        self._exchange.undo()
        if not self.changes.names and not self._exchange.is_applied:  # else another call may repair
            plugin = self._scheduler.plugins.get(PLUGIN_NAME)
            if getattr(plugin, "extension", None) in (None, self._ours):  # not that of an installation since
                self._scheduler.plugins.pop(PLUGIN_NAME, None)
