"""Dask's records of tasks, as in its task stream: they get an entry for each task in a bundle.

While such a record is kept, workers report start and stop of the tasks in bundles. Values that a bundle
delivers are reported with them in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.diagnostics.eventstream import EventStream
from distributed.diagnostics.task_stream import TaskStreamPlugin

from ferroflow_dask.scheduler.changes import Changes, Guard, ItemChange
from ferroflow_dask.scheduler.graphs.worker_runs import STEPS, TRACE
from ferroflow_dask.scheduler.hooks import take_reported

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Details of a transition that are about the result of a task.
_OF_RESULT = ("nbytes", "type", "typename", "metadata")


class TaskStreams:
    """Gives Dask's records of tasks an entry for each task of a bundle, and none for the bundle.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    changes : Changes
    guard : Guard
    may_send : callable
        Returns whether a worker understands the messages about bundles, by its address.
    """

    def __init__(
        self, scheduler: Scheduler, changes: Changes, guard: Guard, may_send: Callable[[str], bool]
    ) -> None:
        self._scheduler = scheduler
        self._changes = changes
        self._guard = guard
        self._may_send = may_send
        self._known: set[int] = set()

    def look(self) -> None:
        """Look for records that are kept since the last call."""
        had_none = not self._known
        for plugin in self._scheduler.plugins.values():
            if isinstance(plugin, TaskStreamPlugin | EventStream) and id(plugin) not in self._known:
                self._known.add(id(plugin))
                self._changes.make(self._change(plugin))
        if had_none:
            for address in self._scheduler.workers:
                self.worker_announced(address)

    def worker_announced(self, address: str) -> None:
        """Ask a worker for start and stop of each task if a record is kept."""
        if self._known and self._may_send(address):
            self._scheduler.worker_send(address, {"op": TRACE})

    def _change(self, plugin: TaskStreamPlugin | EventStream) -> ItemChange:
        stock: Callable[..., Any] = plugin.transition
        entries = self._guard(self._entries)

        def transition(key: Key, start: str, finish: str, *args: Any, **details: Any) -> None:
            steps = entries(key, details) if finish == "memory" else None
            for step, one in [(key, details)] if steps is None else steps:
                stock(step, start, finish, *args, **one)

        name = f"{type(plugin).__name__}.transition"
        return ItemChange(name, vars(plugin), "transition", transition)

    def _entries(self, key: Key, details: Mapping[str, Any]) -> list[tuple[Key, dict[str, Any]]] | None:
        """Return the tasks in a bundle, with the details of their transitions; None for other tasks."""
        steps = (details.get("metadata") or {}).get(STEPS)
        if steps is None:
            return None
        ts = self._scheduler.tasks.get(key)
        if ts is not None:
            take_reported(ts, {}, STEPS)  # other plugins get the same report
        common = {name: value for name, value in details.items() if name not in _OF_RESULT}
        # The first one has the transfers before the bundle, as a single task has them.
        before = [span for span in details.get("startstops") or () if span["action"] != "compute"]
        found = []
        for step, start_s, stop_s in steps:
            span = {"action": "compute", "start": start_s, "stop": stop_s}
            found.append((step, common | {"startstops": [*before, span]}))
            before = []
        return found
