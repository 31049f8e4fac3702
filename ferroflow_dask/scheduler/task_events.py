"""Task events: what the plugin does when a task enters or leaves `processing`."""

from __future__ import annotations

from collections.abc import Callable
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
        #: Processing tasks of unknown duration, by prefix, until the first task of the prefix has finished.
        self.guessed: dict[str, set[Key]] = {}

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
        if self._view.assigned[ts.key][0].is_guess:
            self.guessed.setdefault(ts.prefix.name, set()).add(ts.key)
        self._ask_pass()

    def _left_processing(
        self, ts: TaskState, finish: str, details: dict[str, Any], steal: InFlightInfo | None
    ) -> None:
        """Do everything that follows when a task leaves its worker, in this order.

        1. A steal in flight is aborted: the task was the victim's all the time.
        2. If it finished: the view learns the worker's speed from the duration; the
           cost model learns the duration and the size. Durations on devices are reported separately.
        3. The view's queue of the worker drops the task. If it is the first of its prefix that finished, the
           others on workers get its duration in place of Dask's guess.
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
            self._costs.record(ts, spent_s, details["nbytes"])
        self._view.finish(ts.key, self._clock())
        self._correct_guesses(ts, finish)
        if finish == "memory":
            if spans:
                thread = (details["worker"], details.get("thread") or 0)
                has_waited = ts.key not in self._messages.prefetch.early
                self._queue_depth.finished(ts, thread, spans[0][0], spans[-1][1], has_waited)
            self._placement.handle(TaskFinished(ts.key, details["worker"], spent_s, details["nbytes"]))
        self._ask_pass()

    def _correct_guesses(self, ts: TaskState, finish: str) -> None:
        guessed = self.guessed.get(ts.prefix.name)
        if guessed is None:
            return
        guessed.discard(ts.key)
        average_s = _distributed.prefix_average(ts) if finish == "memory" else None
        if average_s is not None:
            for key in guessed:
                self._view.reprice(key, average_s)
        if average_s is not None or not guessed:
            del self.guessed[ts.prefix.name]

    def _is_reported_later(self, ts: TaskState, address: str) -> bool:
        # Lowered tasks return once their work is enqueued on a device; its duration is reported afterwards.
        worker = self._view.workers.get(address)
        is_lowered = ts.annotations is not None and not ts.annotations.keys().isdisjoint(_LOWERED)
        return is_lowered and worker is not None and worker.kind == GPU
