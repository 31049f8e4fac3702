"""Task events: what the plugin does when a task enters or leaves `processing`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.annotations import GPU, KIND_ANNOTATION, RANK_ANNOTATION
from ferroflow_dask.policy.events import TaskFinished

if TYPE_CHECKING:
    from distributed.scheduler import TaskState
    from distributed.stealing import InFlightInfo

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.placement import Placement
    from ferroflow_dask.scheduler.steal_protocol import StealProtocol

#: Annotations of the tasks of lowered graphs, whose ops run on a worker's device if it has one.
_LOWERED = frozenset((KIND_ANNOTATION, RANK_ANNOTATION))

#: Why a worker has a task that the policy did not place.
_BY_DASK = "by Dask: from its queue, or by restrictions or preferences"
#: Expected durations are corrected when the average has changed by this factor.
_FACTOR = 2.0
#: But not before one task in so many has finished since, so that each task costs O(1) corrections.
_ONE_IN = 8


@dataclass(slots=True)
class _Averaged:
    """Processing tasks of a prefix that are expected to take Dask's average.

    Parameters
    ----------
    average_s : float or None
        The average when it was last corrected [s]; None for Dask's default.
    """

    average_s: float | None
    #: In the order in which they were sent: the order of a set differs from run to run.
    keys: dict[Key, None] = field(default_factory=dict)
    n_finished: int = 0


class TaskEvents:
    """Follows tasks through the scheduler's transitions.

    Parameters
    ----------
    core : Core
    placement : Placement
    steals : StealProtocol
    """

    def __init__(self, core: Core, *, placement: Placement, steals: StealProtocol) -> None:
        self._view = core.view
        self._clock = core.clock
        self._costs = core.learned.costs
        self._hooks = core.hooks
        self._decisions = core.decisions
        self._placement = placement
        self._steals = steals
        #: Processing tasks whose durations are Dask's averages or its default, by prefix.
        self.averaged: dict[str, _Averaged] = {}

    def entered_processing(self, ts: TaskState) -> None:
        """Note that a task was sent to a worker, by `placement` or by Dask."""
        ws, key = ts.processing_on, ts.key
        assert ws is not None
        entry = self._view.assigned.get(key)
        if entry is None or entry[1].key != ws.address:
            self._decisions.note(key, "placed", ws.address, _BY_DASK)
            task = self._placement.task_views(ts)
            self._view.assign(task, ws.address, self._clock())
        else:
            task = entry[0]
        if not task.has_cost:
            name = ts.prefix.name
            averaged = self.averaged.get(name)
            if averaged is None:
                average_s = ts.prefix.duration_average
                averaged = self.averaged[name] = _Averaged(None if average_s < 0 else average_s)
            averaged.keys[key] = None

    def left_processing(
        self, ts: TaskState, finish: str, details: dict[str, Any], steal: InFlightInfo | None
    ) -> None:
        """Do everything that follows when a task leaves its worker, in this order.

        1. A steal in flight is aborted: the task was the victim's all the time.
        2. If it finished: the view learns the worker's speed from the duration; the
           cost model learns the duration and the size. Durations on devices are reported separately.
        3. The view's queue of the worker drops the task. If Dask's average of its prefix has changed much,
           the expected durations of the others on workers follow it.
        4. If it finished: features hear of it, and the policy gets the event.

        Parameters
        ----------
        ts : distributed.scheduler.TaskState
        finish : str
            The state that it is in now.
        details : dict
            Keyword arguments of the transition; a finished task's worker, thread, times and size are there.
        steal : dict or None
            The steal that was in flight for the task, in distributed's form.
        """
        if steal is not None:
            self._steals.overtaken(ts, steal["victim"])
        if finish == "memory":
            self._finished(ts, details)
        else:
            self._view.finish(ts.key, self._clock())
            if (averaged := self.averaged.get(ts.prefix.name)) is not None:
                averaged.keys.pop(ts.key, None)
                if not averaged.keys:
                    del self.averaged[ts.prefix.name]

    def _finished(self, ts: TaskState, details: dict[str, Any]) -> None:
        key, worker, nbytes = ts.key, details["worker"], details["nbytes"]
        first_s = last_s = None
        spent_s = 0.0
        for span in details.get("startstops") or ():
            if span["action"] == "compute":
                last_s = span["stop"]
                spent_s += last_s - span["start"]
                if first_s is None:
                    first_s = span["start"]
        if not (ts.annotations and self._is_reported_later(ts, worker)):
            self._view.observe(key, spent_s)
            self._costs.record(ts, spent_s, nbytes, worker)
        self._view.finish(key, self._clock())
        if (averaged := self.averaged.get(ts.prefix.name)) is not None:
            self._correct_averages(ts, averaged)
        if first_s is not None and last_s is not None:
            thread = (worker, details.get("thread") or 0)
            for hook in self._hooks.task_ran:
                hook(ts, thread, first_s, last_s)
        if TaskFinished not in self._placement.policy.ignores:
            self._placement.handle(TaskFinished(key, worker, spent_s, nbytes))

    def _correct_averages(self, ts: TaskState, averaged: _Averaged) -> None:
        averaged.keys.pop(ts.key, None)
        average_s = ts.prefix.duration_average
        if average_s >= 0:
            averaged.n_finished += 1
            before_s = averaged.average_s
            has_changed = before_s is None or not average_s / _FACTOR <= before_s <= average_s * _FACTOR
            if has_changed and (before_s is None or _ONE_IN * averaged.n_finished >= len(averaged.keys)):
                averaged.average_s, averaged.n_finished = average_s, 0
                for key in averaged.keys:
                    self._view.reprice(key, average_s)
        if not averaged.keys:
            del self.averaged[ts.prefix.name]

    def _is_reported_later(self, ts: TaskState, address: str) -> bool:
        # Lowered tasks return once their work is enqueued on a device; its duration is reported afterwards.
        worker = self._view.workers.get(address)
        is_lowered = ts.annotations is not None and not ts.annotations.keys().isdisjoint(_LOWERED)
        return is_lowered and worker is not None and worker.kind == GPU
