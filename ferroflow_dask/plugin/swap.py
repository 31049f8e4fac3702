"""Exchange a scheduler's stealing extension while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed.stealing import WorkStealing

from ferroflow_dask.plugin import seams

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Name under which `FerroflowPlugin` is registered; there is at most one on a scheduler.
PLUGIN_NAME = "ferroflow"
#: How long steals in flight are waited for [s]; a worker that is well answers in milliseconds.
_PATIENCE_S = 3.0


async def swap(
    scheduler: Scheduler,
    make: Callable[[Scheduler], WorkStealing] | None,
    only_if: WorkStealing | None = None,
) -> None:
    """Put the extension that `make` returns in place of the present one; none if `make` is None.

    Steals in flight end first: their answers must find the handler that asked, or the tasks are lost. Those
    that a worker does not answer, which may hang, are given up, and the tasks placed anew.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    make : callable or None
        If it raises, Dask's own stealing is put there and the error goes on.
    only_if : WorkStealing, optional
        Do nothing unless this is the present extension.
    """
    while True:
        old = scheduler.extensions.get("stealing")
        if only_if is not None and old is not only_if:
            return
        # Where stealing has not been started, nothing is in flight, and stop() would wait for ever.
        if old is not None and ("stealing" in scheduler.periodic_callbacks or old.in_flight):
            try:
                await asyncio.wait_for(old.stop(), _PATIENCE_S)
            except TimeoutError:
                _give_up(scheduler, old)
        if scheduler.extensions.get("stealing") is old:  # else another swap came between
            break
    if old is not None:
        del scheduler.extensions["stealing"]
        for name, plugin in list(scheduler.plugins.items()):
            if plugin is old:
                scheduler.remove_plugin(name=name)
        old.teardown()
    if make is None:
        return
    try:
        new = make(scheduler)
    except Exception:
        await _put(scheduler, WorkStealing(scheduler))
        raise
    await _put(scheduler, new)


def _give_up(scheduler: Scheduler, old: WorkStealing) -> None:
    for ts in list(old.in_flight):
        # Whatever the worker answers when it goes on, this task is no longer its own.
        seams.reschedule(scheduler, ts, stimulus_id="ferroflow-steal-given-up")


async def _put(scheduler: Scheduler, extension: WorkStealing) -> None:
    scheduler.extensions["stealing"] = extension
    _show_tasks(scheduler, extension)
    await extension.start()


def _show_tasks(scheduler: Scheduler, extension: WorkStealing) -> None:
    # Dask's own notes what may be stolen as it is sent, and what is on workers already has been. Ours looks
    # at what is there.
    for ws in scheduler.workers.values():
        for ts in ws.processing - ws.long_running:
            if not ts.dependencies or seams.prefix_duration(scheduler, ts):  # else it would not divide
                extension.put_key_in_stealable(ts)


async def restore(scheduler: Scheduler, present: WorkStealing, replaced: type[WorkStealing] | None) -> None:
    """Put the stealing that was there before in place of ours and forget the plugin that had replaced it.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    present : WorkStealing
        Our extension; nothing happens if another one has taken its place.
    replaced : type of WorkStealing or None
        What ours had replaced; None if there was no stealing.
    """
    if scheduler.extensions.get("stealing") is present:
        scheduler.plugins.pop(PLUGIN_NAME, None)
        await swap(scheduler, replaced, only_if=present)
