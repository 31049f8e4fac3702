"""Task events: graphs that arrive, and tasks that change their states."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.annotations import GPU, KIND_ANNOTATION, RANK_ANNOTATION
from ferroflow_dask.policy.events import TaskFinished
from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import FAILURES

if TYPE_CHECKING:
    from distributed.scheduler import TaskState
    from distributed.stealing import InFlightInfo

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.graphs.graphs import Graphs
    from ferroflow_dask.scheduler.placement import Placement
    from ferroflow_dask.scheduler.refusals import Refusals
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
    graphs : Graphs
    refusals : Refusals
    """

    def __init__(
        self,
        core: Core,
        placement: Placement,
        steals: StealProtocol,
        graphs: Graphs,
        refusals: Refusals,
    ) -> None:
        self._scheduler = core.scheduler
        self._view = core.view
        self._clock = core.clock
        self._guard = core.guard
        self._costs = core.learned.costs
        self._hooks = core.hooks
        self._decisions = core.decisions
        self._passes = core.passes
        self._placement = placement
        self._steals = steals
        self._stealing = steals.stealing
        self._graphs = graphs
        self._bundled = graphs.bundles.keys()
        self._samples = graphs.samples
        self._refusals = refusals
        self._refused = core.refused
        self._suspects = core.suspects
        self._sent_early = core.sent_early
        self._pauses = core.pauses
        #: Processing tasks whose durations are Dask's averages or its default, by prefix.
        self.averaged: dict[str, _Averaged] = {}

    def graph_created(self, keys: Iterable[Key], annotations: Collection[str]) -> None:
        """Handle a graph whose tasks were created: the policy orders them."""
        self._graphs.created()
        self._placement.task_views.annotations_arrived(annotations)
        for hook in self._hooks.update_graph:
            hook()
        states = [self._scheduler.tasks[key] for key in keys]
        self._placement.graph_arrived(states)
        if self._view.divisible:
            self._graphs.overtaking.make_room(states)
        self._passes.ask()

    def transition(self, key: Key, start: Any, finish: Any, *args: Any, **kwargs: Any) -> None:
        """Follow a task's transition: flat and with early returns, since a task makes five of them."""
        steal = None
        try:
            # Also after a failure: `stop` waits for them.
            if start == "processing" and self._stealing.in_flight:
                steal = _distributed.end_steal(self._stealing, self._scheduler.tasks[key])
            if self._guard.error is not None:
                return
            view = self._view
            if self._bundled or self._samples.running or view.dividing:
                if start == "processing" and finish != "memory" and key in view.assigned:
                    self._graphs.dividing.left(key, view.assigned[key][1].key)
                self._graphs.changed(key, finish)
            hooks = self._hooks
            if finish == "processing":
                ts = self._scheduler.tasks[key]
                self._entered_processing(ts)
                if ts.dependents:
                    for task_sent in hooks.task_sent:
                        task_sent(ts)
            else:
                if start == "processing":
                    ts = self._scheduler.tasks[key]
                    self._left_processing(ts, finish, kwargs, steal)
                if finish == "waiting" and (ts := self._scheduler.tasks[key]).waiting_on:
                    for task_waits in hooks.task_waits:
                        task_waits(ts)
                elif finish == "erred":
                    for task_failed in hooks.task_failed:
                        task_failed(self._scheduler.tasks[key])
            if "processing" in (start, finish) and not self._passes.is_asked_for:
                if view.n_idle and (view.n_crowded or view.divisible):
                    self._passes.ask()
                else:  # `any` would call a generator for each task
                    for wants_pass in hooks.wants_pass:
                        if wants_pass():
                            self._passes.ask()
                            break
            for watched, by_key, changed in hooks.watches:
                if watched and (not by_key or key in watched):
                    changed(key, start, finish)
            if start == "processing" and finish == "memory" and (metadata := kwargs.get("metadata")):
                for task_reported in hooks.task_reported:
                    task_reported(ts, metadata)
            if key in self._refused:
                self._refusals.changed(key, finish)
            if key in self._suspects:
                self._graphs.deaths.changed(key, finish)
        except FAILURES as error:
            self._guard.fail(error)

    def left_queue(self, ts: TaskState) -> None:
        """Handle a task that becomes long-running, or that another worker is about to steal."""
        self._view.release(ts.key)
        dividing = self._graphs.dividing
        if ts.key in self._bundled or ts.key in dividing.stuck.freed:
            self._scheduler.loop.add_callback(self._guard(dividing.may_have_seceded), ts.key)
        self._passes.ask()

    def restarted(self) -> None:
        """Forget all tasks: the cluster restarts."""
        self._steals.restarted()
        for key in list(self._view.assigned):
            self._view.release(key)
        self.averaged.clear()
        self._refused.clear()
        self._suspects.clear()
        for hook in self._hooks.restart:
            hook()
        self._graphs.restarted()

    def _entered_processing(self, ts: TaskState) -> None:
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

    def _left_processing(
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
            self._costs.record(ts, spent_s, nbytes, worker, details)
        sent = given = -1
        if (entry := self._view.assigned.get(key)) is not None:
            task, given = entry[0], entry[1].turn
            # Those that did not wait for inputs or for the end of another task.
            if key not in self._sent_early and task.input_bytes <= task.held.get(worker, 0):
                sent = task.sent
        self._view.finish(key, self._clock())
        if (averaged := self.averaged.get(ts.prefix.name)) is not None:
            self._correct_averages(ts, averaged)
        if first_s is not None and last_s is not None:
            self._pauses.task_ran(ts, worker, details.get("thread") or 0, (first_s, last_s), (sent, given))
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
