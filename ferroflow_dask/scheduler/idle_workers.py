"""Idle workers: when the plugin looks for them, and how it lets the policy find work for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ferroflow_dask.policy import ClusterView

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler
    from tornado.ioloop import IOLoop

#: Time until a pass without an event, at first and at most [s].
_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 0.64
#: A pass that comes later than this was delayed by other work of the event loop. It first waits until
#: messages that arrived meanwhile are read; otherwise workers would seem silent that are not [s].
_LATE_S = 0.01
_READ_S = 0.002
#: Idle workers served in one pass, and those among them that find nothing to steal: they bound the time of a
#: pass on the scheduler's event loop.
_IDLE_PER_PASS = 256
_FRUITLESS_PER_PASS = 2
#: Time without passes after one in which no steal was worth it [s].
_QUIET_S = 5e-3


class Passes:
    """Runs passes on the scheduler's event loop, never inside the call that asks for one.

    There is no event for a task that runs longer than expected. So while some workers are idle and others
    have waiting tasks, passes are also run by the clock: soon until each idle worker had its turn, then at
    doubling intervals until an event.

    Parameters
    ----------
    loop : tornado.ioloop.IOLoop
    run : callable
        Makes one pass and returns how many idle workers found nothing to steal; None if none was served.
        Must not raise.
    n_hopeful : callable
        Returns how many workers are idle while others have waiting tasks; 0 ends the passes by the clock.
    clock : callable
        Returns the time [s].
    guard : callable, optional
        Returns a function guarded; the event loop calls guarded functions only.
    """

    def __init__(
        self,
        loop: IOLoop,
        run: Callable[[], int | None],
        n_hopeful: Callable[[], int],
        clock: Callable[[], float],
        guard: Callable[[Callable[..., None]], Callable[..., None]] = lambda function: function,
    ) -> None:
        self._loop = loop
        self._run = run
        self._n_hopeful = n_hopeful
        self._clock = clock
        self._guarded_pass, self._guarded_look = guard(self._pass), guard(self._look)
        self._is_asked_for = False
        self._is_closed = False
        # The pass by the clock that is due: its number, its time, and its interval [s]; 0 if none is.
        self._number = 0
        self._due_at = self._armed_s = 0.0
        self._look_s = _FIRST_LOOK_S
        self._n_fruitless = 0

    def ask(self) -> None:
        """Ask for a pass after the present turn of the event loop."""
        if not (self._is_asked_for or self._is_closed):
            self._is_asked_for = True
            self._loop.add_callback(self._guarded_pass)

    def close(self) -> None:
        """Run no pass from now on."""
        self._is_closed = True

    def _pass(self) -> None:
        self._is_asked_for = False
        self._look_s = _FIRST_LOOK_S
        self._n_fruitless = 0
        self._run_once()

    def _look(self, number: int, was_late: bool = False) -> None:
        if number != self._number:
            return
        if not was_late and self._clock() - self._due_at > _LATE_S:
            self._loop.call_later(_READ_S, self._guarded_look, number, True)
            return
        self._armed_s = 0.0
        self._run_once()

    def _run_once(self) -> None:
        if self._is_closed:
            return
        n_fruitless = self._run()
        if n_fruitless is None:
            return
        self._n_fruitless += n_fruitless
        n_hopeful = self._n_hopeful()
        if self._is_closed or not n_hopeful or 0 < self._armed_s <= self._look_s:
            return
        self._number += 1
        self._armed_s, self._due_at = self._look_s, self._clock() + self._look_s
        self._loop.call_later(self._look_s, self._guarded_look, self._number)
        if self._n_fruitless >= n_hopeful:  # each had its turn
            self._n_fruitless = 0
            self._look_s = min(2 * self._look_s, _LAST_LOOK_S)


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
        # Time until which idle workers are not served, unless the number of chances has changed.
        self._quiet_until = 0.0
        self._n_chances = -1

    def n_hopeful(self) -> int:
        """Return how many workers are idle while others have waiting tasks."""
        # While the scheduler's queue has tasks, it serves idle workers.
        can_steal = self._may_steal() and self._view.has_crowded and not self._scheduler.queued
        return self._view.n_idle if can_steal else 0

    def serve_hopeful(self, now: float) -> int | None:
        """Call `serve` if a steal is possible; return None if not."""
        if not self.n_hopeful():
            return None
        # Finished tasks hardly make a steal worth it that was not before.
        if now < self._quiet_until and self._n_chances == self._view.n_chances:
            return 0
        return self.serve(now)

    def serve(self, now: float) -> int:
        """Serve idle workers in turn; return how many found nothing to steal."""
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
        self._n_chances = self._view.n_chances
        self._quiet_until = now if n_found else now + _QUIET_S
        if n_found and not n_fruitless:
            self._ask_again()
        return n_fruitless
