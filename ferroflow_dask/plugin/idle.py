"""Serves workers that have run dry: asks the policy for each of them, while there is hope and time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ferroflow_dask.policy import ClusterView

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Idle workers served in one pass, and those among them that find nothing to steal: they bound how long
#: the scheduler's event loop waits for us.
_IDLE_PER_PASS = 256
_FRUITLESS_PER_PASS = 2
#: How long events change nothing after a pass in which nothing was worth a steal [s].
_QUIET_S = 5e-3


class IdleWorkers:
    """Looks which workers idle, and lets the policy find work for them.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    view : ClusterView
    steal_for : callable
        Lets the policy find work for one worker, and returns whether there was any to ask for.
    may_steal : callable
        Returns whether tasks may be stolen at all.
    ask_again : callable
        Called after a turn in which all found work: there may be more of both.
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
        # Until when idle workers are not served again, unless there have been more chances than these.
        self._quiet_until = 0.0
        self._n_chances = -1

    def n_hopeful(self) -> int:
        """Return how many workers idle while others have tasks waiting."""
        # While tasks wait on the scheduler, its queue feeds idle workers.
        can_steal = self._may_steal() and self._view.has_crowded and not self._scheduler.queued
        return self._view.n_idle if can_steal else 0

    def serve_hopeful(self, now: float) -> int | None:
        """Do as `serve` does if there is hope; return None if there is none."""
        if not self.n_hopeful():
            return None
        # Where nothing was worth a steal, ends of tasks have hardly changed that.
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
            # Others come first the next time; what keeps this one from stealing may not bind them.
            self._view.to_end_of_idle(address)
            n_fruitless += 1
            if n_fruitless == _FRUITLESS_PER_PASS:
                break
        self._n_chances = self._view.n_chances
        self._quiet_until = now if n_found else now + _QUIET_S
        if not n_fruitless:
            self._ask_again()
        return n_fruitless
