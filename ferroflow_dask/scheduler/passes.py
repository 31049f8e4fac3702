"""Passes over idle workers: when the plugin looks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop

    from ferroflow_dask.scheduler.changes import Guard

#: Time between passes without an event [s].
_LOOK_S = 0.02


class Passes:
    """Runs passes on the scheduler's event loop, never inside the call that asks for one.

    There is no event for a task that runs longer than expected. So while some workers are idle and others
    have waiting tasks, passes are also run by the clock.

    Parameters
    ----------
    loop : tornado.ioloop.IOLoop
    guard : Guard
        No pass is run once the plugin is uninstalled.
    """

    def __init__(self, loop: IOLoop, guard: Guard) -> None:
        self._loop = loop
        self._guard = guard
        self._guarded_pass, self._guarded_look = guard(self._pass), guard(self._look)
        #: Makes one pass. Returns how many workers are then idle while others have waiting tasks; 0 ends the
        #: passes by the clock.
        self.run: Callable[[], int] = lambda: 0
        #: Whether a pass is to come already.
        self.is_asked_for = False
        self._is_look_due = False

    def ask(self) -> None:
        """Ask for a pass after the present turn of the event loop."""
        if not (self.is_asked_for or self._guard.is_closed):
            self.is_asked_for = True
            self._loop.add_callback(self._guarded_pass)

    def _pass(self) -> None:
        self.is_asked_for = False
        if not self._guard.is_closed and self.run():
            self._look_again()

    def _look(self) -> None:
        self._is_look_due = False
        if not self._guard.is_closed and self.run():
            self._look_again()

    def _look_again(self) -> None:
        if not (self._guard.is_closed or self._is_look_due):
            self._is_look_due = True
            self._loop.call_later(_LOOK_S, self._guarded_look)
