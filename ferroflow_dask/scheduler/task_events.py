"""Task events: what the plugin does when a task enters or leaves `processing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.annotations import GPU, KIND_ANNOTATION, RANK_ANNOTATION
from ferroflow_dask.policy import ClusterView
from ferroflow_dask.policy.events import TaskFinished
from ferroflow_dask.scheduler import _distributed

if TYPE_CHECKING:
    from distributed.scheduler import TaskState
    from distributed.stealing import InFlightInfo

    from ferroflow_dask.scheduler.cost_model import CostModel
    from ferroflow_dask.scheduler.decisions import DecisionLog
    from ferroflow_dask.scheduler.placement import Placement
    from ferroflow_dask.scheduler.queue_depth import QueueDepth
    from ferroflow_dask.scheduler.steal_protocol import StealProtocol
    from ferroflow_dask.scheduler.worker_messages import WorkerMessages

#: Annotations of the tasks of lowered graphs, whose ops run on a worker's device if it has one.
_LOWERED = frozenset((KIND_ANNOTATION, RANK_ANNOTATION))

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

    def finished(self, average_s: float) -> bool:
        """Note that a task finished; return whether the others must be corrected."""
        self.n_finished += 1
        if self.average_s is None:
            return True
        has_changed = max(average_s, self.average_s) > _FACTOR * min(average_s, self.average_s)
        return has_changed and _ONE_IN * self.n_finished >= len(self.keys)


class TaskEvents:
    """Follows tasks through the scheduler's transitions.

    Parameters
    ----------
    view : ClusterView
    clock : callable
        Returns the time [s].
    costs : CostModel
    decisions : DecisionLog
    placement : Placement
    steals : StealProtocol
    queue_depth : QueueDepth
    messages : WorkerMessages
    ask_pass : callable
        Asks for a pass over idle workers after the present transitions.
    """

    def __init__(
        self,
        view: ClusterView,
        clock: Callable[[], float],
        *,
        costs: CostModel,
        decisions: DecisionLog,
        placement: Placement,
        steals: StealProtocol,
        queue_depth: QueueDepth,
        messages: WorkerMessages,
        ask_pass: Callable[[], None],
    ) -> None:
        self._view = view
        self._clock = clock
        self._costs = costs
        self._decisions = decisions
        self._placement = placement
        self._steals = steals
        self._queue_depth = queue_depth
        self._messages = messages
        self._ask_pass = ask_pass
        #: Processing tasks whose durations are Dask's averages or its default, by prefix.
        self.averaged: dict[str, _Averaged] = {}

    def changed(
        self,
        ts: TaskState | None,
        key: Key,
        start: str,
        finish: str,
        *,
        details: dict[str, Any],
        steal: Any,
    ) -> None:
        """Follow a transition.

        Parameters
        ----------
        ts : distributed.scheduler.TaskState or None
            None if the task was forgotten.
        key : Key
        start, finish : str
            States of the scheduler's state machine.
        details : dict
            Keyword arguments of the transition; a finished task's worker, thread, times and size are there.
        steal : dict or None
            The steal that was in flight for the task, in distributed's form.
        """
        if start == "processing":
            assert ts is not None
            self._left_processing(ts, finish, details, steal)
        elif finish == "processing":
            assert ts is not None
            self._entered_processing(ts)
        self._messages.changed(key, start, finish)

    def _entered_processing(self, ts: TaskState) -> None:
        ws = ts.processing_on
        assert ws is not None
        entry = self._view.assigned.get(ts.key)
        if entry is None or entry[1].key != ws.address:
            reason = "by Dask: from its queue, or by restrictions or preferences"
            self._decisions.note(ts.key, "placed", ws.address, reason)
            self._view.assign(self._placement.task_views(ts), ws.address, self._clock())
        task = self._view.assigned[ts.key][0]
        if not task.has_cost:
            average_s = _distributed.prefix_average(ts)
            self.averaged.setdefault(ts.prefix.name, _Averaged(average_s)).keys[ts.key] = None
        self._ask_pass()

    def _left_processing(
        self, ts: TaskState, finish: str, details: dict[str, Any], steal: InFlightInfo | None
    ) -> None:
        """Do everything that follows when a task leaves its worker, in this order.

        1. A steal in flight is aborted: the task was the victim's all the time.
        2. If it finished: the view learns the worker's speed from the duration; the
           cost model learns the duration and the size. Durations on devices are reported separately.
        3. The view's queue of the worker drops the task. If Dask's average of its prefix has changed much,
           the expected durations of the others on workers follow it.
        4. If it finished: the round trip is measured, and the policy gets the event.
        5. A pass over idle workers is asked for.
        """
        if steal is not None:
            self._steals.overtaken(ts, steal["victim"])
        spans, spent_s = [], 0.0
        for span in details.get("startstops") or ():
            if span["action"] == "compute":
                spans.append((span["start"], span["stop"]))
                spent_s += span["stop"] - span["start"]
        if finish == "memory" and not self._is_reported_later(ts, details["worker"]):
            self._view.observe(ts.key, spent_s)
            self._costs.record(ts, spent_s, details["nbytes"], details["worker"])
        self._view.finish(ts.key, self._clock())
        self._correct_averages(ts, finish)
        if finish == "memory":
            if spans:
                thread = (details["worker"], details.get("thread") or 0)
                has_waited = ts.key not in self._messages.prefetch.early
                self._queue_depth.finished(ts, thread, spans[0][0], spans[-1][1], has_waited)
            self._placement.handle(TaskFinished(ts.key, details["worker"], spent_s, details["nbytes"]))
        self._ask_pass()

    def _correct_averages(self, ts: TaskState, finish: str) -> None:
        averaged = self.averaged.get(ts.prefix.name)
        if averaged is None:
            return
        averaged.keys.pop(ts.key, None)
        average_s = _distributed.prefix_average(ts) if finish == "memory" else None
        if average_s is not None and averaged.finished(average_s):
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
