"""What becomes of tasks on workers: the scheduler's transitions, as changes of the view.

What ends is learned from: durations, transfers, the speeds of workers and round trips.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.stealing import InFlightInfo

from ferroflow_dask.annotations import GPU, KIND_ANNOTATION, RANK_ANNOTATION
from ferroflow_dask.plugin.describe import declared_cost
from ferroflow_dask.plugin.durations import Durations
from ferroflow_dask.plugin.prices import Prices
from ferroflow_dask.plugin.slots import Slots
from ferroflow_dask.plugin.steals import Steals
from ferroflow_dask.policy import TaskView
from ferroflow_dask.policy.events import TaskFinished

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Annotations of tasks of our graphs, whose ops run on devices where there are some.
_OF_OUR_GRAPHS = frozenset((KIND_ANNOTATION, RANK_ANNOTATION))


class Tracking(Steals):
    """The part of the shell that follows tasks; `FerroflowStealing` makes what it needs."""

    durations: Durations
    _planned: dict[Key, str]
    _prices: Prices
    _slots: Slots

    @abstractmethod
    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call, unless we failed before; any exception is a failure of ours, never of the scheduler."""

    def transition(self, key: Key, start: Any, finish: Any, *args: Any, **kwargs: Any) -> None:
        """Keep the view up to date with a task's state."""
        if start == "processing":
            ts = self.scheduler.tasks[key]
            steal = self._remove_from_in_flight(ts)  # also after a failure: others wait for it to end
            self._guarded(self._left_processing, ts, finish, kwargs, steal)
        elif finish == "processing":
            self._guarded(self._entered_processing, self.scheduler.tasks[key])
        elif finish in ("released", "erred", "forgotten"):
            self._guarded(self._bypass.left, key)
        self._guarded(self.messages.changed, key, start, finish)

    def _left_processing(
        self, ts: TaskState, finish: str, details: dict[str, Any], steal: InFlightInfo | None
    ) -> None:
        if steal is not None:  # it ended before the answer came: it was the victim's all the time
            self._steal_ended(ts.key, "aborted", steal["victim"], "the task ended before the answer came")
            self._return_to(ts, steal["victim"])
        spans, spent_s, fetched_s = [], 0.0, 0.0
        for span in details.get("startstops") or ():
            if span["action"] == "compute":
                spans.append((span["start"], span["stop"]))
                spent_s += span["stop"] - span["start"]
            elif span["action"] == "transfer":
                fetched_s += span["stop"] - span["start"]
        self._prices.left(ts)
        if finish == "memory":
            self.view.observe_transfer(ts.key, fetched_s)
            if not self._ends_later(ts, details["worker"]):
                expected_s = self.durations.usual(ts) if declared_cost(ts) is None else None
                self.view.observe(ts.key, spent_s, expected_s)
                self.durations.record(ts, spent_s, details["nbytes"])
        self.view.finish(ts.key, self.clock())
        self._bypass.left(ts.key)
        if finish == "memory":
            self._prices.ended(ts)
            if spans:
                thread = (details["worker"], details.get("thread") or 0)
                has_waited = ts.key not in self.messages.successors.early
                self._slots.finished(ts, thread, spans[0][0], spans[-1][1], has_waited)
            self._tell(TaskFinished(ts.key, details["worker"], spent_s, details["nbytes"]))
        self._passes.ask()

    def _ends_later(self, ts: TaskState, address: str) -> bool:
        # On a device our tasks return once their work is enqueued; how long it took is told afterwards.
        worker = self.view.workers.get(address)
        is_ours = ts.annotations is not None and not ts.annotations.keys().isdisjoint(_OF_OUR_GRAPHS)
        return is_ours and worker is not None and worker.kind == GPU

    def _entered_processing(self, ts: TaskState) -> None:
        self._planned.pop(ts.key, None)
        ws = ts.processing_on
        assert ws is not None
        entry = self.view.assigned.get(ts.key)
        if entry is None or entry[1].key != ws.address:
            self.journal.note(
                self.clock(), ts.key, "placed", ws.address, "by Dask, from its queue or as it was asked to"
            )
            self.view.assign(self._describe(ts), ws.address, self.clock())
        self._sent(ts, self.view.assigned[ts.key][0])
        self._passes.ask()

    def _sent(self, ts: TaskState, task: TaskView) -> None:
        self._bypass.sent(task)
        if not task.has_cost:
            self._prices.sent(ts)
