"""Worker messages: prefetched tasks and inlined results, between the scheduler and its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask import config
from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import CallChange, Changes
from ferroflow_dask.scheduler.inlining.scheduler import Inlining
from ferroflow_dask.scheduler.prefetch.scheduler import Prefetch

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core


class WorkerMessages:
    """Changes what the scheduler and its workers send each other, and when.

    Nothing is changed before `open`; the registry of changes undoes it.

    Parameters
    ----------
    core : Core
    is_usual : callable
        Returns whether a worker, by its address, is as fast as others.
    was_withdrawn : callable
        Called with the key of a task that was prefetched in vain, and the worker's address.
    changes : Changes
        Registry of the changes.
    """

    def __init__(
        self,
        core: Core,
        *,
        is_usual: Callable[[str], bool],
        was_withdrawn: Callable[[Key, str], None],
        changes: Changes,
    ) -> None:
        self._scheduler = core.scheduler
        self._changes = changes
        self._guard = core.guard
        self.inlining = Inlining(core)
        self.prefetch = Prefetch(core, is_usual, was_withdrawn, self.inlining)

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

    def change_tasks(self, keeps_successors: bool, answers_clients: bool = True) -> None:
        """Prefetch tasks and inline results, with workers that announce that they support it."""
        if keeps_successors and config.get_bool("prefetch"):
            self._changes.make(self.prefetch.remote)
            self._changes.make(CallChange("prefetched tasks", self.prefetch.open, self.prefetch.close))
        if limit := config.get_bytes("inline-limit"):
            self._changes.make(self.inlining.remote)
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
        self.prefetch.left(address)

    def _completed(self, ts: TaskState, message: dict[str, Any]) -> dict[str, Any]:
        """Return Dask's message for a task, with additions."""
        return message if ts.processing_on is None else self.inlining.message(ts, ts.processing_on, message)
