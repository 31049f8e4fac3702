"""Bundles on the scheduler: which tasks each holds, and how one is split into its tasks again.

A bundle is split if a task in it raises an exception, asks for another worker, or may have ended its worker.
The scheduler then runs its tasks one by one, so that errors, retries and blame are those of single tasks, as
in Dask. Tasks of the bundle that had already run, run again.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dask._task_spec import Alias, GraphNode
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.graphs import written_task
from ferroflow_dask.scheduler import _distributed_graphs
from ferroflow_dask.scheduler.changes import Change, Guard, ItemChange

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Operations of messages from workers: a task raised an exception, or `distributed.Reschedule`.
_ERRED, _RESCHEDULE = "task-erred", "reschedule"
#: States from which a bundle is not split: it has ended, or its tasks do not exist yet.
_ENDED = frozenset({"memory", "erred", "forgotten"})


class Bundles:
    """The bundles whose tasks the scheduler has.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    withdraw : callable
        Withdraws a prefetched task, by its key.
    note : callable
        Notes a decision about a task: its key, what was decided and why.
    guard : Guard
    """

    def __init__(
        self,
        scheduler: Scheduler,
        withdraw: Callable[[Key], None],
        note: Callable[[Key, str, str], None],
        guard: Guard,
    ) -> None:
        self._scheduler = scheduler
        self._withdraw = withdraw
        self._note = note
        self._guard = guard
        self._bundles: dict[Key, Bundle] = {}
        #: Bundles of several tasks that were created, the tasks in them, and bundles that were split.
        self.counts = {"created": 0, "tasks": 0, "split": 0}

    def __len__(self) -> int:
        return len(self._bundles)

    def keys(self) -> Collection[Key]:
        """Return the keys of all tasks that differ from those of their graph."""
        return self._bundles.keys()

    def add(self, bundles: Mapping[Key, Bundle]) -> None:
        """Note the bundles of a graph, whose tasks were created."""
        for key, bundle in bundles.items():
            self._bundles[key] = bundle
            if len(bundle.tasks) > 1:
                self.counts["created"] += 1
                self.counts["tasks"] += len(bundle.tasks)
                self._note(key, "bundled", in_words(bundle))

    def forget(self, key: Key) -> None:
        """Forget a task."""
        self._bundles.pop(key, None)

    def clear(self) -> None:
        """Forget all tasks."""
        self._bundles.clear()

    def holding(self, name: str) -> list[Key]:
        """Return the bundles that hold a task, by the text of its key; O(tasks in bundles)."""
        return [
            key for key, bundle in self._bundles.items() if any(str(one.key) == name for one in bundle.tasks)
        ]

    def changes(self) -> Iterable[Change]:
        """Return the changes to the scheduler."""
        handlers = self._scheduler.stream_handlers
        for operation in (_ERRED, _RESCHEDULE):
            stock = handlers[operation]
            split = self._guard(self._split_instead, default=False)

            # Defaults bind the values of this round.
            def handle(key: Key, stock: Any = stock, split: Any = split, **message: Any) -> Any:
                return None if split(key, message) else stock(key=key, **message)

            yield ItemChange(f"Scheduler.stream_handlers[{operation!r}]", handlers, operation, handle)

    def _split_instead(self, key: Key, message: Mapping[str, Any]) -> bool:
        """Split the bundle that a worker's message is about; return whether that replaces Dask's handling."""
        ts = self._scheduler.tasks.get(key)
        if ts is None or ts.state != "processing" or ts.processing_on is None:
            return False
        if ts.run_id != message.get("run_id", ts.run_id) or ts.processing_on.address != message.get("worker"):
            return False  # Dask ignores the end of an earlier run
        return self.split(key, str(message.get("stimulus_id")))

    def split_suspicious(self, keys: Iterable[Key]) -> None:
        """Split the bundles among tasks whose worker died, as one of their tasks may have ended it."""
        for key in keys:
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ts.suspicious:
                self.split(key, "ferroflow-split")

    def split(self, key: Key, stimulus_id: str) -> bool:
        """Let the tasks of a bundle run one by one; return False if the key is not that of a bundle.

        Must not be called within a transition.
        """
        bundle, ts = self._bundles.get(key), self._scheduler.tasks.get(key)
        if bundle is None or len(bundle.tasks) < 2 or ts is None or ts.state in _ENDED:
            return False
        inner = {task.key for task in bundle.tasks}
        if key not in inner and any(reader.key not in self._bundles for reader in ts.dependents):
            return False  # a reader of an earlier installation cannot be rewritten
        for dependent in ts.dependents:
            self._withdraw(dependent.key)
        self._withdraw(key)
        del self._bundles[key]
        self.counts["split"] += 1
        self._note(key, "split", "a task in it failed; its tasks run one by one")
        specs = dict(self._specs(key, bundle))
        readers: dict[Key, GraphNode] = {}
        if key not in inner:
            for dependent in ts.dependents:
                own = self._bundles[dependent.key] = self._bundles[dependent.key].after_split(
                    key, bundle.exports
                )
                cost_s = getattr(getattr(dependent.run_spec, "func", None), "cost_s", None)
                readers[dependent.key] = written_task(dependent.key, own, cost_s or 0.0)
                if own.is_plain(dependent.key):
                    readers[dependent.key] = own.tasks[0]
                    del self._bundles[dependent.key]
        _distributed_graphs.replace_task(self._scheduler, ts, specs, readers, stimulus_id)
        return True

    def _specs(self, key: Key, bundle: Bundle) -> Iterable[tuple[Key, GraphNode]]:
        """Yield the tasks that replace a bundle, by key, each after those that it reads."""
        renamed: dict[Key, Key | GraphNode] = {}
        for outer, (holder, item) in bundle.places.items():
            if (holder, item) == (outer, None):
                continue
            # A task of this key may exist for another graph, and may have another value.
            name: Key = outer
            if outer in self._scheduler.tasks:
                renamed[outer] = name = (f"{key_split(outer)}-{uuid.uuid4().hex}", 0)
            reading = Bundle((Alias(name, outer),), (name,), {outer: (holder, item)})
            self._bundles[name] = reading
            yield name, written_task(name, reading, 0.0)
        for task in bundle.tasks:
            yield task.key, task.substitute(renamed) if renamed.keys() & task.dependencies else task


def in_words(bundle: Bundle) -> str:
    """Return the number of tasks of a bundle by prefix."""
    prefixes = Counter(key_split(task.key) for task in bundle.tasks)
    return f"{len(bundle.tasks)} tasks: {', '.join(f'{n} {prefix}' for prefix, n in prefixes.most_common())}"
