"""Exchange of the stealing extension on a running scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed.stealing import WorkStealing

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import FAILURES, Change

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Key of the extension among a scheduler's extensions and periodic callbacks.
STEALING = "stealing"
#: How long the exchange waits for answers to steal requests [s]; workers usually answer in milliseconds.
_PATIENCE_S = 3.0


class StealingExchange(Change):
    """Our extension in place of Dask's stealing.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    ours : WorkStealing
    replaced : type of WorkStealing or None
        Class of the extension that `undo` puts back; None if the scheduler had no stealing.
    """

    def __init__(self, scheduler: Scheduler, ours: WorkStealing, replaced: type[WorkStealing] | None) -> None:
        super().__init__("Scheduler.extensions['stealing']")
        self._scheduler = scheduler
        self._ours = ours
        self._replaced = replaced

    @property
    def is_applied(self) -> bool:
        """Whether our extension is registered, or the one that it replaced is missing."""
        present = self._scheduler.extensions.get(STEALING)
        return present is self._ours or (present is None and self._replaced is not None)

    def apply(self) -> None:
        """Register our extension, which the scheduler may have done already."""
        self._scheduler.extensions[STEALING] = self._ours

    def undo(self) -> None:
        """Register a new extension of the class that was replaced."""
        if self.is_applied:
            give_up_steals(self._scheduler, self._ours)
            remove(self._scheduler, self._ours)
            put(self._scheduler, self._replaced)


async def drain(scheduler: Scheduler, extension: WorkStealing) -> None:
    """Stop an extension and complete its steals in flight: a worker's answer must reach the one that asked.

    Tasks for which a worker does not answer in time are placed again.
    """
    # If stealing was never started, no steal is in flight, and the wait would not end.
    if STEALING in scheduler.periodic_callbacks or extension.in_flight:
        try:
            await _distributed.stop(extension, _PATIENCE_S)
        except TimeoutError:
            give_up_steals(scheduler, extension)


async def exchange(scheduler: Scheduler, make: Callable[[Scheduler], WorkStealing] | None) -> None:
    """Put the extension that `make` returns in place of the present one, which is drained first.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    make : callable or None
        None removes the extension. If `make` raises, the extension that Dask had is put back and the error is
        raised.
    """
    while True:
        old = scheduler.extensions.get(STEALING)
        try:
            if old is not None:
                await drain(scheduler, old)
            if scheduler.extensions.get(STEALING) is not old:  # another exchange came first
                continue
            if old is not None:
                remove(scheduler, old)
            put(scheduler, make)
            return
        except FAILURES:
            # The failed step may have been any: `old` may be stopped, but registered.
            if old is not None and scheduler.extensions.get(STEALING) in (old, None):
                give_up_steals(scheduler, old)
                remove(scheduler, old)
                put(scheduler, getattr(old, "replaced", type(old)))
            raise


def give_up_steals(scheduler: Scheduler, extension: WorkStealing) -> None:
    """Place the tasks of all steals in flight again; a late answer of a worker is ignored."""
    for ts in list(extension.in_flight):
        _distributed.reschedule(scheduler, ts, stimulus_id="ferroflow-steal-given-up")


def remove(scheduler: Scheduler, extension: WorkStealing) -> None:
    """Take an extension off the scheduler: its registration, its plugin, its periodic callback."""
    scheduler.extensions.pop(STEALING, None)
    for name, plugin in list(scheduler.plugins.items()):
        if plugin is extension:
            scheduler.remove_plugin(name=name)
    extension.teardown()


def put(scheduler: Scheduler, make: Callable[[Scheduler], WorkStealing] | None) -> None:
    """Register and start the extension that `make` returns, if any, wholly or not at all.

    The extension is shown the tasks that are processing.
    """
    if make is None:
        return
    extension = make(scheduler)
    try:
        scheduler.extensions[STEALING] = extension
        for ws in scheduler.workers.values():
            for ts in ws.processing - ws.long_running:
                # Stock stealing divides by the duration of a task with dependencies.
                if not ts.dependencies or _distributed.prefix_duration(scheduler, ts):
                    extension.put_key_in_stealable(ts)
        _distributed.start_now(extension)
    except FAILURES:
        remove(scheduler, extension)
        raise
