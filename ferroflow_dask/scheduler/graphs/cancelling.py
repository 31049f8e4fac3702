"""Cancelling on the scheduler: what a client cancels, and the results that depend on it, also in bundles.

Dask cancels a task with all tasks that depend on it, and takes for granted that the client wants each of
them. Nobody wants a bundle: Dask's assertion would fail, and the client would lose its connection and all
results. A bundle may also hold tasks that do not depend on a cancelled one. They go on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.metrics import time

from ferroflow_dask.scheduler.changes import Change, Guard, ItemChange
from ferroflow_dask.scheduler.graphs.bundles import Bundles

if TYPE_CHECKING:
    from distributed.scheduler import ClientState, Scheduler, TaskState

_OPERATION = "cancel-keys"


class Cancelling:
    """Cancels tasks of which bundles read results.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    bundles : Bundles
    guard : Guard
    """

    def __init__(self, scheduler: Scheduler, bundles: Bundles, guard: Guard) -> None:
        self._scheduler = scheduler
        self._bundles = bundles
        self._guard = guard

    def change(self) -> Change:
        """Return the change to the scheduler."""
        handlers = self._scheduler.stream_handlers
        stock = handlers[_OPERATION]
        cancel = self._guard(self._cancel_instead, default=False)

        def handle(keys: Collection[Key], client: str, force: bool, **message: Any) -> Any:
            if not cancel(keys, client, force, message):
                stock(keys=keys, client=client, force=force, **message)

        return ItemChange(f"Scheduler.stream_handlers[{_OPERATION!r}]", handlers, _OPERATION, handle)

    def _cancel_instead(
        self, keys: Collection[Key], client: str, force: bool, message: dict[str, Any]
    ) -> bool:
        """Cancel tasks if Dask cannot; return whether it was done."""
        cs = self._scheduler.clients.get(client)
        if cs is None:
            return False
        found, is_stock = self._depending(keys, cs, force)
        if is_stock:
            return False
        self._scheduler.log_event(client, {"action": "cancel", "count": len(keys), "force": force})
        cancelled = [ts.key for ts in found]
        wanting = {one for ts in found for one in ts.who_wants or ()} if force else {cs}
        for one in wanting:
            self._scheduler.client_releases_keys(
                keys=cancelled, client=one.client_key, stimulus_id=f"cancel-key-{time()}"
            )
        self._scheduler.report({"op": "cancelled-keys", "keys": cancelled, **message})
        return True

    def _depending(
        self, keys: Collection[Key], cs: ClientState, force: bool
    ) -> tuple[Collection[TaskState], bool]:
        """Return the tasks to cancel, and whether Dask finds the same ones; O(edges)."""
        tasks, is_stock = self._scheduler.tasks, True
        found: dict[TaskState, None] = {}
        #: Values of each task that are cancelled, or depend on a cancelled one.
        lost: dict[TaskState, set[Key]] = {}
        stack = [(tasks[key], {key}) for key in keys if key in tasks]
        while stack:
            ts, values = stack.pop()
            new = values - lost.setdefault(ts, set())
            if not new:
                continue
            lost[ts] |= new
            if ts.who_wants:
                if not force and ts.who_wants != {cs}:
                    continue  # another client wants it
                found[ts] = None
            for reader in ts.dependents:
                is_stock &= bool(reader.who_wants) and self._bundles.get(reader.key) is None
                if read := self._lost_in(reader, ts, new):
                    stack.append((reader, read))
        return found, is_stock

    def _lost_in(self, reader: TaskState, ts: TaskState, lost: set[Key]) -> set[Key]:
        """Return the values of a task that depend on some values of a task that it reads."""
        bundle, source = self._bundles.get(reader.key), self._bundles.get(ts.key)
        if bundle is None:
            return {reader.key}
        names = {
            name
            for name, (holder, item) in bundle.places.items()
            if holder == ts.key and (source is None or source.exports[item or 0] in lost)
        }
        for task in bundle.tasks:
            if not names.isdisjoint(task.dependencies):
                names.add(task.key)
        return names.intersection(bundle.exports)
