"""Tasks that start before the bundles of another graph, as they do if these tasks are not bundled.

A bundle runs for up to one second. The tasks in it that have not started make room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.scheduler.graphs.bundles import Bundles

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.policy import ClusterView

#: A task waits so long at most for the bundle of another graph [s].
_SOON_S = 0.05
#: Tasks of a worker that are looked at beyond those that its threads run.
_LOOKED_AT = 16


class Overtaking:
    """Frees threads that run the bundles of other graphs.

    Parameters
    ----------
    bundles : Bundles
    view : ClusterView
    ask : callable
        As `Dividing.ask`.
    """

    def __init__(self, bundles: Bundles, view: ClusterView, ask: Callable[[Key, str, str], bool]) -> None:
        self._bundles = bundles
        self._view = view
        self._ask = ask

    def make_room(self, states: Collection[TaskState]) -> None:
        """Free as many threads of less urgent bundles as a new graph can use, if no thread is idle."""
        ready = [ts for ts in states if not ts.waiting_on and ts.priority]
        if self._view.n_idle or not ready:
            return
        urgency = min((ts.priority or ())[0] for ts in ready)
        n_left = len(ready)
        for key in list(self._view.divisible):
            task, _ = self._view.assigned[key]
            if n_left and task.has_started and urgency < task.priority[0]:
                n_left -= self._ask(key, "all", "a more urgent graph has arrived")

    def overtake(self, ts: TaskState, address: str, now: float) -> None:
        """Let a task that is about to be sent start soon, though bundles of another graph have its worker.

        Without bundles it would wait for the short tasks that the worker has; the others are in Dask's queue.
        There the tasks of a later bundle would be, too.
        """
        worker = self._view.workers.get(address)
        if worker is None or not ts.priority or ts.key in self._bundles:
            return
        first = [task for task in islice(worker.queue, worker.nthreads + _LOOKED_AT) if task.key != ts.key]
        if len(first) < worker.nthreads:
            return
        others = [
            task
            for task in first
            if task.n_steps and task.priority[0] >= ts.priority[0] and task.priority[1] != ts.priority[1]
        ]
        # Steps that leave the running bundle have its priority, too.
        earliest = min((task.priority for task in others), default=ts.priority)
        if earliest < ts.priority:
            ts.priority = (*earliest[:-1], earliest[-1] - 1)
            if ts.key in self._view.assigned:
                self._view.set_priority(self._view.assigned[ts.key][0], ts.priority)
        for task in others:
            ends_at = task.started_at + task.cost_s / worker.speed
            # A late bundle will probably run on for as long as it has run.
            left_s = max(ends_at - now, now - task.started_at if now > ends_at else 0.0)
            is_long = task.has_started and left_s > _SOON_S
            if is_long and self._ask(task.key, "all", "a task of another graph waits for its thread"):
                return
