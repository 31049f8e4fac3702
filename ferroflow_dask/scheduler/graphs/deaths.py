"""Deaths of workers: which tasks are blamed for one, and which bundles are split after it.

Dask counts a worker's death against every task that the worker had. The plugin sends more tasks to a worker
than Dask would, so most of them had not started. They are suspects: none is blamed, but each goes through
Dask's own queue from now on, so that a worker has no more of them than in stock. If it dies, too, those that
it had are blamed. The tasks of a bundle are suspects as well, one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.changes import Change, ItemChange

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.graphs.splitting import Splitting

#: States of a task after which it ends no worker.
_ENDED = frozenset({"memory", "erred", "forgotten"})


class Deaths:
    """Takes the blame for dead workers from tasks that may not have started.

    Parameters
    ----------
    core : Core
    splitting : Splitting
    """

    def __init__(self, core: Core, splitting: Splitting) -> None:
        self._scheduler = core.scheduler
        self._hooks = core.hooks
        self._restarted = core.restarted
        self._bundles = splitting.bundles
        self._split = splitting.split
        #: Lowers the counts that Dask is about to raise for the death of a worker, by its address.
        self.spare = core.guard(self._spare)
        self.suspects = core.suspects
        # Bundles of workers that are being removed, which may have ended them.
        self._to_split: dict[str, list[Key]] = {}

    def changes(self) -> Iterator[Change]:
        """Return the changes to the scheduler."""
        stock, spare = self._scheduler.remove_worker, self.spare

        # Dask counts deaths before it calls any hook.
        async def remove_worker(address: str, **options: Any) -> Any:
            if address in self._restarted:
                self._restarted.discard(address)
                options["expected"] = True
            if not options.get("expected"):
                spare(address)
            return await stock(address, **options)

        name = "remove_worker"
        yield ItemChange(f"Scheduler.{name}", vars(self._scheduler), name, remove_worker)
        handlers = self._scheduler.handlers
        yield ItemChange("Scheduler.handlers['unregister']", handlers, "unregister", remove_worker)

    def _spare(self, address: str) -> None:
        ws = self._scheduler.workers.get(address)
        if ws is None:
            return
        waited = {key for hook in self._hooks.worker_dies for key in hook(address)}
        processing = list(ws.processing)
        # What a worker has of Dask's own queue.
        is_usual = len(processing) <= ws.nthreads + 1
        self._to_split[address] = []
        self._move_apart([ts for ts in processing if ts.key in self.suspects and ts.key not in waited])
        for ts in processing:
            if self._bundles.is_splittable(ts.key):
                self._to_split[address].append(ts.key)
            elif ts.key in waited:
                pass
            # Dask queues no actors and no restricted tasks.
            elif is_usual or ts.key in self.suspects or ts.actor or _distributed.is_restricted(ts):
                continue
            else:
                self.suspects[ts.key] = None
            _distributed.lower_blame(self._scheduler, ts.key)

    def _move_apart(self, blamed: Sequence[TaskState]) -> None:
        """Give suspects that share the blame turns among the others, or they would be on one worker again."""
        own = {ts.key for ts in blamed}
        turns: defaultdict[tuple[float, ...], list[tuple[float, ...]]] = defaultdict(list)  # by graph
        for turn in sorted(_turn(self._scheduler.tasks[key]) for key in self.suspects if key not in own):
            turns[turn[:-1]].append(turn)
        for i, ts in enumerate(sorted(blamed, key=_turn)):
            if found := turns.get(_turn(ts)[:-1]):
                ts.priority = found[i * len(found) // len(blamed)]

    def removed(self, address: str) -> None:
        """Split the bundles that may have ended a worker, before Dask sends them to another one."""
        for key in self._to_split.pop(address, ()):
            bundle = self._bundles.get(key)
            steps = [task.key for task in bundle.tasks] if bundle is not None else []
            self.suspects.update(dict.fromkeys(steps))  # first: some are placed at once
            self._split(key, "ferroflow-split", keeps=True)
            for step in steps:
                ts = self._scheduler.tasks.get(step)
                self.changed(step, "forgotten" if ts is None else ts.state)

    def changed(self, key: Key, finish: str) -> None:
        """Forget a suspect that has ended, or whose result nothing needs any more."""
        if finish in _ENDED or (finish == "released" and not _is_needed(self._scheduler.tasks[key])):
            self.suspects.pop(key, None)


def _is_needed(ts: TaskState) -> bool:
    return bool(ts.waiters or ts.who_wants)


def _turn(ts: TaskState) -> tuple[float, ...]:
    return ts.priority or ()
