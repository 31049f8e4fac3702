"""Splitting: the tasks of a bundle run one by one.

A bundle is split if a task in it raises an exception, asks for another worker, or may have ended its worker.
Errors, retries and blame are then those of single tasks, as in Dask. Tasks of the bundle that had already
run, run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dask._task_spec import Alias, GraphNode
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.graphs import written_task
from ferroflow_dask.bundling.results import Place
from ferroflow_dask.scheduler._distributed_graphs import Failed, replace_task
from ferroflow_dask.scheduler.changes import Change, ItemChange

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.graphs.bundles import Bundles

#: Operations of messages from workers: a task raised an exception, or `distributed.Reschedule`.
_ERRED, _RESCHEDULE = "task-erred", "reschedule"
#: States from which a bundle is not split: it has ended, or its tasks do not exist yet.
_ENDED = frozenset({"memory", "erred", "forgotten"})


class Splitting:
    """Splits bundles.

    Parameters
    ----------
    core : Core
    bundles : Bundles
    """

    def __init__(self, core: Core, bundles: Bundles) -> None:
        self._scheduler = core.scheduler
        self._guard = core.guard
        self._decisions = core.decisions
        self.bundles = bundles

    def changes(self) -> Iterable[Change]:
        """Return the changes to the scheduler."""
        handlers = self._scheduler.stream_handlers
        for operation in (_ERRED, _RESCHEDULE):
            stock = handlers[operation]
            split = self._guard(partial(self._split_instead, operation), default=False)

            # Defaults bind the values of this round.
            def handle(key: Key, stock: Any = stock, split: Any = split, **message: Any) -> Any:
                return None if split(key, message) else stock(key=key, **message)

            yield ItemChange(f"Scheduler.stream_handlers[{operation!r}]", handlers, operation, handle)

    def _split_instead(self, operation: str, key: Key, message: Mapping[str, Any]) -> bool:
        """Split the bundle that a worker's message is about; return whether that replaces Dask's handling."""
        ts = self._scheduler.tasks.get(key)
        if ts is None or ts.state != "processing" or ts.processing_on is None:
            return False
        if ts.run_id != message.get("run_id", ts.run_id) or ts.processing_on.address != message.get("worker"):
            return False  # Dask ignores the end of an earlier run
        stimulus_id = str(message.get("stimulus_id"))
        if self.split(key, stimulus_id):
            return True
        if operation == _ERRED and not ts.retries:
            self.split_readers(ts, stimulus_id)
        return False

    def split_readers(self, ts: TaskState, stimulus_id: str) -> None:
        """Split the bundles that would fail as a whole, but only partly depend on a failing task."""
        for failing in _dependents(ts) if self.bundles else ():
            for reader in list(failing.dependents):
                bundle = self.bundles.get(reader.key)
                if bundle is not None and len(bundle.exports) > 1:
                    self.split(reader.key, stimulus_id)

    def split(self, key: Key, stimulus_id: str, *, failed: Failed | None = None, keeps: bool = False) -> bool:
        """Run the tasks of a bundle one by one; return False if the key is not that of a bundle.

        Must not be called within a transition.

        Parameters
        ----------
        key : Key
        stimulus_id : str
        failed : Failed, optional
            A task of the bundle that has failed.
        keeps : bool, optional
            Whether Dask is about to release the task, if it keeps its key.
        """
        bundle, ts = self.bundles.get(key), self._scheduler.tasks.get(key)
        if bundle is None or not self.bundles.is_splittable(key) or ts is None or ts.state in _ENDED:
            return False
        if self.bundles.has_run(key):
            return False  # it has run without an error
        is_kept = any(task.key == key for task in bundle.tasks)  # under the key of its only value
        if not is_kept and any(reader.key not in self.bundles for reader in ts.dependents):
            return False  # a reader of an earlier installation cannot be rewritten
        self.bundles.forget(key)
        self.bundles.counts["split"] += 1
        self._decisions.note(key, "split", "", "its tasks run one by one")
        self.bundles.note_redefined(key)
        values = {
            reader.key for reader in ts.dependents if not is_kept and self.bundles.is_only_value(reader.key)
        }
        # A task of the same key that depends on the bundle cannot stand for the one in it.
        taken = {one.key for one in _dependents(ts)} - {key} - values
        names = {
            task.key: self._new_key(task.key) if task.key in taken else task.key for task in bundle.tasks
        }
        readers: dict[Key, GraphNode] = {}
        if not is_kept:
            moved: dict[Place, Place] = {
                bundle.place(key, one): (names[one], None) for one in bundle.exports if one is not None
            }
            readers = self.bundles.rewrite(self.bundles.moved_readers(ts, moved))
        specs = dict(self.specs(bundle, names))
        for one in specs.keys() & readers.keys():  # another graph has given the value its own key
            self.bundles.forget(one)
            readers[one] = specs[one]
        keeps &= key in specs
        replace_task(self._scheduler, ts, specs, readers, stimulus_id, keeps=keeps, failed=failed)
        return True

    def _new_key(self, key: Key) -> Key:
        return (f"{key_split(key)}-{self.bundles.token()}", 0)

    def specs(self, bundle: Bundle, names: Mapping[Key, Key]) -> Iterable[tuple[Key, GraphNode]]:
        """Yield the tasks that replace a bundle, by key, each after those that it reads."""
        renamed: dict[Key, Key | GraphNode] = {key: name for key, name in names.items() if name != key}
        for outer, (holder, item) in bundle.places.items():
            if (holder, item) == (outer, None):
                continue
            # A task of the outer key may exist for another graph, with another value.
            renamed[outer] = name = self._new_key(outer)
            reading = Bundle((Alias(name, outer),), (name,), {outer: (holder, item)})
            self.bundles.expect({name: reading})
            yield name, written_task(name, reading, 0.0)
        for task in bundle.tasks:
            name = names[task.key]
            if not renamed.keys() & {task.key, *task.dependencies}:
                yield name, task
                continue
            if name == task.key:  # later graphs have other dependencies for this key, and leave it out
                places: dict[Key, Place] = {key: (key, None) for key in task.dependencies}
                self.bundles.expect({name: Bundle((task,), (name,), places)})
            yield name, task.substitute(renamed, key=name)


def _dependents(ts: TaskState) -> Iterator[TaskState]:
    """Yield a task, then the tasks that depend on it when the walk comes to them; O(edges)."""
    stack, seen = [ts], {ts}
    while stack:
        one = stack.pop()
        yield one
        new = [reader for reader in one.dependents if reader not in seen]
        seen.update(new)
        stack += new
