"""Idle workers: how the plugin lets the policy find work for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.steal_exchange import STEALING

if TYPE_CHECKING:
    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.extension import FerroflowStealing
    from ferroflow_dask.scheduler.graphs.dividing import Dividing
    from ferroflow_dask.scheduler.placement import Placement
    from ferroflow_dask.scheduler.steal_protocol import StealProtocol

#: Idle workers served in one pass, and those among them that find nothing to steal: they bound the time of a
#: pass on the scheduler's event loop.
_IDLE_PER_PASS = 256
_FRUITLESS_PER_PASS = 2
#: A longer `distributed.scheduler.work-stealing-interval` means that the user wants no stealing [s].
_LONGEST_INTERVAL_S = 600.0


class IdleWorkers:
    """Lets the policy find work for idle workers.

    Parameters
    ----------
    core : Core
    placement : Placement
    steals : StealProtocol
    dividing : Dividing
    stealing : FerroflowStealing
        Has the settings of distributed's stealing.
    """

    def __init__(
        self,
        core: Core,
        placement: Placement,
        steals: StealProtocol,
        dividing: Dividing,
        stealing: FerroflowStealing,
    ) -> None:
        self._scheduler = core.scheduler
        self._view = core.view
        self._clock = core.clock
        self._guard = core.guard
        self._hooks = core.hooks
        self._ask_pass = core.passes.ask
        self._placement = placement
        self._steals = steals
        self._dividing = dividing
        self._stealing = stealing
        core.passes.run = self.make_pass

    def make_pass(self) -> int:
        """Make a pass; return how many workers are still idle while others have waiting tasks."""
        for hook in self._hooks.in_pass:
            hook()
        if not self.n_hopeful():
            return 0
        self.serve()
        return self.n_hopeful()

    def balance(self) -> None:
        """Serve idle workers by the clock, even after distributed's `stop`."""
        if self._wants_steals:
            self._placement.task_views.see_resources()
            self.serve()
        self._dividing.stuck.look(self._clock())

    @property
    def _wants_steals(self) -> bool:
        # If `distributed.scheduler.work-stealing` is false, tasks are placed, and stay.
        is_on = self._stealing.replaced is not None and not self._guard.is_closed
        return is_on and _distributed.interval_s(self._stealing) <= _LONGEST_INTERVAL_S

    def n_hopeful(self) -> int:
        """Return how many workers are idle while others have waiting tasks, or bundles to divide."""
        view = self._view
        if not (view.n_idle and (view.n_crowded or view.divisible)):
            return 0
        # While the scheduler's queue has tasks, it serves idle workers.
        may_steal = self._wants_steals and STEALING in self._scheduler.periodic_callbacks
        return view.n_idle if may_steal and not self._scheduler.queued else 0

    def serve(self) -> None:
        """Serve idle workers in turn; ask for a pass if all found work: there may be more of both."""
        n_found = n_fruitless = 0
        for address in self._view.first_idle(_IDLE_PER_PASS):
            if self.steal_for(address):
                n_found += 1
                continue
            # Others come first the next time: restrictions of this worker may not apply to them.
            self._view.to_end_of_idle(address)
            n_fruitless += 1
            if n_fruitless == _FRUITLESS_PER_PASS:
                break
        if n_found and not n_fruitless:
            self._ask_pass()

    def steal_for(self, address: str) -> bool:
        """Ask the policy for work for a worker; return whether a task or steps were requested."""
        asked_before = self._steals.counts["asked"] + self._dividing.n_asked
        self._placement.worker_idle(address)
        return self._steals.counts["asked"] + self._dividing.n_asked > asked_before
