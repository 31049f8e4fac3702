"""Worker messages: prefetched tasks and inlined results, between the scheduler and its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed import WorkerPlugin

from ferroflow_dask import config
from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import CallChange, Changes, Guard
from ferroflow_dask.scheduler.inlining import worker as inlining_worker
from ferroflow_dask.scheduler.inlining.scheduler import Inlining
from ferroflow_dask.scheduler.prefetch import worker as prefetch_worker
from ferroflow_dask.scheduler.prefetch.scheduler import Prefetch
from ferroflow_dask.scheduler.worker_plugins import WorkerPluginChange

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from ferroflow_dask.scheduler.cost_model import CostModel


class WorkerMessages:
    """Changes what the scheduler and its workers send each other, and when.

    Nothing is changed before `open`; the registry of changes undoes it.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    costs : CostModel
        Knows the sizes of results.
    is_usual : callable
        Returns whether a worker, by its address, is as fast as others.
    ask_pass : callable
        Asks for a call of `prefetch.send` after the present transitions.
    was_withdrawn : callable
        Called with the key of a task that was prefetched in vain, and the worker's address.
    sent_early : set of Key
        As in `Core`.
    changes : Changes
        Registry of the changes.
    guard : Guard
    """

    def __init__(
        self,
        scheduler: Scheduler,
        costs: CostModel,
        *,
        is_usual: Callable[[str], bool],
        ask_pass: Callable[[], None],
        was_withdrawn: Callable[[Key, str], None],
        sent_early: set[Key],
        changes: Changes,
        guard: Guard,
    ) -> None:
        self._scheduler = scheduler
        self._changes = changes
        self._guard = guard
        #: The changes on workers, which are made and undone by coroutines.
        self.on_workers: list[WorkerPluginChange] = []
        self.inlining = Inlining(scheduler, costs)
        self.prefetch = Prefetch(
            scheduler, is_usual, ask_pass, was_withdrawn, inlining=self.inlining, early=sent_early
        )

    def open(self, keeps_successors: bool) -> None:
        """Make the changes that the configuration asks for, on the scheduler and on the workers.

        Parameters
        ----------
        keeps_successors : bool
            As in the policy.
        """
        answers_clients = not _distributed.is_in_process(self._scheduler)
        self.change_tasks(keeps_successors, answers_clients)
        if self.inlining.is_open and answers_clients:
            value_of = self._guard(self.inlining.value_of)
            self._changes.make(_distributed.gather_change(self._scheduler, value_of))
        if self.prefetch.is_open:
            self._put_on_workers(prefetch_worker.WorkerPrefetch(), "ferroflow-prefetch")
        if self.inlining.is_open:
            self._put_on_workers(inlining_worker.WorkerInlining(), "ferroflow-inlining")

    def _put_on_workers(self, plugin: WorkerPlugin, name: str) -> None:
        change = WorkerPluginChange(self._scheduler, plugin, name, self._guard.fail)
        self.on_workers.append(change)
        self._changes.make(change)

    def change_tasks(self, keeps_successors: bool, answers_clients: bool = True) -> None:
        """Prefetch tasks and inline results, with workers that announce that they support it."""
        if keeps_successors and config.get_bool("prefetch"):
            self._changes.make(CallChange("prefetched tasks", self.prefetch.open, self.prefetch.close))
        if limit := config.get_bytes("inline-limit"):
            keep = lambda: self.inlining.open(limit, answers_clients)  # noqa: E731 -- as short as its use
            self._changes.make(CallChange("inlined results", keep, self.inlining.close))
        if self.prefetch.is_open or self.inlining.is_open:
            may_drop = self._guard(self.prefetch.may_drop, default=True)
            for change in _distributed.message_changes(
                self._scheduler,
                self.prefetch.ahead,
                instead=self._guard(self.prefetch.message),
                completed=self._guard(self._completed),
                may_drop=may_drop,
            ):
                self._changes.make(change)

    def clear(self) -> None:
        """Forget all tasks."""
        self.prefetch.clear()
        self.inlining.clear()

    def worker_left(self, address: str) -> None:
        """Forget a worker."""
        self.inlining.left(address)
        self.prefetch.left(address)

    def event(self, topic: str, msg: Any) -> None:
        """Note that a worker announces what it supports."""
        if topic == prefetch_worker.TOPIC and isinstance(msg, dict):
            self.prefetch.supports(msg.get("worker", ""), msg.get("number", 0))
        elif topic == inlining_worker.TOPIC and isinstance(msg, dict):
            self.inlining.supports(msg.get("worker", ""), msg.get("number", 0))

    def _completed(self, ts: TaskState, message: dict[str, Any]) -> dict[str, Any]:
        """Return Dask's message for a task, with additions."""
        return message if ts.processing_on is None else self.inlining.message(ts, ts.processing_on, message)
