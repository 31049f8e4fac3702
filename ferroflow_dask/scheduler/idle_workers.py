"""Idle workers: when the plugin looks for them, and how it lets the policy find work for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ferroflow_dask.policy import ClusterView

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler
    from tornado.ioloop import IOLoop

#: Time between passes without an event [s].
_LOOK_S = 0.02
#: Idle workers served in one pass, and those among them that find nothing to steal: they bound the time of a
#: pass on the scheduler's event loop.
_IDLE_PER_PASS = 256
_FRUITLESS_PER_PASS = 2


class Passes:
    """Runs passes on the scheduler's event loop, never inside the call that asks for one.

    There is no event for a task that runs longer than expected. So while some workers are idle and others
    have waiting tasks, passes are also run by the clock.

    Parameters
    ----------
    loop : tornado.ioloop.IOLoop
    run : callable
        Makes one pass. Returns how many workers are then idle while others have waiting tasks; 0 ends the
        passes by the clock.
    guard : callable, optional
        Returns a function guarded; the event loop calls guarded functions only.
    """

    def __init__(
        self,
        loop: IOLoop,
        run: Callable[[], int],
        guard: Callable[[Callable[..., None]], Callable[..., None]] = lambda function: function,
    ) -> None:
        self._loop = loop
        self._run = run
        self._guarded_pass, self._guarded_look = guard(self._pass), guard(self._look)
        #: Whether a pass is to come already.
        self.is_asked_for = False
        self._is_look_due = False
        self._is_closed = False

    def ask(self) -> None:
        """Ask for a pass after the present turn of the event loop."""
        if not (self.is_asked_for or self._is_closed):
            self.is_asked_for = True
            self._loop.add_callback(self._guarded_pass)

    def close(self) -> None:
        """Run no pass from now on."""
        self._is_closed = True

    def _pass(self) -> None:
        self.is_asked_for = False
        if not self._is_closed and self._run():
            self._look_again()

    def _look(self) -> None:
        self._is_look_due = False
        if not self._is_closed and self._run():
            self._look_again()

    def _look_again(self) -> None:
        if not (self._is_closed or self._is_look_due):
            self._is_look_due = True
            self._loop.call_later(_LOOK_S, self._guarded_look)


class IdleWorkers:
    """Lets the policy find work for idle workers.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    view : ClusterView
    steal_for : callable
        Lets the policy find work for one worker; returns whether a steal was requested.
    may_steal : callable
        Returns whether tasks may be stolen at all.
    ask_again : callable
        Called after a pass in which all idle workers found work: there may be more of both.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        view: ClusterView,
        steal_for: Callable[[str], bool],
        may_steal: Callable[[], bool],
        ask_again: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._view = view
        self._steal_for = steal_for
        self._may_steal = may_steal
        self._ask_again = ask_again

    def n_hopeful(self) -> int:
        """Return how many workers are idle while others have waiting tasks, or bundles to divide."""
        view = self._view
        if not (view.n_idle and (view.n_crowded or view.divisible)):
            return 0
        # While the scheduler's queue has tasks, it serves idle workers.
        return view.n_idle if self._may_steal() and not self._scheduler.queued else 0

    def serve(self) -> None:
        """Serve idle workers in turn."""
        n_found = n_fruitless = 0
        for address in self._view.first_idle(_IDLE_PER_PASS):
            if self._steal_for(address):
                n_found += 1
                continue
            # Others come first the next time: restrictions of this worker may not apply to them.
            self._view.to_end_of_idle(address)
            n_fruitless += 1
            if n_fruitless == _FRUITLESS_PER_PASS:
                break
        if n_found and not n_fruitless:
            self._ask_again()
