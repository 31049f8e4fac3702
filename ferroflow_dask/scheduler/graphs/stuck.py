"""Bundles that keep tasks waiting for which running steps wait: these tasks get threads.

A task may wait for what other tasks do, such as a file that one of them writes. In Dask it waits in vain only
if all threads run such tasks and the other ones come later in the order of the graph. In a bundle they may
also come after it in the same thread. So may those that were sent to a worker before Dask would send them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.scheduler.graphs.bundles import Bundles
from ferroflow_dask.scheduler.graphs.worker_runs import SECEDE

if TYPE_CHECKING:
    from ferroflow_dask.scheduler.core import Core

#: While all threads are busy, bundles are divided if no step has ended for so long [s]: twice the longest
#: expected duration of a bundle.
_STUCK_S = 2.0
#: Then for so long, as long as there are tasks that have left bundles or thread pools therefore [s].
_STUCK_AGAIN_S = 0.2
#: After all priorities.
_LAST = (inf,)
#: Tasks of a worker that may be taken out of its thread pool: one of them runs.
_MOST = 1_000


class Stuck:
    """Finds threads that may wait for tasks without a thread.

    Parameters
    ----------
    core : Core
    bundles : Bundles
    ask : callable
        As `Dividing.ask`.
    may_send : callable
        Returns whether a worker understands the messages, by its address.
    """

    def __init__(
        self,
        core: Core,
        bundles: Bundles,
        ask: Callable[[Key, str, str], bool],
        may_send: Callable[[str], bool],
    ) -> None:
        self._scheduler = core.scheduler
        self._view = core.view
        self._decisions = core.decisions
        self._clock = core.clock
        self._bundles = bundles
        self._ask = ask
        self._may_send = may_send
        self._guarded_look = core.guard(self._look_again)
        self._is_look_due = False
        #: Tasks that were steps of bundles.
        self.freed: dict[Key, None] = {}
        # Tasks that were taken out of thread pools, and the workers that were asked to do so.
        self._seceded: dict[Key, None] = {}
        self._seceding: set[str] = set()
        # Whether bundles were divided because no step had ended.
        self._has_divided = False

    def restarted(self) -> None:
        """Forget all tasks: the cluster restarts."""
        self.freed.clear()
        self._seceded.clear()
        self._seceding.clear()

    def ended(self, key: Key) -> None:
        """Note that a task has ended."""
        self.freed.pop(key, None)
        self._seceded.pop(key, None)

    def seceded(self, key: Key, address: str) -> None:
        """Note that a task of a worker is long-running."""
        if address in self._seceding:
            self._seceding.discard(address)
            self._seceded[key] = None
            self._decisions.note(key, "seceded", address, "it may wait for tasks that have no thread")

    def look(self, now: float) -> None:
        """Free the steps that a running one may wait for, if all threads are busy and no step has ended.

        The steps become single tasks. If that does not help, one bundle or former step of each worker leaves
        the thread pool, so that a task can run that Dask would have started before.
        """
        view = self._view
        self._has_divided &= bool(self.freed)
        is_suspected = self._has_divided or bool(self._seceded)
        patience_s = _STUCK_AGAIN_S if is_suspected else _STUCK_S
        is_stuck = not view.n_idle and now - view.last_end_at >= patience_s
        if (is_stuck and (self._divide(now) or self._secede())) or is_suspected:
            self._look_soon()

    def _look_soon(self) -> None:
        if not self._is_look_due:
            self._is_look_due = True
            self._scheduler.loop.call_later(_STUCK_AGAIN_S, self._guarded_look)

    def _look_again(self) -> None:
        self._is_look_due = False
        self.look(self._clock())

    def _divide(self, now: float) -> bool:
        """Ask for the steps of running bundles; return whether there are any."""
        view, has_asked = self._view, False
        for key, may_halve in list(view.divisible.items()):
            task, worker = view.assigned[key]
            is_late = now > task.started_at + task.cost_s / worker.speed
            if task.has_started and (may_halve or is_late):
                has_asked |= self._ask(key, "free", "no step has ended for some time")
        self._has_divided |= has_asked
        return has_asked

    def _secede(self) -> bool:
        """Let tasks leave their thread pools, one of each worker; return whether there are any."""
        view = self._view
        waiting = [ts.priority or () for ts in self._scheduler.queued.peekn(1)]
        waiting += [task.priority for task, _ in view.assigned.values() if not task.has_started]
        if not waiting:
            return False
        first, first_ahead = min(waiting), self._first_ahead()
        may_run: dict[str, list[tuple[tuple[float, ...], Key]]] = {}
        for task, worker in view.assigned.values():
            # Which tasks of a queue run is not always known.
            is_ours = task.n_steps or task.key in self.freed
            priority = self._priority(task.key)
            if priority > (first if is_ours else first_ahead):
                may_run.setdefault(worker.key, []).append((priority, task.key))
        asked = [address for address in may_run if self._may_send(address)]
        for address in asked:
            found = sorted(may_run[address], key=lambda pair: pair[0], reverse=True)
            keys = [key for _, key in found[-_MOST:]]
            self._seceding.add(address)
            self._scheduler.worker_send(address, {"op": SECEDE, "keys": keys})
        return bool(asked)

    def _first_ahead(self) -> tuple[float, ...]:
        """Return the first priority of tasks that wait on workers with more than Dask would send."""
        assigned = self._view.assigned
        found: list[tuple[float, ...]] = [_LAST]
        for ws in self._scheduler.workers.values():
            if len(ws.processing) > ws.nthreads + 1:
                tasks = [assigned[ts.key][0] for ts in ws.processing if ts.key in assigned]
                found += [task.priority for task in tasks if not task.has_started]
        return min(found)

    def _priority(self, key: Key) -> tuple[float, ...]:
        """Return the priority of the last step of a bundle, which runs if the others have left it."""
        bundle, priority = self._bundles.get(key), self._scheduler.tasks[key].priority or ()
        return (*priority[:-1], bundle.turns[-1]) if bundle is not None and bundle.turns else priority
